"""Safetensors files as tensors mapped into memory: nothing is read until it is used, and what was read can be forgotten by the system.

The format is 8 bytes of length, a JSON header of that length, and the tensors' bytes. A large model is several files and an index that names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...errors import BadFile

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
MOST_HEADER_BYTES = 100 << 20  # what the format allows


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a `.safetensors` file, of a folder of them, or of an index file, by name. They are private copies on write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, _File] = {}
        for part in _parts(self.path):
            file = _File(part)
            for name in file.entries:
                if name in self._files:
                    raise BadFile(f"{name} is in {self._files[name].path} and in {part}; a checkpoint has every tensor once")
                self._files[name] = file

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= MOST_HEADER_BYTES:
                    raise BadFile(f"{path} is not a safetensors file: its header would be {length} bytes long")
                header: dict[str, Any] = json.loads(file.read(length))
            self._nbytes = path.stat().st_size
        except OSError as error:
            raise BadFile(f"{path} cannot be read: {error.strerror or error}; check the path") from None
        except ValueError:
            raise BadFile(f"{path} is not a safetensors file: its header is not JSON") from None
        self.entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._start = 8 + length

    @cache  # noqa: B019 - a handful of files, as long as the checkpoint is used
    def _bytes(self) -> torch.Tensor:
        return torch.from_file(str(self.path), shared=False, size=self._nbytes, dtype=torch.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        dtype = TYPES.get(entry["dtype"])
        if dtype is None:
            raise BadFile(f"{name} in {self.path} is of type {entry['dtype']}, which is not known here; convert the checkpoint")
        start, stop = (self._start + offset for offset in entry["data_offsets"])
        if stop > self._nbytes:
            raise BadFile(f"{self.path} has {self._nbytes} bytes and {name} would end at byte {stop}; it was cut short")
        raw = self._bytes()[start:stop]
        if start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry["shape"])


def _parts(path: Path) -> list[Path]:
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        found = sorted(path.glob("*.safetensors"))
        if index.exists():
            return _parts(index)
        if not found:
            raise BadFile(f"there is no .safetensors file in {path}")
        return found
    if path.name.endswith(".index.json"):
        try:
            names: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError):
            raise BadFile(f"{path} is not the index of a safetensors checkpoint") from None
        return [path.parent / name for name in dict.fromkeys(names.values())]
    return [path]
