"""autoswap: swap what lies idle across the peak, by rank in three scores, on one timeline per direction, and place all blocks offline.

Paper    Zhang, Yeung, Shu, He, Wang, arXiv 2019, arXiv:1903.06631; the rules as its branch of Apache SINGA has them.
Idea     training repeats itself: after one step every block's size, uses and times are known, so that both where it lies (SmartPool) and when it is
         swapped (AutoSwap) can be planned once.
Rule     candidates: neighbouring uses r, d of a block with r < peak < d.  DOA = idle time;  AOA = DOA' · bytes, DOA' / bytes if negative, with
         DOA' = idle time − two copies;  WDOA = ∫ (load − limit) over the idle time.  By the sum of the ranks in all three, until the load is within
         the limit. Outs in order of r, one behind the other; ins in order of d, the last first, each done when the next one starts. Stick to the
         limit: an out that ends after the load is over it ends there and the device waits; an in that starts before it is under starts there.
         SmartPool: the largest first, each in the best fitting range that no block living at the same time has.
Differs  WDOA as the paper has it; the published code leaves it at zero. A block counts as ready when its op ends, not a fixed number of events later.
         Only its reader waits for a fetch. Blocks below smallest_block_bytes are swapped too if the others are not enough. If placing makes the
         step too high, the limit is lowered and all is chosen anew. A weight that is away at the end of the step is gone by then.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InfeasibleBudget, UnknownName
from ..ir import Problem, Schedule
from ..units import format_bytes
from ._gaps import Gap, Swap, build, gap_seconds, gaps
from ._placement import FITS, place_offline

DECIDES = "swap across the peak, and every address"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it places every storage at an address, and torch's allocator takes none"
REQUIRES = {"dram"}
SCORES = ("voting", "doa", "aoa", "wdoa")
MAX_LIMITS = 8  # how often the limit is lowered for the sake of the placement
LOWER = 0.995  # ... and by how much at least


def plan(problem: Problem, *, score: str = "voting", smallest_block_bytes: int = 1 << 20, fit: str = "best", tier: str = "dram") -> Schedule:
    """score: voting, doa, aoa or wdoa. fit: how SmartPool looks for a range, best or first; none leaves addresses out."""
    if score not in SCORES:
        raise UnknownName("score", score, SCORES)
    if fit not in (*FITS, "none"):
        raise UnknownName("fit", fit, (*FITS, "none"))
    refused: InfeasibleBudget | None = None
    for smallest in (smallest_block_bytes, 0):
        try:
            return _AutoSwap(problem, score, smallest, fit, tier).plan()
        except InfeasibleBudget as error:
            refused = error
    assert refused is not None
    raise refused


@dataclass(slots=True)
class _Block:
    """A candidate. Ops are counted from this step's first; one that wraps begins in the step before, below 0."""

    gap: Gap
    r: int
    d: int
    idle_seconds: float
    hidden_seconds: float  # idle seconds less two copies
    gone: int = 0  # the first op that counts on its bytes
    back: int = 0  # the op before which it is fetched


