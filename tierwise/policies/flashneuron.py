"""flashneuron: send the first activations of the forward pass straight to the disk, as many as must go, and place everything in a heap with two ends.

Paper    Bae et al., FlashNeuron, USENIX FAST 2021; the rules as the G10 artifact (MICRO 2023) runs them.
Idea     the host's memory and processor are busy with the data; the disk is not, and the forward pass hides its writes.
Rule     keep = budget - lasting - max over ops of the bytes it touches;  offload the activations backward reads, in order of first use, until
         the rest is below keep, each at its last idle gap that begins in forward;  backward begins when all are out;  after each of its ops fetch
         in order of use while  largest hole - largest working set > bytes.  Kept storages are placed first fit from the low end, offloaded
         ones from the high end, workspace and outputs nobody reads in one hole set aside for them. codecs, if asked for and if forward does
         not hide the writes: all is encoded on the device, and what compresses worst is replaced by what compresses best until the writes fit; csr is
         exact, fp16 rounds.
Differs  codecs are off unless asked for, as in the artifact; csr is a mask and the values that are not zero, and takes its turn on the device instead
         of a stream of low priority; what ops tolerate fp16 is not known, so all do.
         Without a disk it offloads to host memory. Blocks are single bytes unless page_bytes says otherwise (the paper's: 4096).
"""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from ..errors import BadInput, InfeasibleBudget, MissingTier
from ..ir import Compute, Copy, Free, Graph, Op, Phase, Problem, Role, Schedule, Step
from ..ir.schedule import AT_START, WORKSPACE, held_as
from ..simulate import Clock
from ..units import format_bytes
from ._codecs import can_code, with_codecs
from ._heap import TwoEndedHeap

DECIDES = "which activations go to disk, and every address"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it places every storage at an address, and torch's allocator takes none"
EXACTNESS = "exact if codecs is none or csr; none unless asked for"
CODECS = {"none": (), "csr": ("zvc",), "fp16": ("zvc", "fp16")}


def plan(
    problem: Problem,
    *,
    page_bytes: int = 1,
    visit_order: Sequence[Sequence[int]] | None = None,
    issue_order: Sequence[int] = (),
    as_published: bool = False,
    codecs: str = "none",
) -> Schedule:
    """visit_order: for each op, the order in which its storages are placed; by id unless given. issue_order: storages in the order in which
    those due at the same op are sent out; by first use unless given. as_published: offload by the rule even if everything fits, and refuse
    what the rule refuses, although sending out all there is might do. codecs: none, csr, or csr and fp16, of which the smaller is taken."""
    touched = [{*op.reads, *op.writes, *op.mutates} for op in problem.graph.ops]
    if visit_order is not None and list(map(set, visit_order)) != touched:
        raise BadInput("visit_order must list, for each op in order, the storages it reads, writes and mutates; this one is for another graph")
    visit = visit_order if visit_order is not None else [sorted(storages) for storages in touched]
    run = functools.partial(_Run, problem, page_bytes, visit, issue_order)
    if as_published:
        return run(refuse=True, codecs=_codecs(codecs)).play()
    attempts: list[dict[str, Any]] = [{"offload": False}, {"codecs": _codecs(codecs)}, {}]  # encoding takes room too
    for attempt in attempts[:-1]:
        with contextlib.suppress(InfeasibleBudget):
            return run(**attempt).play()
    return run(**attempts[-1]).play()


def prepare(problem: Problem, *, codecs: str = "none") -> Problem:
    return with_codecs(problem, names) if (names := _codecs(codecs)) else problem


def _codecs(chosen: str) -> tuple[str, ...]:
    if chosen not in CODECS:
        raise BadInput(f"codecs is {chosen!r}; flashneuron knows {', '.join(CODECS)}")
    return CODECS[chosen]


def _boundary(graph: Graph) -> int:
    """The first op of backward; past the end when there is none."""
    return next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))


