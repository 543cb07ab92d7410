"""States that outlive the process: written beside the last one, put in its place in one rename when they are complete and on disk.

A state is a data file `NAME-000001.state` and a manifest `NAME.manifest` that names it, its length and the checksum of every block. The
manifest carries its own checksum and is renamed into place last. So there is always one whole state or none: a crash in the middle leaves
the last one, and bytes that are not what was written are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..errors import BadFile, BadInput, CorruptBlock, StorageFull, UnknownName
from ..units import format_bytes
from .blocks import BlockIO, Extent
from .files import PageFile, exclusive, remove_if_abandoned, replace_whole, sync_directory
from .host_pool import PAGE_BYTES
from .lanes import Event, settled
from .offsets import round_up

_FORMAT = 1


class Publisher:
    """A state being written, complete when the `with` block ends without an exception."""

    def __init__(self, directory: Path, name: str, nbytes: int, io: BlockIO) -> None:
        _check_name(name)
        self._directory, self._name, self._io = directory, name, io
        self._entries: dict[str, Extent] = {}
        self._end_bytes = 0
        self._named = False  # by the manifest: from then on this is the state
        with exclusive(directory):
            with contextlib.suppress(BadFile, CorruptBlock):  # a manifest that cannot be read names nothing: then nothing is removed
                _remove_states(directory, name, but=_read_manifest(directory, name)["file"])
            path = directory / f"{name}-{max([0, *_states(directory, name)]) + 1:06d}.state"
            self._file = PageFile(path, nbytes=round_up(max(nbytes, 1), PAGE_BYTES))
            self._file.lock()

    def write(self, key: str, view: torch.Tensor) -> Event:
        """Start writing a host tensor of bytes, which stays as it is until the event."""
        if key in self._entries:
            raise BadInput(f"{key!r} was already written to the state {self._name!r}; each key is written once")
        if self._end_bytes + view.numel() > self._file.nbytes:
            raise StorageFull(f"{key!r} does not fit into the {format_bytes(self._file.nbytes)} that the state {self._name!r} was given; give more")
        extent = self._entries[key] = self._io.extent(self._end_bytes, view.numel())
        self._end_bytes += round_up(view.numel(), PAGE_BYTES)
        return self._io.write(self._file, extent, view)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            for extent in self._entries.values():
                extent.last.wait() if kind is None else settled(extent.last).wait()
            if kind is None:
                self._file.sync()
                self._complete()
        finally:
            self._file.close(remove=not self._named)

    def _complete(self) -> None:
        content = {
            "format": _FORMAT,
            "file": self._file.path.name,
            "file_bytes": self._file.nbytes,
            "block_bytes": self._io.block_bytes,
            "entries": {key: [extent.offset, extent.nbytes, extent.checksums] for key, extent in self._entries.items()},
        }
        with exclusive(self._directory):
            replace_whole(_manifest(self._directory, self._name), json.dumps({"checksum": _checksum(content), "content": content}))
            self._named = True
            sync_directory(self._directory)
            _remove_states(self._directory, self._name, but=self._file.path.name)


class Published:
    """A complete state, open for reading."""

    def __init__(self, directory: Path, name: str, io: BlockIO) -> None:
        _check_name(name)
        self._io = io
        with exclusive(directory):
            content = _read_manifest(directory, name)
            self._file = PageFile(directory / content["file"])
        if self._file.nbytes != content["file_bytes"]:
            self._file.close()
            raise CorruptBlock(f"{self._file.path} has {self._file.nbytes} bytes and was published with {content['file_bytes']}; it was cut short")
        if content["block_bytes"] > io.block_bytes:
            self._file.close()
            raise BadInput(f"the state {name!r} is in blocks of {content['block_bytes']} bytes; open it with block_bytes of at least that")
        entries: dict[str, tuple[int, int, list[int | None]]] = content["entries"]
        self._entries = {key: Extent(*entry, content["block_bytes"]) for key, entry in entries.items()}

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return list(self._entries)

    def nbytes(self, key: str) -> int:
        return self._entry(key).nbytes

    def read(self, key: str, view: torch.Tensor) -> Event:
        """Start reading into a host tensor of bytes, which is not touched until the event. Wrong bytes are the event's failure."""
        return self._io.read(self._file, self._entry(key), view)

    def close(self) -> None:
        for extent in self._entries.values():
            settled(extent.last).wait()
        self._file.close()

    def _entry(self, key: str) -> Extent:
        if key not in self._entries:
            raise UnknownName("key of a published state", key, self._entries)
        return self._entries[key]


def _read_manifest(directory: Path, name: str) -> dict[str, Any]:
    path = _manifest(directory, name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadFile(f"there is no state {name!r} in {directory}; publish it first") from None
    try:
        manifest = json.loads(text)
        content: dict[str, Any] = manifest["content"]
        intact = manifest["checksum"] == _checksum(content)
    except (ValueError, TypeError, KeyError):
        intact = False
    if not intact:
        raise CorruptBlock(f"{path} is not what was published (its checksum differs); restore it or publish the state again")
    if content["format"] != _FORMAT:
        raise BadFile(f"{path} has format {content['format']} and this version reads format {_FORMAT}; use the version that wrote it")
    return content


def _manifest(directory: Path, name: str) -> Path:
    return directory / f"{name}.manifest"


def _states(directory: Path, name: str) -> dict[int, Path]:
    """Data files by number, also those of other processes and of publications that never completed."""
    pattern = re.compile(re.escape(name) + r"-([0-9]{6,})\.state")
    return {int(match[1]): path for path in sorted(directory.iterdir()) if (match := pattern.fullmatch(path.name))}


def _remove_states(directory: Path, name: str, *, but: str) -> None:
    for path in _states(directory, name).values():
        if path.name != but:
            remove_if_abandoned(path)


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise BadInput(f"{name!r} cannot name a state; use letters, digits, '_', '-' and '.'")
