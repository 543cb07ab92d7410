"""Bytes and seconds as people write them. The only place that parses or formats numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path

from .errors import BadInput

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]+)\s*$")


def parse_bytes(text: str | int | float, *, of: int | None = None) -> int:
    """'24GiB' -> 25769803776. A bare int is bytes; a fraction such as 0.9 is a share of `of`, when a whole is given.

    '24G' and '24gb' are refused: nobody knows whether they mean 10⁹ or 2³⁰, bits or bytes.
    """
    if isinstance(text, bool):
        raise BadInput(f"{text!r} is not a number of bytes; write it like '24GiB'")
    try:
        return _parsed(text, of)
    except OverflowError:
        raise BadInput(f"{str(text)[:20]!r}... is more bytes than there are; write it like '24GiB'") from None


def _parsed(text: str | int | float, of: int | None) -> int:
    if isinstance(text, (int, float)) or re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*", str(text)):
        number = float(text)
        if isinstance(text, int) or (number > 1 and number == int(number)):
            return _positive(int(text), text) if isinstance(text, int) else _positive(int(number), text)
        if 0 < number <= 1 and of is not None:
            return _positive(int(number * of), text)
        raise BadInput(f"{text!r} is not a number of bytes; write it like '24GiB' or '800MB'")
    match = _BYTES.match(str(text))
    if not match or match[2] not in _BYTE_UNITS:
        raise BadInput(f"{text!r} is not a number of bytes; write a number and one of {', '.join(_BYTE_UNITS)}, like '24GiB'")
    return _positive(int(float(match[1]) * _BYTE_UNITS[match[2]]), text)


def _positive(nbytes: int, text: object) -> int:
    if nbytes <= 0:
        raise BadInput(f"{text!r} is {nbytes} bytes; a budget must be larger than 0")
    return nbytes


def parse_store(text: str) -> tuple[Path, int]:
    """'/scratch:200GiB' -> a directory and how many bytes of it may be used. The size follows the last colon, so 'D:\\scratch:1TB' works."""
    directory, colon, size = str(text).rpartition(":")
    if not colon or not directory.strip():
        raise BadInput(f"{text!r} does not name a directory and a size; write it like '/scratch:200GiB'")
    return Path(directory.strip()).expanduser(), parse_bytes(size)


def format_bytes(nbytes: float) -> str:
    """25769803776 -> '24.0 GiB'; three significant digits, binary units."""
    size = abs(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            if unit == "B":
                return f"{nbytes:.0f} B"
            return f"{nbytes:.{_decimals(size)}f} {unit}"
        nbytes, size = nbytes / 1024, size / 1024
    raise AssertionError("unreachable")


def exact_bytes(nbytes: int) -> str:
    """A size a person can copy back as a budget: rounded up to the next MiB, or exact bytes when small."""
    if nbytes < 1 << 24:
        return f"{nbytes}B"
    return f"{math.ceil(nbytes / (1 << 20))}MiB"


def format_seconds(seconds: float) -> str:
    """0.0513 -> '51.3 ms'."""
    size = abs(seconds)
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if size * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.{_decimals(size * scale)}f} {unit}"
    raise AssertionError("unreachable")


def _decimals(size: float) -> int:
    """How many decimals give three significant digits."""
    return 0 if size >= 100 else 1 if size >= 10 else 2
