"""One training step as ops over storages. Ops stand in program order, and an op's id is its place; so is a storage's.

A storage is a block of bytes; every view of it is the same storage. Within one step a storage may be written several times (an
optimizer updates a weight), so what a reader needs is a *version*: the number of ops before it in program order that wrote it. Versions
are the whole of the ordering rule: read-after-write, write-after-read and write-after-write follow from them (ir/judge.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

MASTER = "master"  # what the name of a parameter's copy of higher precision ends with: "layers.3.mlp.weight.master"


class Role(StrEnum):
    """What a storage is for; the report stacks memory by it."""

    PARAM = "param"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    GRAD = "grad"
    ACTIVATION = "activation"
    INPUT = "input"


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of bytes; all views of it are one Storage."""

    id: int
    name: str  # "layers.3.mlp.out", for people
    nbytes: int
    role: Role
    lasting: bool = False  # lives across steps: parameters, buffers, optimizer state, and gradients under accumulation


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work. It reads and mutates what is there, and writes what then exists."""

    id: int
    name: str  # "layers.3.mlp.up", for people
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # a fresh storage, or a lasting one overwritten without being read
    kind: str = ""  # what it computes: "conv2d", "matmul"; rules by layer type look here
    region: int = -1  # the region call it belongs to; -1 is glue
    mutates: tuple[int, ...] = ()  # read and overwritten in place: such an op runs once a step
    in_place: tuple[tuple[int, int], ...] = ()  # (old, new): `new`, one of writes, takes over the bytes of `old`, one of reads, which is gone
    workspace_bytes: int = 0
    replayable: bool = True  # False for collectives and unsaved random state
    flops: int = 0
    precision: str = "fp32"  # which of a processor's rates the flops run at


@dataclass(frozen=True, slots=True)
class Region:
    """A class of equal submodules: captured, solved and compiled once."""

    id: int
    kind: str
    example: str


@dataclass(frozen=True, slots=True)
class RegionCall:
    """One call of a submodule; Op.region names it."""

    id: int
    region: int
    module: str


@dataclass(frozen=True)
class Graph:
    """One whole step: forward, backward and update."""

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    regions: tuple[Region, ...] = ()
    calls: tuple[RegionCall, ...] = ()

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the ops that write or mutate it, in program order. The n-th of them makes version n+1."""
        return self._ops_by_storage(lambda op: op.writes + op.mutates)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the ops that need its content (reads and mutates), in program order."""
        return self._ops_by_storage(lambda op: op.reads + op.mutates)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, every op that touches it, in program order."""
        return self._ops_by_storage(lambda op: op.reads + op.writes + op.mutates)

    @cached_property
    def consumed_by(self) -> dict[int, int]:
        """Storages whose bytes an in-place op hands to its output: storage -> that op."""
        return {old: op.id for op in self.ops for old, _ in op.in_place}

    @cached_property
    def versions_needed(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each op, the storages it needs the content of, each with the number of writes to it that come before in program order."""
        written = [0] * len(self.storages)
        found = []
        for op in self.ops:
            found.append(tuple((storage, written[storage]) for storage in dict.fromkeys(op.reads + op.mutates)))
            for storage in dict.fromkeys(op.writes + op.mutates):
                written[storage] += 1
        return tuple(found)

    @cached_property
    def recomputable(self) -> frozenset[int]:
        """Storages that running ops again can give back, as long as no update has run: each has one writer, which can be replayed, and what
        that op read is still as it was or can be had again. Inputs and what cannot be replayed must then be kept for as long as needed."""
        found: set[int] = set()
        for op in self.ops:
            if op.replayable and not op.mutates and all(self._can_be_read_again(read, op.id, found) for read in op.reads):
                found.update(s for s in op.writes if len(self.writers[s]) == 1 and not self.storages[s].lasting)
        return frozenset(found)

    def _can_be_read_again(self, storage: int, reader: int, recomputable: set[int]) -> bool:
        if self.storages[storage].lasting:
            return all(self.ops[writer].phase is Phase.UPDATE for writer in self.writers[storage])
        if any(writer > reader for writer in self.writers[storage]):
            return False
        return storage not in self.consumed_by or storage in recomputable

    @cached_property
    def lasting_bytes(self) -> int:
        """Of everything that lives across steps."""
        return sum(storage.nbytes for storage in self.storages if storage.lasting)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """What is held while each op runs if everything is kept from its first use to its last."""
        change = [0] * (len(self.ops) + 1)
        for storage in self.storages:
            uses = self.uses[storage.id]
            if storage.lasting:
                change[0] += storage.nbytes
            elif uses:
                change[0 if self.is_there_at_start(storage.id) else uses[0]] += storage.nbytes
                change[uses[-1] + 1] -= storage.nbytes
        held, found = 0, []
        for op in self.ops:
            held += change[op.id]
            found.append(held + op.workspace_bytes - sum(self.storages[new].nbytes for _, new in op.in_place))
        return tuple(found)

    def producer(self, storage: int) -> int | None:
        """The op that first makes the storage; None for what is there when the step begins."""
        writers = self.writers[storage]
        return writers[0] if writers and storage in self.ops[writers[0]].writes else None

    def is_there_at_start(self, storage: int) -> bool:
        """Inputs, and lasting storages some op needs the content of before any op writes it."""
        if self.storages[storage].role is Role.INPUT:
            return True
        if not self.storages[storage].lasting:
            return False
        first = self.producer(storage)
        return first is None or any(reader <= first for reader in self.readers[storage])

    def _ops_by_storage(self, touched) -> tuple[tuple[int, ...], ...]:  # type: ignore[no-untyped-def]
        found: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for storage in touched(op):
                if not found[storage] or found[storage][-1] != op.id:
                    found[storage].append(op.id)
        return tuple(map(tuple, found))
