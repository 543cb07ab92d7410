"""The rows of a unit's state, read and written by parameter wherever they are: for state_dict, load_state_dict, and the beginning and the end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..lanes import already
from .homes import DiskChunks, HostChunks, Ring
from .units import Slot
from .updates import Stored

Values = Callable[[Slot, str], torch.Tensor | None]
"""A flat tensor for a row of a parameter, in the order of its memory; None is zero."""


def fill(home: Stored, values: Values, ring: Ring | None) -> None:
    """Write all rows of a unit."""
    whole = slice(0, home.unit.numel)
    if home.arrays is not None:
        _fill(home, home.arrays, whole, values)
    elif isinstance(home.chunks, HostChunks):
        for index, chunk in enumerate(home.unit.chunks()):
            arrays, after = home.chunks.take(index)
            for event in after:
                event.wait()
            _fill(home, arrays, chunk, values)
    elif isinstance(home.chunks, DiskChunks):
        assert ring is not None
        for index, chunk in enumerate(home.unit.chunks()):
            _fill(home, home.chunks.create(index, ring), chunk, values)
            home.chunks.give(index, already())


def read(home: Stored, slot: Slot, name: str) -> torch.Tensor:
    """A row of one parameter, flat: a part of the memory it is in, or a copy of what is on disk."""
    row = home.names.index(name)
    if home.arrays is not None:
        return home.arrays[row, slot.offset : slot.stop]
    flat = torch.empty(slot.numel, dtype=home.dtype)
    if isinstance(home.chunks, DiskChunks):
        home.chunks.read_part(slice(slot.offset, slot.stop), flat, row=row)
        return flat
    assert home.chunks is not None
    for index, chunk in enumerate(home.unit.chunks()):
        for found, piece in home.unit.pieces(chunk):
            if found is slot:
                arrays, after = home.chunks.take(index)
                for event in after:
                    event.wait()
                part = arrays[row, piece.start - chunk.start : piece.stop - chunk.start]
                if piece.stop - piece.start == slot.numel and part.numel():
                    return home.chunks.block(index).lend(part)
                flat[piece.start - slot.offset : piece.stop - slot.offset].copy_(part)
    return flat


def rewrite(home: Stored, name: str, value: Callable[[Slot, torch.Tensor], torch.Tensor | None], ring: Ring | None) -> None:
    """Change one row: `value(slot, old)` is the new one, None if it stays."""
    new = {slot: value(slot, read(home, slot, name)) for slot in home.unit.slots}
    if all(found is None for found in new.values()):
        return
    old = {slot: {row: read(home, slot, row).clone() for row in home.names} for slot in home.unit.slots}

    def values(slot: Slot, row: str) -> torch.Tensor:
        changed = new[slot] if row == name else None
        return old[slot][row] if changed is None else changed

    fill(home, values, ring)


def _fill(home: Stored, arrays: torch.Tensor, chunk: slice, values: Values) -> None:
    for slot, piece in home.unit.pieces(chunk):
        here = slice(piece.start - chunk.start, piece.stop - chunk.start)
        for row, name in enumerate(home.names):
            value = values(slot, name)
            if value is None:
                arrays[row, here].zero_()
            else:
                arrays[row, here].copy_(value[piece.start - slot.offset : piece.stop - slot.offset])