def _offload_tier(problem: Problem) -> str:
    links = problem.machine.link_between
    for tier in ("nvme", "dram"):
        if (problem.device_tier, tier) in links and (tier, problem.device_tier) in links:
            return tier
    raise MissingTier(f"flashneuron needs a disk or host memory it can copy to; machine {problem.machine.name} has no link to 'nvme' or 'dram'")


class _Run:
    """Plays the step on a clock and decides as it goes."""

    def __init__(
        self,
        problem: Problem,
        page_bytes: int,
        visit: Sequence[Sequence[int]],
        issue_order: Sequence[int],
        *,
        offload: bool = True,
        refuse: bool = False,
        codecs: tuple[str, ...] = (),
    ) -> None:
        self.problem, self.graph, self.visit = problem, problem.graph, visit
        self.device, self.on = problem.device_tier, problem.machine.device.name
        self.tier = _offload_tier(problem)
        self.boundary = _boundary(problem.graph)
        self.nbytes = [s.nbytes for s in self.graph.storages]
        self.lasting = [s.lasting for s in self.graph.storages]
        self.heap = TwoEndedHeap(problem.budget_bytes - self._staging_bytes(), page_bytes=page_bytes)
        self.scratch = {s.id for s in self.graph.storages if self._is_scratch(s.id)}
        self.offset: dict[int, int] = {}  # of what is on the device
        self.pinned: dict[int, int] = {}  # of lasting storages, there or not yet
        self.hole = self._pin()
        self.coded: dict[int, str] = {}  # what of the chosen is encoded, and how
        self.chosen = self._choose(refuse) if offload else {}
        if codecs and self._write_seconds(self.chosen) > problem.op_starts[self.boundary]:
            self.chosen = self._compress(codecs)
        self.issue = self._by_op(issue_order)
        self._place_inputs()
        self.to_fetch = deque(self._in_order_of_return())
        self.largest_working_bytes = max((self._touched(op, lasting=False) for op in self.graph.ops), default=0)
        self.steps: list[Step] = []
        self.addresses: dict[tuple[int, int], int] = {}
        self.leaving: list[tuple[float, int, int]] = []  # (when its copy ends, order of issue, storage), a heap
        self.overwritten: set[int] = set()  # of those: changed since, so the copy is worth nothing
        self.ready: dict[int, float] = {}  # when a fetched storage is there
        self.encoded: dict[int, int] = {}  # offsets of encoded bytes on the device, on their way out or back
        home = {s.id: (self.device,) for s in self.graph.storages if s.lasting or s.role is Role.INPUT}
        at_start = {(AT_START, s): self.offset[s] for s in home if s in self.offset}
        self.addresses.update(at_start)
        self.clock = Clock(problem, Schedule((), home, at_start))
        self.home = home
        self.now = 0.0

    # -- before the step ------------------------------------------------------------------------------------------------------------

    def _staging_bytes(self) -> int:
        links = (self.problem.machine.link(self.device, self.tier), self.problem.machine.link(self.tier, self.device))
        return sum(link.staging_bytes for link in links if link.staging_tier == self.device)

    def _is_scratch(self, storage: int) -> bool:
        """Made by an op and never used again: its bytes live in the hole, like workspace."""
        uses = self.graph.uses[storage]
        if self.lasting[storage] or len(uses) != 1 or self.graph.producer(storage) is None:
            return False
        return all(new != storage for _, new in self.graph.ops[uses[0]].in_place)

    def _pin(self) -> int:
        """Lasting storages and the hole at the low end; returns the hole's offset."""
        for storage in self.graph.storages:
            if storage.lasting:
                self.pinned[storage.id] = self._place(storage.id, high=False)
                if self.graph.is_there_at_start(storage.id):
                    self.offset[storage.id] = self.pinned[storage.id]
        hole = max((self._hole_bytes(op) for op in self.graph.ops), default=0)
        offset = self.heap.take_low(hole)
        if offset is None:
            self._refuse(f"{format_bytes(hole)} of workspace do not fit beside the lasting storages")
        return offset

    def _hole_bytes(self, op: Op) -> int:
        return self.heap.pages(op.workspace_bytes) + sum(self.heap.pages(self.nbytes[s]) for s in op.writes if s in self.scratch)

    def _touched(self, op: Op, *, lasting: bool = True) -> int:
        touched = {*op.reads, *op.writes, *op.mutates}
        return self.heap.pages(op.workspace_bytes) + sum(self.heap.pages(self.nbytes[s]) for s in touched if lasting or not self.lasting[s])

    def _choose(self, refuse: bool) -> dict[int, int]:
        """The storages to send out, each with the op before which its copy is issued."""
        candidates = list(self._candidates())
        remaining = sum(self.nbytes[s] for s in candidates)
        pinned = sum(self.heap.pages(self.nbytes[s]) for s in self.pinned)
        keep = self.problem.budget_bytes - pinned - max((self._touched(op) for op in self.graph.ops), default=0)
        if refuse and candidates and keep <= 0:
            self._refuse(f"lasting storages and the largest op leave {format_bytes(keep)} for activations")
        chosen: dict[int, int] = {}
        for storage in candidates:
            if remaining < keep:
                break
            gap = self._last_gap_of_forward(storage)
            if gap is not None:
                chosen[storage] = gap
                remaining -= self.nbytes[storage]
        if refuse and remaining > keep:
            self._refuse(f"{format_bytes(remaining)} of activations cannot be sent out and there is room for {format_bytes(keep)}")
        return chosen

    def _compress(self, codecs: tuple[str, ...]) -> dict[int, int]:
        """The same encoded, where that is smaller; and what compresses worst replaced by what compresses best, until forward hides the writes."""
        gaps = {s: gap for s in self._candidates() if (gap := self._last_gap_of_forward(s)) is not None}
        forms = {s: min(codecs, key=lambda name: self._size(s, name)) for s in gaps}
        share = {s: self._size(s, form) / self.nbytes[s] for s, form in forms.items()}
        self.coded = {s: form for s, form in forms.items() if share[s] < 1}
        chosen, forward = dict(self.chosen), self.problem.op_starts[self.boundary]
        needed = total = sum(self.nbytes[s] for s in chosen)
        worst = sorted(chosen, key=lambda s: (-share[s], -chosen[s]))  # of equals, the last to be sent: it has the least time
        for storage in sorted((s for s in gaps if s not in self.chosen), key=share.__getitem__):
            if not worst or share[storage] >= share[worst[0]] or self._write_seconds(chosen) <= forward:
                break
            chosen[storage] = gaps[storage]
            total += self.nbytes[storage]
            while worst and total - self.nbytes[worst[0]] >= needed:
                total -= self.nbytes[worst[0]]
                del chosen[worst.pop(0)]
        self.coded = {s: form for s, form in self.coded.items() if s in chosen}
        return dict(sorted(chosen.items(), key=lambda item: item[1]))

    def _size(self, storage: int, codec: str) -> int:
        """Encoded, if the device can; as it is, if not."""
        return self.problem.form_bytes(storage, codec) if can_code(self.problem, codec, storage) else self.nbytes[storage]

    def _write_seconds(self, storages: Iterable[int]) -> float:
        return sum(self.problem.machine.copy_seconds(self._size(s, self.coded.get(s, "")), self.device, self.tier) for s in storages)

    def _by_op(self, issue_order: Sequence[int]) -> dict[int, list[int]]:
        rank = {storage: at for at, storage in enumerate(issue_order)}
        issue: dict[int, list[int]] = {}
        for storage in sorted(self.chosen, key=lambda storage: rank.get(storage, len(rank))):
            issue.setdefault(self.chosen[storage], []).append(storage)
        return issue

    def _place_inputs(self) -> None:
        for storage in self.graph.storages:
            if storage.role is Role.INPUT:
                self.offset[storage.id] = self._place(storage.id, high=storage.id in self.chosen)

    def _candidates(self) -> Iterable[int]:
        """What forward touches and backward reads, in order of first use."""
        forward = (storage for walked in self.visit[: self.boundary] for storage in walked)
        for storage in dict.fromkeys(forward):
            readers = self.graph.readers[storage]
            if not self.lasting[storage] and self.nbytes[storage] and readers and readers[-1] >= self.boundary:
                yield storage

    def _last_gap_of_forward(self, storage: int) -> int | None:
        begins = [before + 1 for before, after in pairwise(self.graph.uses[storage]) if after > before + 1 and before + 1 <= self.boundary]
        return begins[-1] if begins else None

    def _in_order_of_return(self) -> Iterable[int]:
        walked = (storage for walked in self.visit[self.boundary :] for storage in walked)
        return (storage for storage in dict.fromkeys(walked) if storage in self.chosen)

    # -- the step -------------------------------------------------------------------------------------------------------------------

    def play(self) -> Schedule:
        self.clock.begin_period()
        for storage, tiers in self.home.items():
            if not self.lasting[storage] and not self.graph.uses[storage]:
                self._free(storage, tiers[0])
        for op in self.graph.ops:
            self.now = self.clock.now()
            for storage in self.issue.get(op.id, ()):
                if storage in self.offset:
                    self._send(storage)
            self._let_go(until=self.now)
            if op.id == self.boundary:
                self._join()
            for storage in self.visit[op.id]:
                self._make_present(storage, op)
            self._compute(op)
            self._bury(op)
            if op.id >= self.boundary:
                self._fetch_ahead()
        return Schedule(tuple(self.steps), self.home, self.addresses)

    def _send(self, storage: int) -> None:
        codec = self.coded.get(storage, "")
        room = self.heap.take_high(self._size(storage, codec)) if codec else None
        if room is None:
            self.coded.pop(storage, None)  # no room to encode it in: it goes as it is
            end = self._do(Copy(storage, self.device, self.tier))
        else:
            self.encoded[storage] = room
            self._do(Copy(storage, self.device, self.device, dst_form=codec), {storage: room})
            self._free(storage, self.device)
            end = self._do(Copy(storage, self.device, self.tier, src_form=codec, dst_form=codec))
        heapq.heappush(self.leaving, (end, len(self.steps), storage))

    def _let_go(self, until: float) -> None:
        """Give back the bytes of every copy that has ended by then."""
        while self.leaving and self.leaving[0][0] <= until:
            self._let_next_go()

    def _let_next_go(self, *, join: bool = False) -> None:
        end, _, storage = heapq.heappop(self.leaving)
        self.now = max(self.now, end)
        if storage in self.encoded:
            self._drop_encoded(storage, join=join)
        elif storage in self.overwritten:
            self._free(storage, self.tier)
            self.overwritten.discard(storage)
        else:
            self._free(storage, self.device, join=join)

    def _join(self) -> None:
        while self.leaving:
            self._let_next_go(join=True)

    def _make_present(self, storage: int, op: Op) -> None:
        if self.lasting[storage] or storage in self.scratch or any(new == storage for _, new in op.in_place):
            return
        if storage in self.offset:
            self.now = max(self.now, self.ready.pop(storage, 0.0))
        else:
            if storage in self.coded and storage not in self.encoded and self._is_out(storage):
                self._fetch_encoded(storage, self._wait_for_room(storage, self._size(storage, self.coded[storage])))
            offset = self._wait_for_room(storage, self.nbytes[storage])
            if storage in self.encoded:
                self.now = max(self.now, self._do(Copy(storage, self.device, self.device, src_form=self.coded[storage]), {storage: offset}))
                self._drop_encoded(storage)
            elif self._is_out(storage):
                self._fetch(storage, offset)
                self.now = max(self.now, self.ready.pop(storage))
            self.offset[storage] = offset
        self._let_go(until=self.now)

    def _wait_for_room(self, storage: int, nbytes: int) -> int:
        take = self.heap.take_high if storage in self.chosen else self.heap.take_low
        while (offset := take(nbytes)) is None:
            if not self.leaving:
                self._refuse(f"{self.graph.storages[storage].name} ({format_bytes(nbytes)}) finds no hole, the largest has "
                             f"{format_bytes(self.heap.largest_hole_bytes())}, and nothing is on its way out")  # fmt: skip
            self._let_next_go()
        return offset

    def _compute(self, op: Op) -> None:
        placed: dict[int, int] = {}
        hole = self.hole
        if op.workspace_bytes:
            placed[WORKSPACE] = hole
            hole += self.heap.pages(op.workspace_bytes)
        taken_over = {new: old for old, new in op.in_place}
        for storage in op.writes:
            if storage in self.scratch:
                placed[storage] = self.offset[storage] = hole
                hole += self.heap.pages(self.nbytes[storage])
            elif storage in taken_over:
                self.offset[storage] = self.offset.pop(taken_over[storage])
            elif self.lasting[storage]:
                if storage not in self.offset:
                    placed[storage] = self.offset[storage] = self.pinned[storage]
            else:
                placed[storage] = self.offset[storage]
        self._do(Compute(op.id, self.on), placed)
        in_flight = {storage for _, _, storage in self.leaving}
        self.overwritten.update(in_flight.intersection(op.mutates))

    def _bury(self, op: Op) -> None:
        """Free what no later op uses."""
        for storage in self.visit[op.id]:
            if not self.lasting[storage] and self.graph.uses[storage][-1] == op.id and storage in self.offset:
                self._free(storage, self.device)

    def _fetch_ahead(self) -> None:
        room = self.heap.largest_hole_bytes() - self.largest_working_bytes
        while self.to_fetch:
            storage = self.to_fetch[0]
            if storage not in self.offset and storage not in self.encoded and self._is_out(storage):
                size = self.heap.pages(self._size(storage, self.coded.get(storage, "")))
                if room <= size or (offset := self.heap.take_high(size)) is None:
                    return
                if storage in self.coded:  # decoded when it is used: the device would wait for it
                    self._fetch_encoded(storage, offset)
                else:
                    self._fetch(storage, offset)
                    self.offset[storage] = offset
                room -= size
            self.to_fetch.popleft()

    # -- small things ---------------------------------------------------------------------------------------------------------------

    def _fetch(self, storage: int, offset: int) -> None:
        self.ready[storage] = self._do(Copy(storage, self.tier, self.device), {storage: offset})
        self._do(Free(storage, self.tier))

    def _is_out(self, storage: int) -> bool:
        return self.clock.held(storage, held_as(self.tier, self.coded.get(storage, "")))

    def _fetch_encoded(self, storage: int, offset: int) -> None:
        codec = self.coded[storage]
        self._do(Copy(storage, self.tier, self.device, src_form=codec, dst_form=codec), {storage: offset})
        self._do(Free(storage, self.tier, form=codec))
        self.encoded[storage] = offset

    def _drop_encoded(self, storage: int, *, join: bool = False) -> None:
        codec = self.coded[storage]
        self._do(Free(storage, self.device, join, form=codec))
        self.heap.give_back(self.encoded.pop(storage), self._size(storage, codec))

    def _free(self, storage: int, tier: str, *, join: bool = False) -> None:
        self._do(Free(storage, tier, join))
        if tier == self.device:
            offset = self.offset.pop(storage)
            if storage not in self.scratch:
                self.heap.give_back(offset, self.nbytes[storage])

    def _place(self, storage: int, *, high: bool) -> int:
        offset = self.heap.take_high(self.nbytes[storage]) if high else self.heap.take_low(self.nbytes[storage])
        if offset is None:
            found = self.graph.storages[storage]
            self._refuse(f"{found.name} ({format_bytes(found.nbytes)}), there from the start, does not fit")
        return offset

    def _do(self, step: Step, placed: Mapping[int, int] | None = None) -> float:
        for storage, offset in (placed or {}).items():
            self.addresses[len(self.steps), storage] = offset
        self.steps.append(step)
        return self.clock.advance(step, placed)

    def _refuse(self, why: str) -> NoReturn:
        raise InfeasibleBudget(f"flashneuron has no plan within {format_bytes(self.problem.budget_bytes)}: {why}; use a larger budget")
