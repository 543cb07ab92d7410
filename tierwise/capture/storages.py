"""Which bytes a tensor lies in, and from when to when they are held.

A storage is known by the address of torch's own storage object, which all views share and tied weights too. Weak references tell when torch and
Python have both let go of it, so the graph holds bytes exactly as long as the traced step did: what autograd saves, what a local variable keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ir import Role

NOWHERE = -1  # the storage of a tensor without bytes


@dataclass(slots=True)
class Block:
    """What becomes a Storage of the graph."""

    nbytes: int
    role: Role
    name: str = ""
    lasting: bool = False
    freed_at: int | None = None  # how many ops had run when the bytes were let go; None: held to the end of the step


class StorageTable:
    """Storages by address, as they come and go. `now` is the number of ops recorded so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.now = 0
        self._at: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def find(self, tensor: torch.Tensor) -> int | None:
        """The block a tensor lies in; None if it was never seen, NOWHERE if it has no bytes."""
        storage = tensor.untyped_storage()
        block = self._at.get(storage._cdata)
        if block is None and not storage.nbytes():
            return NOWHERE
        return block

    def add(self, tensor: torch.Tensor, role: Role, name: str = "", *, lasting: bool = False) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        self.blocks.append(Block(storage.nbytes(), role, name, lasting))
        self._at[address] = len(self.blocks) - 1
        self._watch[address] = weakref.ref(storage, self._on_freed(address))
        return self._at[address]

    def overwrite(self, tensor: torch.Tensor) -> int:
        """An op writes into bytes that do not last: from here on they are another block."""
        storage = tensor.untyped_storage()
        self.blocks.append(Block(storage.nbytes(), Role.ACTIVATION))
        self._at[storage._cdata] = len(self.blocks) - 1
        return len(self.blocks) - 1

    def stop(self) -> None:
        """The step is over: what is still held was held to its end."""
        self._watch.clear()

    def _on_freed(self, address: int) -> Callable[[object], None]:
        def freed(_: object) -> None:
            self._watch.pop(address, None)
            self.blocks[self._at.pop(address)].freed_at = self.now

        return freed
