"""Machine profiles that ship with Tierwise: one JSON file each, and each says what in it is measured and what comes from a data sheet."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnknownName
from ..ir import Machine, serial

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load(name_or_path: str | Path) -> Machine:
    """A shipped machine by its name, or any machine file by its path (which has a folder or ends in .json or .json.gz)."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".json", ".json.gz")):
        machine: Machine = serial.load(name_or_path, Machine)
        return machine
    if text not in names():
        raise UnknownName("machine", text, names())
    shipped: Machine = serial.load(_FOLDER / f"{text}.json", Machine)
    return shipped
