"""Idle gaps, and the builder that turns a choice for each of them into a Schedule. Half the papers end here.

A gap is the time between two uses of a storage in which its bytes lie idle. A policy keeps it, swaps it (copies the storage to another tier
and back) or drops it (frees it and computes it again). `build` walks the ops in program order and writes the steps for those choices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..errors import InvalidSchedule
from ..ir import Compute, Copy, Free, Op, Problem, Role, Schedule, Step


@dataclass(frozen=True, slots=True)
class Gap:
    """A storage is idle after op `start` and until op `end`. A gap that wraps ends in the next step: `end` counts on from the last op."""

    storage: int
    nbytes: int
    start: int
    end: int
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy a storage out just before op `out_at` starts, free it before `free_at`, copy it back before `in_at`.

    For a gap that wraps, `in_at` lies in the next step, so it is the smaller number, and `tier` becomes the storage's home.
    join: the device waits for the copy out before op `free_at`, and for the copy back before the op after `in_at`.
    """

    storage: int
    tier: str
    out_at: int
    free_at: int
    in_at: int
    join: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a storage before op `free_at`; whoever reads it next computes it again."""

    storage: int
    free_at: int


def gaps(problem: Problem) -> list[Gap]:
    """Every gap at least one op long, by storage; storages without bytes have none."""
    graph, found = problem.graph, []
    count = len(graph.ops)
    for storage in graph.storages:
        uses = graph.uses[storage.id]
        if not storage.nbytes or not uses:
            continue
        for start, end in pairwise(uses):
            if end > start + 1:
                found.append(Gap(storage.id, storage.nbytes, start, end))
        if storage.lasting and problem.cyclic and uses[0] + count > uses[-1] + 1:
            found.append(Gap(storage.id, storage.nbytes, uses[-1], uses[0] + count, wraps=True))
    return found


def gap_seconds(problem: Problem, gap: Gap) -> float:
    """How long the gap lasts if all ops run in order on the device."""
    starts = problem.op_starts
    if gap.wraps:
        return starts[-1] - starts[gap.start + 1] + starts[gap.end - len(problem.graph.ops)]
    return starts[gap.end] - starts[gap.start + 1]


def can_recompute(problem: Problem, storage: int) -> bool:
    """Whether running one op again gives the storage back: it has one writer, which can be replayed."""
    graph = problem.graph
    producer = graph.producer(storage)
    if producer is None or graph.storages[storage].lasting or len(graph.writers[storage]) != 1:
        return False
    op = graph.ops[producer]
    return op.replayable and not op.mutates


def build(
    problem: Problem,
    swaps: Iterable[Swap] = (),
    drops: Iterable[Drop] = (),
    *,
    keep_recomputed: bool = True,
    home: Mapping[int, tuple[str, ...]] | None = None,
) -> Schedule:
    """The schedule of these choices, everything else kept from its first use to its last.

    keep_recomputed: what is recomputed on the way to something else stays if the program still needs it (Chen's and SuperNeurons'
    speed-centric segments); otherwise it goes at once and is computed again (memory-centric).
    """
    return _Builder(problem, tuple(swaps), tuple(drops), keep_recomputed, home or {}).run()


class _Builder:
    def __init__(self, problem: Problem, swaps: tuple[Swap, ...], drops: tuple[Drop, ...], keep: bool, home: Mapping[int, tuple[str, ...]]) -> None:
        self.problem, self.graph = problem, problem.graph
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.keep_recomputed = keep
        self.steps: list[Step] = []
        self.home = {
            s.id: home.get(s.id, (self.device,)) for s in self.graph.storages if s.lasting or s.role is Role.INPUT
        } | {swap.storage: (swap.tier,) for swap in swaps if swap.wraps}  # fmt: skip
        self.out_at, self.free_at, self.in_at = _by(swaps, "out_at"), _by(swaps, "free_at"), _by(swaps, "in_at")
        self.drop_at: dict[int, list[Drop]] = {}
        for drop in drops:
            self.drop_at.setdefault(drop.free_at, []).append(drop)
        self.joins_at: dict[int, list[Free]] = {}
        # The tiers that hold the current content of each storage, the device among them when it is here.
        self.holders: dict[int, set[str]] = {s: set(tiers) for s, tiers in self.home.items() if self.graph.is_there_at_start(s)}
        self.dies_at: dict[int, list[int]] = {}
        for storage in self.graph.storages:
            uses = self.graph.uses[storage.id]
            if not storage.lasting and storage.id not in self.graph.consumed_by:
                self.dies_at.setdefault(uses[-1] + 1 if uses else 0, []).append(storage.id)

    def run(self) -> Schedule:
        for op in self.graph.ops:
            self._between_ops(op.id)
            for storage in dict.fromkeys(op.reads + op.mutates):
                self._make_present(storage, op)
            self._compute(op)
        self._between_ops(len(self.graph.ops))
        return Schedule(tuple(self.steps), self.home)

    def _between_ops(self, at: int) -> None:
        """Everything due just before op `at`: give bytes back first, then fetch."""
        for free in self.joins_at.pop(at, ()):
            if free.tier in self.holders.get(free.storage, ()):
                self.steps.append(free)
                self.holders[free.storage].discard(free.tier)
        for storage in self.dies_at.get(at, ()):
            for tier in sorted(self.holders.pop(storage, ())):
                self.steps.append(Free(storage, tier))
        for drop in self.drop_at.get(at, ()):
            self._leave(drop.storage)
        for swap in self.out_at.get(at, ()):
            holders = self.holders.get(swap.storage, set())
            if self.device in holders and swap.tier not in holders:
                self.steps.append(Copy(swap.storage, self.device, swap.tier))
                holders.add(swap.tier)
        for swap in self.free_at.get(at, ()):
            if self.device in self.holders.get(swap.storage, ()):
                self._leave(swap.storage, join=swap.join)
        for swap in self.in_at.get(at, ()):
            holders = self.holders.get(swap.storage, set())
            if holders and self.device not in holders:
                self._fetch(swap.storage, join_at=at + 1 if swap.join else None)

    def _leave(self, storage: int, *, join: bool = False) -> None:
        if self.device in self.holders.get(storage, ()):
            self.holders[storage].discard(self.device)
            self.steps.append(Free(storage, self.device, join))

    def _fetch(self, storage: int, *, join_at: int | None = None) -> None:
        holders = self.holders[storage]
        tier = min(holders, key=lambda t: self.problem.machine.copy_seconds(self.graph.storages[storage].nbytes, t, self.device))
        self.steps.append(Copy(storage, tier, self.device))
        holders.add(self.device)
        for other in sorted(holders - {self.device} - set(self.home.get(storage, ()))):
            if join_at is None:
                self.steps.append(Free(storage, other))
                holders.discard(other)
            else:
                self.joins_at.setdefault(join_at, []).append(Free(storage, other, join=True))

    def _compute(self, op: Op) -> None:
        self.steps.append(Compute(op.id, self.on))
        for storage in op.writes + op.mutates:
            # A home elsewhere keeps its bytes, out of date, for the copy that comes back; build never frees a home.
            self.holders[storage] = {self.device}
        for old, _ in op.in_place:
            self.holders.pop(old, None)

    def _make_present(self, wanted: int, reader: Op) -> None:
        """Bring a storage to the device: fetch it, or run its op again, and first whatever that op needs."""
        if self.device in self.holders.get(wanted, ()):
            return
        pending: list[int] = [wanted]
        locked: dict[int, int] = {}  # how many ops still to be run again need it
        opened: set[int] = set()
        while pending:
            storage = pending[-1]
            holders = self.holders.get(storage, set())
            if self.device in holders:
                pending.pop()
                continue
            if holders:
                self._fetch(storage)
                pending.pop()
                continue
            if not can_recompute(self.problem, storage):
                name = self.graph.storages[storage].name
                raise InvalidSchedule(len(self.steps), f"{reader.name} needs {name}, which was dropped and cannot be computed again")
            op = self.graph.ops[self.graph.producer(storage) or 0]
            if op.id not in opened:
                opened.add(op.id)
                for read in op.reads:
                    locked[read] = locked.get(read, 0) + 1
            missing = [read for read in op.reads if self.device not in self.holders.get(read, ())]
            if missing:
                pending.extend(missing)
                continue
            there = {made for made in op.writes if self.device in self.holders.get(made, ())}
            elsewhere = {made: self.holders[made] for made in op.writes if self.holders.get(made)}
            self._compute(op)
            for made, tiers in elsewhere.items():
                self.holders[made] |= tiers
            opened.discard(op.id)
            pending.pop()
            for read in op.reads:
                locked[read] -= 1
            for made in op.writes:
                if made != storage and made not in there and made not in pending and not self._wanted(made, reader, locked):
                    self._leave(made)
            for read in op.reads:
                if not self._wanted(read, reader, locked) and not self.graph.storages[read].lasting:
                    self._leave(read)

    def _wanted(self, storage: int, reader: Op, locked: Mapping[int, int]) -> bool:
        """Whether a storage that is here should stay now that a recomputation is done with it."""
        if locked.get(storage) or storage in reader.reads or storage in reader.mutates:
            return True
        uses = self.graph.uses[storage]
        next_use = bisect_left(uses, reader.id)
        if next_use == len(uses):
            return False
        was_dropped = can_recompute(self.problem, storage) and self._dropped_until(storage, uses[next_use])
        return self.keep_recomputed or not was_dropped

    def _dropped_until(self, storage: int, use: int) -> bool:
        """Whether the storage's idle time that ends at `use` was chosen to be dropped."""
        uses = self.graph.uses[storage]
        before = uses[bisect_left(uses, use) - 1] if bisect_left(uses, use) else -1
        return any(drop.storage == storage for drop in self.drop_at.get(before + 1, ()))


def _by(swaps: tuple[Swap, ...], when: str) -> dict[int, list[Swap]]:
    found: dict[int, list[Swap]] = {}
    for swap in swaps:
        found.setdefault(getattr(swap, when), []).append(swap)
    return found
