"""Everything that lasts, as one published state on disk: parameters, buffers, masters, moments, counters and settings.

Chunks go from where they live to the file and back, so that a checkpoint needs little memory beside what is there. It is written beside the last
one and takes its place when it is complete and on disk; every block has a checksum. It can be restored into any other placement.

Keys are `row|parameter|start`: elements of one array of one parameter from `start` on, in the order of its memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import BadFile
from ..lanes import Event
from ..nvme import NvmeStore
from ..offsets import round_up
from ..published import Published, Publisher
from .homes import DiskChunks
from .ledger import Ledger
from .units import Slot
from .updates import Stored

PIECE_ELEMENTS = 4 << 20  # what is copied from the device at a time
WRITING = 8  # pieces on their way to the disk at once
PARAMETER, BUFFER, META = "parameter", "buffer", "meta"
PAGE_BYTES = 4096

Weights = Callable[[Stored, Slot], torch.Tensor]
"""A parameter as it is now, flat."""


class Checkpoints:
    """Of one model and its optimizer, in the store's directory. Nothing is pending while one is written or read."""

    def __init__(
        self, store: NvmeStore, model: nn.Module, optimizer: torch.optim.Optimizer | None, stored: Sequence[Stored], ledger: Ledger | None
    ) -> None:
        self._store, self._model, self._optimizer, self._stored, self._ledger = store, model, optimizer, stored, ledger

    def publish(self, name: str, weights: Weights) -> None:
        kept = set(self._model.state_dict(keep_vars=True))
        buffers = {path: buffer for path, buffer in self._model.named_buffers() if path in kept}
        meta = _bytes(json.dumps(self._meta()).encode())
        with self._store.publish(name, self._most_bytes(meta, buffers)) as state:
            writing = _Writing(state)
            writing.put(META, meta)
            for path, buffer in buffers.items():
                writing.put(f"{BUFFER}|{path}|0", _bytes(buffer))
            for home in self._stored:
                for slot in home.unit.slots:
                    flat = weights(home, slot)
                    for start in range(0, slot.numel, PIECE_ELEMENTS):
                        writing.put(f"{PARAMETER}|{slot.name}|{start}", _bytes(flat[start : start + PIECE_ELEMENTS]))
                for row, slot, start, part in self._rows(home):
                    writing.put(f"{row}|{slot.name}|{start}", _bytes(part))
            writing.settle()

    def check(self, name: str) -> None:
        """Whether there is such a checkpoint, of this model and this optimizer."""
        with self._store.open_published(name) as state:
            self._check(name, _Reading(state).meta())

    def restore(self, name: str, write: Callable[[Stored, Callable[[Slot], torch.Tensor]], None]) -> None:
        """`write(home, values)` gives a unit's parameters their values, flat."""
        with self._store.open_published(name) as state:
            reading = _Reading(state)
            meta = reading.meta()
            for path, buffer in self._model.named_buffers():
                if f"{BUFFER}|{path}|0" in state.names():
                    buffer.copy_(reading.whole(f"{BUFFER}|{path}|0", buffer.dtype).view(buffer.shape))
            for home in self._stored:
                write(home, partial(reading.row, PARAMETER, dtype=home.unit.dtype))
                if home.unit.trained and self._ledger is not None:
                    self._ledger.take_over(home, {slot: self._state(reading, meta, slot) for slot in home.unit.slots})
        if self._optimizer is not None:
            for group, settings in zip(self._optimizer.param_groups, meta["groups"], strict=True):
                group.update({key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})

    def _rows(self, home: Stored) -> Iterator[tuple[str, Slot, int, torch.Tensor]]:
        """A unit's state, part by part: array, parameter, where the part begins in it."""
        if self._ledger is None or not home.unit.trained:
            return
        if home.arrays is None and home.chunks is None:
            for slot in home.unit.slots:
                for row, value in self._ledger.of(home, slot).items():
                    if isinstance(value, torch.Tensor) and row != "step":
                        yield row, slot, 0, value
            return
        for index, chunk in enumerate(home.unit.chunks()):
            if home.arrays is not None:
                arrays = home.arrays[:, chunk]
            elif isinstance(home.chunks, DiskChunks):
                arrays = home.chunks.read(index)
            else:
                assert home.chunks is not None
                arrays, after = home.chunks.take(index)
                for event in after:
                    event.wait()
            for slot, piece in home.unit.pieces(chunk):
                if slot.steps:
                    for row, part in zip(home.names, arrays, strict=True):
                        yield row, slot, piece.start - slot.offset, part[piece.start - chunk.start : piece.stop - chunk.start]

    def _state(self, reading: _Reading, meta: Mapping[str, Any], slot: Slot) -> dict[str, Any]:
        """A parameter's state in torch's layout."""
        about = meta["parameters"][slot.name]
        found: dict[str, Any] = {}
        if about["step"] is not None:
            found["step"] = torch.tensor(about["step"])
        for row, (dtype, shape) in about["rows"].items():
            flat = reading.row(row, slot, getattr(torch, dtype))
            found[row] = flat.as_strided(slot.size, slot.stride) if tuple(shape) == slot.size else flat.view(shape)
        found.update(about["other"])
        return found

    def _meta(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        for home in self._stored:
            for slot in home.unit.slots:
                about: dict[str, Any] = {"step": None, "rows": {}, "other": {}, "numel": slot.numel}
                parameters[slot.name] = about
                if self._ledger is None or not home.unit.trained:
                    continue
                if home.arrays is not None or home.chunks is not None:
                    if slot.steps:
                        about["step"] = None if type(self._optimizer) is torch.optim.SGD else float(slot.steps)
                        about["rows"] = {row: [_name(home.dtype), list(slot.size)] for row in home.names}
                    continue
                for row, value in self._ledger.of(home, slot).items():
                    if row == "step":
                        about["step"] = float(value)
                    elif isinstance(value, torch.Tensor):
                        about["rows"][row] = [_name(value.dtype), list(value.shape)]
                    else:
                        about["other"][row] = value
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {
            "optimizer": self._kind(),
            "groups": [{key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")} for group in groups],
            "parameters": parameters,
        }

    def _most_bytes(self, meta: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> int:
        total = round_up(meta.numel(), PAGE_BYTES)
        total += sum(round_up(buffer.numel() * buffer.element_size(), PAGE_BYTES) for buffer in buffers.values())
        for home in self._stored:
            for slot in home.unit.slots:
                nbytes = slot.numel * home.unit.dtype.itemsize
                parts = 2 + slot.numel // PIECE_ELEMENTS
                if home.arrays is not None or home.chunks is not None:
                    nbytes += slot.numel * home.row_count * home.dtype.itemsize
                    parts += home.row_count * (2 + slot.numel // home.unit.chunk_elements)
                elif self._ledger is not None and home.unit.trained:
                    tensors = [value for value in self._ledger.of(home, slot).values() if isinstance(value, torch.Tensor)]
                    nbytes += sum(value.numel() * value.element_size() for value in tensors)
                    parts += len(tensors)
                total += nbytes + parts * PAGE_BYTES
        return total

    def _check(self, name: str, meta: Mapping[str, Any]) -> None:
        if meta["optimizer"] != self._kind():
            raise BadFile(f"the checkpoint {name!r} is of {meta['optimizer']} and the optimizer is {self._kind()}; restore it into the one it is of")
        if self._optimizer is not None and len(meta["groups"]) != len(self._optimizer.param_groups):
            raise BadFile(
                f"the checkpoint {name!r} has {len(meta['groups'])} parameter groups and the optimizer has {len(self._optimizer.param_groups)}; "
                f"restore it into the one it is of"
            )
        for home in self._stored:
            for slot in home.unit.slots:
                if meta["parameters"].get(slot.name, {}).get("numel") != slot.numel:
                    raise BadFile(f"the checkpoint {name!r} has no {slot.name} of {slot.numel} elements; restore it into the model it is of")

    def _kind(self) -> str | None:
        return None if self._optimizer is None else type(self._optimizer).__name__


class _Writing:
    """A few pieces on their way at once; each is kept until it has been written."""

    def __init__(self, state: Publisher) -> None:
        self._state = state
        self._under_way: list[tuple[Event, torch.Tensor]] = []

    def put(self, key: str, view: torch.Tensor) -> None:
        if view.numel():
            self._under_way.append((self._state.write(key, view), view))
        if len(self._under_way) >= WRITING:
            self.settle()

    def settle(self) -> None:
        for event, _ in self._under_way:
            event.wait()
        self._under_way.clear()


class _Reading:
    def __init__(self, state: Published) -> None:
        self._state = state
        self._pieces: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for key in state.names():
            if key != META:
                row, path, start = key.split("|")
                self._pieces.setdefault((row, path), []).append((int(start), key))

    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(self.whole(META, torch.uint8).numpy()))
        return found

    def whole(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        view = torch.empty(self._state.nbytes(key), dtype=torch.uint8)
        self._state.read(key, view).wait()
        return view.view(dtype)

    def row(self, row: str, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        parts = [self.whole(key, dtype) for _, key in sorted(self._pieces.get((row, slot.name), ()))]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


def _bytes(data: Any) -> torch.Tensor:
    if isinstance(data, bytes):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return data.detach().cpu().contiguous().flatten().view(torch.uint8)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
