"""Idle gaps, and the builder that turns a choice for each of them into a Schedule. Half the papers end here.

A gap is the time between two uses of a storage in which its bytes lie idle. A policy keeps it, swaps it (copies the storage to another tier
and back), encodes it (a swap to the device's own tier, under a codec) or drops it (frees it and computes it again). `build` walks the ops in
program order and writes the steps for those choices.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..errors import BadInput, InvalidSchedule
from ..ir import Compute, Copy, Free, Op, Problem, Role, Schedule, Step, Variant
from ..ir.schedule import held_as


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
    join: the device waits for the copy out before op `free_at`, and for the copy back before the op after `in_at`; join_back says otherwise of
    the latter.
    codec: it is encoded before it leaves, by the link if that has an engine and else on the device, and decoded for whoever reads it; in between
    `tier`, which may be the device's, has its encoded bytes alone.
    """

    storage: int
    tier: str
    out_at: int
    free_at: int
    in_at: int
    join: bool = False
    wraps: bool = False
    join_back: bool | None = None
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a storage before op `free_at`; whoever reads it next computes it again."""

    storage: int
    free_at: int


Keeps = Callable[[int, int, int], bool]  # (storage, op it came back for, op that uses it next) -> whether it stays until then


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
    """Whether the storage can be dropped before the update and had again by running ops."""
    return storage in problem.graph.recomputable


def device_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """For each op, the most bytes a schedule of one step holds on the device while it runs or anything is brought there for it, in list order."""
    graph, device = problem.graph, problem.device_tier
    size = [storage.nbytes for storage in graph.storages]
    encoded: set[tuple[int, str]] = set()
    links = {(step.src, step.dst) for step in schedule.steps if isinstance(step, Copy) and step.src != step.dst}
    staging = [problem.machine.link_between[link] for link in sorted(links)]
    # In a loop, what lives across steps is there from the second step on, whoever makes it.
    here = {s for s, home in schedule.home.items() if device in home and (problem.cyclic or graph.is_there_at_start(s))}
    held = sum(size[s] for s in here) + sum(link.staging_bytes for link in staging if link.staging_tier == device)
    found: list[int] = []
    most = held
    for step in schedule.steps:
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            taken_over = {new: old for old, new in op.in_place}
            scratch = problem.costs.variant_of[op.id, step.variant].workspace_bytes if step.variant else op.workspace_bytes
            for storage in op.writes:
                if storage in taken_over:
                    held -= size[taken_over[storage]]
                    here.discard(taken_over[storage])
                if storage not in here:
                    here.add(storage)
                    held += size[storage]
                elif storage not in taken_over and not graph.storages[storage].lasting:
                    scratch += size[storage]
                most = max(most, held)
            most = max(most, held + scratch)
            if step.op == len(found):
                found.append(most)
                most = 0
        elif isinstance(step, Free):
            if step.tier == device:
                (encoded.discard((step.storage, step.form)) if step.form else here.discard(step.storage))
                held -= problem.form_bytes(step.storage, step.form)
        elif step.dst == device:
            if step.dst_form:
                if (step.storage, step.dst_form) not in encoded:
                    encoded.add((step.storage, step.dst_form))
                    held += problem.form_bytes(step.storage, step.dst_form)
            elif step.storage not in here:
                here.add(step.storage)
                held += size[step.storage]
            most = max(most, held)
    return found


def build(
    problem: Problem,
    swaps: Iterable[Swap] = (),
    drops: Iterable[Drop] = (),
    *,
    keep_recomputed: bool | Keeps = True,
    home: Mapping[int, tuple[str, ...]] | None = None,
    kept: Collection[int] = (),
    variants: Mapping[int, str] | None = None,
) -> Schedule:
    """The schedule of these choices, everything else kept from its first use to its last.

    keep_recomputed: what comes back on the way to something else stays if the program still needs it (Chen's and SuperNeurons'
    speed-centric segments); otherwise it goes at once and is brought back again (memory-centric). A function decides one by one.

    An input, or the output of an op that cannot run again, outlives its last use if something dropped is made from it later; so does what is
    in `kept`, which is not computed again unless an op in place has taken it over.

    variants: ops that run by a variant, and by which; what it reads encoded must have been encoded by a swap.
    """
    swaps = tuple(swaps)
    if coded := next((swap for swap in swaps if swap.wraps and swap.codec), None):
        raise BadInput(
            f"{problem.graph.storages[coded.storage].name} is at home in {coded.tier} and cannot be encoded there; swap it without a codec"
        )
    choices = swaps, tuple(drops), _keeps(keep_recomputed), home or {}, frozenset(kept).difference(problem.graph.consumed_by), variants or {}
    builder = _Builder(problem, *choices, {})
    schedule = builder.run()
    if builder.needed_until:  # only now known: what had died is kept this time
        schedule = _Builder(problem, *choices, builder.needed_until).run()
    return schedule


def _keeps(keep_recomputed: bool | Keeps) -> Keeps:
    """A function that gives the same answer each time it is asked the same, for builds that take two runs."""
    if callable(keep_recomputed):
        return functools.cache(keep_recomputed)
    return lambda storage, reader, next_use: keep_recomputed


class _Builder:
    def __init__(
        self,
        problem: Problem,
        swaps: tuple[Swap, ...],
        drops: tuple[Drop, ...],
        keeps: Keeps,
        home: Mapping[int, tuple[str, ...]],
        kept: frozenset[int],
        variants: Mapping[int, str],
        outlives: Mapping[int, int],
    ) -> None:
        self.problem, self.graph = problem, problem.graph
        self.variants = {op: problem.costs.variant_of[op, name] for op, name in variants.items()}
        self.uses = _uses_by_variants(problem, self.variants.values())
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.keeps, self.kept = keeps, kept
        self.steps: list[Step] = []
        self.home = {
            s.id: home.get(s.id, (self.device,)) for s in self.graph.storages if s.lasting or s.role is Role.INPUT
        } | {swap.storage: (swap.tier,) for swap in swaps if swap.wraps}  # fmt: skip
        self.out_at, self.free_at, self.in_at = _by(swaps, "out_at"), _by(swaps, "free_at"), _by(swaps, "in_at")
        self.drop_at: dict[int, list[Drop]] = {}
        for drop in drops:
            self.drop_at.setdefault(drop.free_at, []).append(drop)
        self.joins_at: dict[int, list[Free]] = {}
        self.away = self._away_spans(swaps, drops)
        self.encoded = {held_as(tier, swap.codec): (tier, swap.codec) for swap in swaps if swap.codec for tier in (swap.tier, self.device)}
        self.buffers: dict[int, str] = {}  # storage -> codec: what is encoded on the device and on its way out
        # The tiers that hold the current content of each storage, the device among them when it is here; encoded, the tier and the codec.
        self.holders: dict[int, set[str]] = {s: set(tiers) for s, tiers in self.home.items() if self.graph.is_there_at_start(s)}
        self.outlives = outlives
        self.needed_until: dict[int, int] = {}  # what died before the op that needs it, though it cannot be made again
        self.dies_at: dict[int, list[int]] = {}
        for storage in self.graph.storages:
            uses = self.uses[storage.id]
            if not storage.lasting and storage.id not in self.graph.consumed_by:
                last = outlives.get(storage.id, uses[-1] if uses else -1)
                self.dies_at.setdefault(last + 1, []).append(storage.id)

    def _away_spans(self, swaps: tuple[Swap, ...], drops: tuple[Drop, ...]) -> dict[int, list[tuple[int, int]]]:
        """For each storage, when it is meant not to be on the device: before which op it leaves, before which it is back."""
        count, found = len(self.graph.ops), dict[int, list[tuple[int, int]]]()
        for drop in drops:
            uses = self.graph.uses[drop.storage]
            next_use = bisect_left(uses, drop.free_at)
            found.setdefault(drop.storage, []).append((drop.free_at, uses[next_use] if next_use < len(uses) else count))
        for swap in swaps:
            spans = [(swap.free_at, count), (0, swap.in_at)] if swap.wraps else [(swap.free_at, swap.in_at)]
            found.setdefault(swap.storage, []).extend(spans)
        return found

    def run(self) -> Schedule:
        for op in self.graph.ops:
            self._between_ops(op.id)
            self._make_present(op)
            self._compute(op)
        self._between_ops(len(self.graph.ops))
        return Schedule(tuple(self.steps), self.home)

    def _between_ops(self, at: int) -> None:
        """Everything due just before op `at`: give bytes back first, then fetch."""
        self.steps.extend(self.joins_at.get(at, ()))
        for storage in self.dies_at.get(at, ()):
            for where in sorted(self.holders.pop(storage, ())):
                self.steps.append(self._free(storage, where))
        for drop in self.drop_at.get(at, ()):
            self._leave(drop.storage)
        for swap in self.out_at.get(at, ()):
            holders = self.holders.get(swap.storage, set())
            if self.device in holders and held_as(swap.tier, swap.codec) not in holders:
                self._send(swap)
                holders.add(held_as(swap.tier, swap.codec))
        for swap in self.free_at.get(at, ()):
            if self.device in self.holders.get(swap.storage, ()):
                self._leave(swap.storage, join=swap.join and swap.storage not in self.buffers)
                if codec := self.buffers.pop(swap.storage, ""):
                    self.steps.append(Free(swap.storage, self.device, swap.join, form=codec))
        for swap in self.in_at.get(at, ()):
            holders = self.holders.get(swap.storage, set())
            if holders and self.device not in holders:
                join = swap.join if swap.join_back is None else swap.join_back
                join_at = at + 1 if join else None
                if self._is_coded_here(swap):
                    self._fetch_encoded(swap.storage, join_at=join_at)  # decoded only when it is read: the device would wait for the copy
                else:
                    self._fetch(swap.storage)
                    self._leave_elsewhere(swap.storage, join_at=join_at)

    def _leave(self, storage: int, *, join: bool = False) -> None:
        if self.device in self.holders.get(storage, ()):
            self.holders[storage].discard(self.device)
            self.steps.append(Free(storage, self.device, join))

    def _fetch(self, storage: int) -> None:
        holders = self.holders[storage]
        where = min(sorted(holders), key=lambda where: self._fetch_seconds(storage, where))
        tier, form = self.encoded.get(where, (where, ""))
        if form and tier != self.device and form not in self.problem.machine.link(tier, self.device).codecs:
            self._fetch_encoded(storage)
            tier = self.device
        self.steps.append(Copy(storage, tier, self.device, src_form=form))
        holders.add(self.device)

    def _fetch_seconds(self, storage: int, where: str) -> float:
        tier, form = self.encoded.get(where, (where, ""))
        nbytes = self.problem.form_bytes(storage, form)
        return self.problem.machine.copy_seconds(nbytes, tier, self.device) if tier != self.device else 0.0

    def _is_coded_here(self, swap: Swap) -> bool:
        """Whether the device encodes and decodes it, for want of an engine in the link."""
        return bool(swap.codec) and (swap.tier == self.device or swap.codec not in self.problem.machine.link(self.device, swap.tier).codecs)

    def _send(self, swap: Swap) -> None:
        if not self._is_coded_here(swap):
            self.steps.append(Copy(swap.storage, self.device, swap.tier, dst_form=swap.codec))
            return
        self.steps.append(Copy(swap.storage, self.device, self.device, dst_form=swap.codec))
        if swap.tier != self.device:
            self.steps.append(Copy(swap.storage, self.device, swap.tier, src_form=swap.codec, dst_form=swap.codec))
            self.buffers[swap.storage] = swap.codec

    def _fetch_encoded(self, storage: int, *, join_at: int | None = None) -> None:
        """Bring the encoded bytes to the device, and leave them nowhere else."""
        holders = self.holders[storage]
        for where in sorted(holders):
            tier, form = self.encoded.get(where, (where, ""))
            if form and tier != self.device:
                self.steps.append(Copy(storage, tier, self.device, src_form=form, dst_form=form))
                self._leave_behind(storage, where, join_at)
                holders.add(held_as(self.device, form))
                return

    def _free(self, storage: int, where: str, *, join: bool = False) -> Free:
        tier, form = self.encoded.get(where, (where, ""))
        return Free(storage, tier, join, form=form)

    def _leave_elsewhere(self, storage: int, *, join_at: int | None = None) -> None:
        """What is back on the device stays nowhere else, but for its home."""
        holders = self.holders[storage]
        for other in sorted(holders - {self.device} - set(self.home.get(storage, ()))):
            self._leave_behind(storage, other, join_at)

    def _leave_behind(self, storage: int, where: str, join_at: int | None) -> None:
        self.holders[storage].discard(where)
        if join_at is None:
            self.steps.append(self._free(storage, where))
        else:
            self.joins_at.setdefault(join_at, []).append(self._free(storage, where, join=True))

    def _compute(self, op: Op) -> None:
        self.steps.append(Compute(op.id, self.on, variant=self.variants[op.id].name if op.id in self.variants else ""))
        for storage in op.writes + op.mutates:
            # A home elsewhere keeps its bytes, out of date, for the copy that comes back; build never frees a home.
            self.holders[storage] = {self.device}
        for old, _ in op.in_place:
            self.holders.pop(old, None)

    # -- bringing things back -----------------------------------------------------------------------------------------------------

    def _reads(self, op: Op) -> tuple[int, ...]:
        """What it reads as it is."""
        variant = self.variants.get(op.id)
        return op.reads if variant is None else _plain_reads(op, variant)

    def _make_present(self, reader: Op) -> None:
        """Bring what an op needs to the device: fetch it, or run its op again, and first whatever that op needs, each op once."""
        again = self._ops_to_run_again(reader)
        still_needed: dict[int, int] = {}  # by how many of these ops, the reader among them
        for op in (*again, reader):
            for storage in dict.fromkeys(self._reads(op) + op.mutates):
                still_needed[storage] = still_needed.get(storage, 0) + 1
        back: set[int] = set()  # what was not here before
        for op in again:
            back |= self._fetch_missing(op) | {made for made in op.writes if self.device not in self.holders.get(made, ())}
            elsewhere = {made: self.holders[made] - {self.device} for made in op.writes if made in self.holders}
            self._compute(op)
            for made, tiers in elsewhere.items():
                self.holders[made] |= tiers
            for read in dict.fromkeys(self._reads(op)):
                still_needed[read] -= 1
            for storage in dict.fromkeys(self._reads(op) + op.writes):
                if storage in back and storage in self.holders and not still_needed.get(storage):
                    self._stay_or_leave(storage, reader)
        back |= self._fetch_missing(reader)
        for storage in dict.fromkeys(self._reads(reader) + reader.mutates):
            if storage in back:
                self._leave_elsewhere(storage)

    def _ops_to_run_again(self, reader: Op) -> list[Op]:
        """In program order, so that what several of them need is made once and an in-place op runs after all who read its input."""
        found: set[int] = set()
        pending = [s for s in dict.fromkeys(self._reads(reader) + reader.mutates) if not self.holders.get(s)]
        while pending:
            storage = pending.pop()
            if storage in self.kept or not can_recompute(self.problem, storage):
                self._outlive(storage, reader)
            elif not self.holders.get(storage):
                producer = self.graph.producer(storage)
                if producer is not None and producer not in found:
                    found.add(producer)
                    pending.extend(self._reads(self.graph.ops[producer]))
        return [self.graph.ops[op] for op in sorted(found)]

    def _outlive(self, storage: int, reader: Op) -> None:
        """Note that a storage may not die before this op, and go on as if it had not; what was dropped on purpose is an error."""
        dies = not self.graph.storages[storage].lasting and self.uses[storage][-1] < reader.id and storage not in self.graph.consumed_by
        if dies:
            self.needed_until[storage] = reader.id
        if not self.holders.get(storage):
            if not dies or storage in self.outlives:
                name = self.graph.storages[storage].name
                raise InvalidSchedule(len(self.steps), f"{reader.name} needs {name}, which was dropped and cannot be computed again")
            self.holders[storage] = {self.device}

    def _fetch_missing(self, op: Op) -> set[int]:
        missing = {storage for storage in self._reads(op) + op.mutates if self.device not in self.holders[storage]}
        for storage in sorted(missing):
            self._fetch(storage)
        return missing

    def _stay_or_leave(self, storage: int, reader: Op) -> None:
        """What came back on the way to the reader goes again, unless someone is waiting for it."""
        uses = self.uses[storage]
        next_use = bisect_left(uses, reader.id)
        if next_use == len(uses):
            stays = False
        else:
            away = any(leaves <= reader.id < back for leaves, back in self.away.get(storage, ()))
            stays = not away or self.keeps(storage, reader.id, uses[next_use])
        if stays:
            self._leave_elsewhere(storage)
        else:
            self._leave(storage)


def _plain_reads(op: Op, variant: Variant) -> tuple[int, ...]:
    return tuple(storage for storage in (op.reads if variant.reads is None else variant.reads) if storage not in variant.forms)


def _uses_by_variants(problem: Problem, variants: Iterable[Variant]) -> tuple[tuple[int, ...], ...]:
    """For each storage, every op that touches it in some form if ops run by these variants."""
    found: dict[int, set[int]] = {}
    for variant in variants:
        op = problem.graph.ops[variant.op]
        if variant.reads is None:
            continue
        for storage in {*op.reads, *variant.reads}:
            uses = found.setdefault(storage, set(problem.graph.uses[storage]))
            if storage in variant.reads:
                uses.add(op.id)
            elif storage not in op.writes + op.mutates:
                uses.discard(op.id)
    return tuple(tuple(sorted(found[s])) if s in found else uses for s, uses in enumerate(problem.graph.uses))


def _by(swaps: tuple[Swap, ...], when: str) -> dict[int, list[Swap]]:
    found: dict[int, list[Swap]] = {}
    for swap in swaps:
        found.setdefault(getattr(swap, when), []).append(swap)
    return found
