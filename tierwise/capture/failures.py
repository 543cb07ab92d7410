"""Why a model could not be traced, in one sentence that names the place in the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CaptureError
from .torch_compat import DATA_DEPENDENT, NO_FAKE_IMPLEMENTATION

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def explain(error: Exception, batch: Any, *, during: str) -> CaptureError:
    place = _place(error)
    what = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, DATA_DEPENDENT):
        op = getattr(error, "func", "an op")
        return CaptureError(
            f"the {during} looks at the values of a tensor at {place} ({op}), and a step is captured without them; compute it before the step and "
            f"pass it in as a Python number, or use an op whose result has a fixed shape (torch.where with three arguments, a product with a mask)"
        )
    if isinstance(error, NO_FAKE_IMPLEMENTATION) or "register_fake" in str(error):
        return CaptureError(f"{what}, at {place}; give that op a shape rule with torch.library.register_fake")
    return CaptureError(
        f"the {during} of this model on this batch fails at {place} with {what}; the batch is {_describe(batch)}: check that its names, shapes "
        f"and types are what the model takes, by running model(**batch) once on real tensors"
    )


def _place(error: BaseException) -> str:
    """The deepest line of the traceback that is neither torch's nor ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((*_NOT_THE_USERS, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the call of the model itself"


def _describe(batch: Any) -> str:
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_describe(value)}" for key, value in batch.items()) or "empty"
    if isinstance(batch, (tuple, list)):
        return ", ".join(map(_describe, batch)) or "empty"
    return type(batch).__name__


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".")