class _AutoSwap:
    def __init__(self, problem: Problem, score: str, smallest: int, fit: str, tier: str) -> None:
        self.problem, self.score, self.fit, self.tier = problem, score, fit, tier
        self.ops = len(problem.graph.ops)
        self.load = np.array(problem.graph.live_bytes, dtype=np.int64)
        self.peak = int(self.load.argmax()) if self.ops else 0
        self.seconds = np.array(problem.device_seconds)
        period = problem.op_starts[-1]
        # When each op starts, those of the step before in front.
        self.starts = [start - period for start in problem.op_starts[:-1]] + list(problem.op_starts)
        self.blocks = [block for gap in gaps(problem) if gap.nbytes >= smallest and (block := self._candidate(gap)) is not None]
        self.least_load = self._load_without(self.blocks)

    def _candidate(self, gap: Gap) -> _Block | None:
        shift = self.ops if gap.wraps else 0
        r, d = gap.start - shift, gap.end - shift
        if not r < self.peak < d:
            return None
        idle, device, machine = gap_seconds(self.problem, gap), self.problem.device_tier, self.problem.machine
        # The published code counts the copy out twice.
        return _Block(gap, r, d, idle, idle - 2 * machine.copy_seconds(gap.nbytes, device, self.tier))

    def plan(self) -> Schedule:
        """Choose, schedule and place; where placing needs more than there is, with a lower limit."""
        limit, budget = self.problem.budget_bytes, self.problem.budget_bytes
        least = int(self.least_load.max(initial=0))
        for attempt in range(MAX_LIMITS):
            schedule, height = self._placed(max(limit, least))
            if height <= budget and limit >= least:
                return schedule
            if limit <= least:
                raise InfeasibleBudget(
                    f"with all that lies idle across the peak swapped and placed, the step needs {format_bytes(height)}", least_bytes=height
                )
            last = attempt == MAX_LIMITS - 2
            limit = least if last else max(least, min(int(limit * budget / height), int(limit * LOWER)))
        raise AssertionError("the last limit is the least")

    def _placed(self, limit: int) -> tuple[Schedule, int]:
        schedule = self._schedule(self._select(limit), limit)
        if self.fit == "none":
            return schedule, limit
        found = place_offline(self.problem, schedule, fit=self.fit)
        note = f"placed in {format_bytes(found.height_bytes)}, of which {found.fragmentation:.1%} are lost between blocks at the fullest moment"
        return replace(schedule, addresses=found.addresses, notes=(note,)), found.height_bytes

    # -- which blocks ---------------------------------------------------------------------------------------------------------------

    def _select(self, limit: int) -> list[_Block]:
        load, chosen = self.load.copy(), []
        for block in self._ranked(limit):
            if load.max(initial=0) <= limit:
                break
            self._add(load, block.r + 1, block.d, -block.gap.nbytes)
            chosen.append(block)
        return chosen

    def _ranked(self, limit: int) -> list[_Block]:
        blocks = self.blocks
        over = np.concatenate(([0.0], np.cumsum((self.load - limit) * self.seconds)))  # ∫ (load − limit) before each op
        lists = {
            "doa": [block.idle_seconds for block in blocks],
            "aoa": [b.hidden_seconds * b.gap.nbytes if b.hidden_seconds >= 0 else b.hidden_seconds / b.gap.nbytes for b in blocks],
            "wdoa": [over[b.d] - over[max(b.r + 1, 0)] + (over[-1] - over[b.r + 1 + self.ops] if b.r < 0 else 0.0) for b in blocks],
        }
        votes = np.zeros(len(blocks), dtype=np.int64)
        for name, values in lists.items():
            if self.score in (name, "voting"):
                votes[np.argsort(-np.array(values, dtype=float), kind="stable")] += np.arange(len(blocks))
        return [blocks[at] for at in np.argsort(votes, kind="stable")]

    def _load_without(self, blocks: list[_Block]) -> np.ndarray:
        load = self.load.copy()
        for block in blocks:
            self._add(load, block.r + 1, block.d, -block.gap.nbytes)
        return load

    def _add(self, load: np.ndarray, start: int, end: int, nbytes: int) -> None:
        """Change the load from op `start` until op `end`; ops below 0 are the end of the step, and what is away there is away in every step."""
        load[max(start, 0) : max(end, 0)] += nbytes
        if start < 0:
            load[start + self.ops : min(end, 0) + self.ops] += nbytes

    # -- when they move -------------------------------------------------------------------------------------------------------------

    def _schedule(self, chosen: list[_Block], limit: int) -> Schedule:
        load = self.load.copy()
        self._outs(chosen, load, limit)
        self._ins(chosen, load, limit)
        swaps = []
        for block in sorted(chosen, key=lambda block: (block.r, block.gap.storage)):
            wraps, shift = block.gap.wraps, self.ops if block.gap.wraps else 0
            gone = min(block.gone + shift, self.ops) if wraps else block.gone
            swaps.append(Swap(block.gap.storage, self.tier, block.r + 1 + shift, gone, block.back, join=True, wraps=wraps, join_back=False))
        return build(self.problem, swaps)

    def _outs(self, chosen: list[_Block], load: np.ndarray, limit: int) -> None:
        """One behind the other, in the order in which they become idle; forced to end where the load would be over the limit."""
        machine, device = self.problem.machine, self.problem.device_tier
        free_at = -np.inf
        for block in sorted(chosen, key=lambda block: (block.r, block.gap.storage)):
            start = max(self.starts[block.r + 1 + self.ops], free_at)
            free_at = start + machine.copy_seconds(block.gap.nbytes, device, self.tier)
            gone = bisect_left(self.starts, free_at) - self.ops  # the first op that starts when it is out
            gone = max(block.r + 1, min(gone, self.peak, block.d))
            if block.r < 0 <= gone:
                gone = 0  # away from home at the end of a step it could not be
            self._add(load, gone, block.d, -block.gap.nbytes)
            first_over = self._first_over(load, limit, block.r + 1, gone)
            if first_over < gone:
                self._add(load, first_over, gone, -block.gap.nbytes)
                gone = first_over
                free_at = min(free_at, self.starts[gone + self.ops])  # on this timeline the device stands still until it is out
            block.gone = gone

    def _first_over(self, load: np.ndarray, limit: int, start: int, end: int) -> int:
        for op in range(start, end):
            if load[op] > limit:  # an op below 0 is counted from the end
                return op
        return end

    def _ins(self, chosen: list[_Block], load: np.ndarray, limit: int) -> None:
        """One before the other, the last needed first, each done when the next starts; put off where the load would be over the limit."""
        machine, device = self.problem.machine, self.problem.device_tier
        busy_from = np.inf
        for block in sorted(chosen, key=lambda block: (-block.d, block.gap.storage)):
            start = min(self.starts[block.d + self.ops], busy_from) - machine.copy_seconds(block.gap.nbytes, self.tier, device)
            back = bisect_right(self.starts, start) - 1 - self.ops
            back = max(min(back, block.d), self.peak + 1)
            self._add(load, back, block.d, block.gap.nbytes)
            over = np.flatnonzero(load[back : block.d] > limit)
            if len(over):
                later = back + int(over[-1]) + 1
                self._add(load, back, later, -block.gap.nbytes)
                back = later
            block.back = back
            busy_from = self.starts[back + self.ops]
