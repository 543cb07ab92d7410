"""What was measured once, kept on disk: numbers by key. A key says everything the numbers depend on, torch and the processor included."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Numbers = tuple[float, ...]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierwise"


class TimingCache:
    """Numbers by key; a file that cannot be read is an empty one, and one that cannot be written costs time, nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = _read(path)
        self._new: dict[str, Numbers] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def __getitem__(self, key: str) -> Numbers:
        return self.found[key]

    def __setitem__(self, key: str, numbers: Sequence[float]) -> None:
        self.found[key] = self._new[key] = tuple(map(float, numbers))

    def save(self) -> None:
        """Add what is new to the file, as it is now: another process may have added something too."""
        if not self._new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(f".{os.getpid()}.part")
            scratch.write_text(json.dumps(_read(self.path) | self._new), encoding="utf-8")
            scratch.replace(self.path)
            self._new = {}
        except OSError:
            pass


def _read(path: Path) -> dict[str, Numbers]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): tuple(float(number) for number in numbers) for key, numbers in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
