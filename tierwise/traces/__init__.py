"""Steps that others recorded and published results for, as Problems. One module for each form; `load_trace` recognises which it is."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadFile

if TYPE_CHECKING:
    from .dtr import DtrTrace
    from .g10 import G10Trace


def load_trace(path: str | Path) -> DtrTrace | G10Trace:
    """Read a trace of either form: `.problem` is the step, `.published` what was reported for it."""
    document = read_json(path)
    if {"ops", "storages"} <= document.keys():
        from . import dtr

        return dtr.load(path)
    if {"kernels", "tensors"} <= document.keys():
        from . import g10

        return g10.load(path)
    raise BadFile(f"{path} is no trace of a known form: a DTR trace has 'ops' and 'storages', a G10 trace 'kernels' and 'tensors'")


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file, which may be compressed."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; name an existing file") from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not JSON ({error}); a trace is one JSON object") from None
    if not isinstance(document, dict):
        raise BadFile(f"{path} holds a {type(document).__name__}; a trace is one JSON object")
    return document
