"""capuchin: swap what the link carries for nothing, then for each tensor whichever costs less, the rest of a swap or a recomputation.

Paper    Peng, Shi, Dai, Jin, Ma, Xiong, Yang, Qian, ASPLOS 2020.
Idea     how long a tensor lies idle, how long its copies take and how long its op takes are all known after one step: choose with numbers.
Rule     candidates: idle gaps that cover ops at which memory is over the budget.  FreeTime = gap − copy out − copy back.
         Swaps first, longest FreeTime first, while the lanes still hide them; a fetch is triggered as late as it is still in time.
         Then, by bytes per second of overhead:  swap if its exposed seconds < the seconds to compute it again, else recompute (MSPS);
         what was chosen for recomputation stops being a source of others, whose cost grows by its own. Until everything fits.
Differs  the step that is watched is the cost table, so nothing is corrected at run time: fetches that the simulator still finds late are moved
         ahead, as the paper's feedback does, for at most `feedback_rounds` rounds. Only activations and inputs are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..errors import InfeasibleBudget
from ..ir import Copy, Phase, Problem, Role, Schedule, peak_bytes
from ..simulate import simulate
from ..units import format_bytes
from ._buckets import Buckets
from ._gaps import Drop, Gap, Swap, build, can_recompute, gap_seconds, gaps
from ._lineage import Lineages

DECIDES = "swap or recompute"
REQUIRES = {"dram"}
FEEDBACK_SHARE = 0.05  # a late fetch is triggered earlier by this share of its copy
REBUILDS = 8  # how often the plan is made again with less room, after recomputations turned out to need some themselves


def plan(problem: Problem, *, tier: str = "dram", feedback_rounds: int = 2) -> Schedule:
    schedule = build(problem)
    if peak_bytes(problem, schedule)[problem.device_tier] <= problem.budget_bytes:
        return schedule
    room = problem.budget_bytes
    for _ in range(REBUILDS):
        choice = _Choice(problem, tier, room)
        choice.take_hidden_swaps()
        choice.take_the_cheaper()
        choice.take_what_is_left()
        for keep in (True, False):  # collective recomputation, if there is room for what comes back on the way
            schedule = build(problem, choice.swaps, choice.drops, keep_recomputed=keep)
            over = peak_bytes(problem, schedule)[problem.device_tier] - problem.budget_bytes
            if over <= 0:
                return _with_feedback(problem, choice, schedule, feedback_rounds, keep)
        room -= over
    return _everything_away(problem, tier)


@dataclass(frozen=True, slots=True)
class _Candidate:
    gap: Gap
    free_seconds: float


class _Choice:
    """The swaps and drops chosen so far, and the memory curve they leave."""

    def __init__(self, problem: Problem, tier: str, room_bytes: int) -> None:
        self.problem, self.tier = problem, tier
        self.over = np.array(problem.graph.live_bytes, dtype=np.int64) - room_bytes  # bytes too many at each op
        self.out = problem.machine.link(problem.device_tier, tier)
        self.back = problem.machine.link(tier, problem.device_tier)
        self.buckets = Buckets(problem.device_seconds, (self.out, self.back))
        self.lineages = Lineages(problem)
        self.swaps: list[Swap] = []
        self.drops: list[Drop] = []
        self._gone: list[int] = []  # by swap: the op from which its bytes count as gone
        graph = problem.graph
        found = []
        for gap in gaps(problem):
            storage = graph.storages[gap.storage]
            if gap.wraps or storage.lasting or storage.role not in (Role.ACTIVATION, Role.INPUT):
                continue
            copies = sum(link.latency_seconds + gap.nbytes / link.bytes_per_second for link in (self.out, self.back))
            found.append(_Candidate(gap, gap_seconds(problem, gap) - copies))
        self.waiting = sorted(found, key=lambda candidate: (-candidate.free_seconds, candidate.gap.storage, candidate.gap.start))

    def fits(self) -> bool:
        return bool((self.over <= 0).all())

    def helps(self, start: int, end: int) -> bool:
        return bool((self.over[start:end] > 0).any())

    def take_hidden_swaps(self) -> None:
        """Swaps that the spare time of both lanes hides completely, each for the ops between its two copies."""
        left = []
        for candidate in self.waiting:
            gap = candidate.gap
            gone, trigger = self._copies(gap)
            if not self.fits() and candidate.free_seconds >= 0 and gone < trigger and self.helps(gone + 1, trigger):
                self._swap(gap, gone + 1, trigger)
            else:
                left.append(candidate)
        self.waiting = left

    def take_the_cheaper(self) -> None:
        """One after the other, whichever frees most bytes for a second of overhead, by the cheaper of the two ways."""
        left = []
        for candidate in self._ranked():
            gap = candidate.gap
            if self.fits() or not self.helps(gap.start + 1, gap.end):
                left.append(candidate)
            elif self._again(gap) <= self._exposed(candidate):
                self._drop(gap)
            else:
                gone, trigger = self._copies(gap)
                if gone < trigger and self.helps(gone + 1, trigger):
                    self._swap(gap, gone + 1, trigger)
                else:
                    left.append(candidate)
        self.waiting = left

    def take_what_is_left(self) -> None:
        """Where that is not enough the device waits: for a copy out to make room, and for one that comes back on demand."""
        for at, swap in enumerate(self.swaps):  # the bytes of a copy count as gone from where it starts: whoever needs them waits for it
            gone = self._gone[at]
            self.over[swap.free_at : gone] -= self.problem.graph.storages[swap.storage].nbytes
        for candidate in self._ranked():
            gap = candidate.gap
            if self.fits():
                return
            if not self.helps(gap.start + 1, gap.end):
                continue
            if self._again(gap) <= self._exposed(candidate):
                self._drop(gap)
            else:
                self._swap(gap, gap.start + 1, gap.end)

    def _ranked(self) -> list[_Candidate]:
        def overhead(candidate: _Candidate) -> tuple[float, int, int]:
            cheaper = min(self._exposed(candidate), self._again(candidate.gap))
            return cheaper / candidate.gap.nbytes, candidate.gap.storage, candidate.gap.start

        return sorted(self.waiting, key=overhead)

    def _copies(self, gap: Gap) -> tuple[int, int]:
        """The op during which a copy out would end, and the one at which its way back would be triggered, as the lanes stand now."""
        return self.buckets.end_op(self.out, gap.start + 1, gap.nbytes), self.buckets.start_op(self.back, gap.end, gap.nbytes)

    def _swap(self, gap: Gap, gone: int, trigger: int) -> None:
        self.buckets.fill_from(self.out, gap.start + 1, gap.nbytes)
        self.buckets.fill_until(self.back, gap.end, gap.nbytes)
        self.swaps.append(Swap(gap.storage, self.tier, gap.start + 1, gap.start + 1, trigger))
        self._gone.append(gone)
        self.over[gone:trigger] -= gap.nbytes

    def _drop(self, gap: Gap) -> None:
        self.drops.append(Drop(gap.storage, gap.start + 1))
        self.lineages.drop(gap.storage, gap.start, gap.end)
        self.over[gap.start + 1 : gap.end] -= gap.nbytes

    def _exposed(self, candidate: _Candidate) -> float:
        """Seconds of a swap that no compute hides, as the lanes stand now: out by the time memory is short, back only once it no longer is."""
        gap = candidate.gap
        short = np.flatnonzero(self.over[gap.start + 1 : gap.end] > 0)
        first, last = (gap.start + 1 + int(short[0]), gap.start + 2 + int(short[-1])) if len(short) else (gap.end, gap.start + 1)
        late_out = max(0.0, gap.nbytes - self.buckets.spare_bytes(self.out, gap.start + 1, first)) / self.out.bytes_per_second
        late_back = max(0.0, gap.nbytes - self.buckets.spare_bytes(self.back, min(last, gap.end), gap.end)) / self.back.bytes_per_second
        return late_out + late_back

    def _again(self, gap: Gap) -> float:
        """Seconds to compute it again from what stays."""
        if not can_recompute(self.problem, gap.storage) or self.problem.graph.ops[gap.end].phase is Phase.UPDATE:
            return float("inf")
        lineage = self.lineages.lineage(gap.storage, gap.end)
        return float("inf") if lineage is None else lineage.seconds


def _with_feedback(problem: Problem, choice: _Choice, schedule: Schedule, rounds: int, keep: bool) -> Schedule:
    """Trigger fetches earlier that the clock finds late, as long as the plan stays within the budget and gets faster."""
    starts = problem.op_starts
    seconds = simulate(problem, schedule).seconds
    for _ in range(rounds):
        late = _late_fetches(problem, schedule)
        if not late:
            break
        earlier = []
        for swap in choice.swaps:
            if swap.storage in late:
                copy = problem.machine.copy_seconds(problem.graph.storages[swap.storage].nbytes, choice.tier, problem.device_tier)
                wanted = starts[swap.in_at] - max(FEEDBACK_SHARE * copy, late[swap.storage])
                moved = int(np.searchsorted(starts, wanted, side="right")) - 1
                swap = replace(swap, in_at=max(swap.free_at + 1, min(swap.in_at, moved)))
            earlier.append(swap)
        tried = build(problem, earlier, choice.drops, keep_recomputed=keep)
        if peak_bytes(problem, tried)[problem.device_tier] > problem.budget_bytes:
            break
        tried_seconds = simulate(problem, tried).seconds
        if tried_seconds >= seconds:
            break
        choice.swaps, schedule, seconds = earlier, tried, tried_seconds
    return schedule


def _late_fetches(problem: Problem, schedule: Schedule) -> dict[int, float]:
    """Storages whose fetch ends after the device was ready for whoever needs them, with the seconds it waited."""
    timeline = simulate(problem, schedule)
    fetched: dict[int, float] = {}
    late: dict[int, float] = {}
    ready = 0.0
    device = problem.machine.device.name
    for span in timeline.spans:
        step = schedule.steps[span.step]
        if isinstance(step, Copy) and step.dst == problem.device_tier:
            fetched[step.storage] = max(span.end, fetched.get(step.storage, 0.0))
        elif span.lane == device:
            op = problem.graph.ops[step.op]  # type: ignore[union-attr]
            for storage in op.reads:
                if fetched.get(storage, 0.0) > ready:
                    late[storage] = fetched[storage] - ready
            ready = span.end
    return late


def _everything_away(problem: Problem, tier: str) -> Schedule:
    """The last resort: every candidate leaves at once and comes back on demand."""
    swaps = []
    for gap in gaps(problem):
        storage = problem.graph.storages[gap.storage]
        if not gap.wraps and not storage.lasting and storage.role in (Role.ACTIVATION, Role.INPUT):
            swaps.append(Swap(gap.storage, tier, gap.start + 1, gap.start + 1, gap.end))
    schedule = build(problem, swaps)
    needed = peak_bytes(problem, schedule)[problem.device_tier]
    if needed > problem.budget_bytes:
        raise InfeasibleBudget(f"even with every idle activation on the host, capuchin needs {format_bytes(needed)}")
    return schedule
