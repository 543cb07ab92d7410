"""poet: checkmate's program with a second memory: each stage decides what is computed again, what is paged out and what is paged in.

Paper    Patil, Jain, Dutta, Stoica, Gonzalez, ICML 2022, arXiv:2207.07697.
Idea     recomputation and paging compete for the same bytes at different prices; only a program that has both finds the best mixture.
Rule     checkmate's R and S, and  in[t,s], out[t,s], away[t,s]:  S[t+1,s] <= S[t,s] + R[t,i(s)] + in[t,s];  away[t+1,s] <= away[t,s] + out[t,s];
         in[t,s] <= away[t,s];  out[t,s] <= S[t,s];  memory as in checkmate, what is paged in counted from the start of its stage.
         min Σ T[t]  with  T[t] >= seconds of all that runs in t,  >= seconds of the copies out in t,  >= of the copies in.
Differs  the paper minimises energy within a runtime; for a GPU, time takes its place. A copy longer than its stage goes on in the stages after it.
         As checkmate here: bytes are counted by storage, backward runs once, larger graphs are nodes of consecutive ops. Beyond max_exact_nodes a
         smaller program has one choice for each gap (_gap_program.py): keep, page out at once and back from one of three stages, or compute
         again in the stage that needs it. Of this, and of what dropping alone finds, the shorter simulated step wins.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import BadInput, InfeasibleBudget
from ..ir import Problem, Schedule, peak_bytes
from ..simulate import step_seconds
from ..units import format_bytes
from ._gap_program import GapProgram
from ._gaps import Swap, build, gaps
from ._milp import Status, above_once
from ._nodes import Nodes, runs_of
from ._paged import PagedProgram
from ._stages import FIRST_ANSWERS, MOST_OPS, Search, bytes_that_stay, op_by_op, unit_bytes

DECIDES = "what to recompute and what to swap"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it runs ops again at any point of the step, where no region begins or ends"
REQUIRES = {"dram"}

SOLVERS = ("auto", "exact", "gaps")
TRIES = 3  # programs over gaps, each with what the last one's count of bytes was off
GAP_ENOUGH = 0.002  # of a program over gaps, unless told: the last tenths of a percent take most of the time
CLOSE = 0.02  # of the free bytes: near enough


def plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_seconds: float = 40.0,
    relative_gap: float | None = None,
    max_exact_nodes: int = 16,
    max_nodes: int = 110,
    tier: str = "dram",
) -> Schedule:
    """`auto` solves the program over stages for at most `max_exact_nodes` ops and the one over gaps otherwise; `exact` always the former.

    relative_gap: at which the solver may stop; 0 for the program over stages and 0.002 for the one over gaps unless given.
    """
    if solver not in SOLVERS:
        raise BadInput(f"solver {solver!r}; give one of {', '.join(SOLVERS)}")
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    lasting = problem.graph.lasting_bytes
    if lasting > problem.budget_bytes:
        raise InfeasibleBudget(f"what lives across steps alone is {format_bytes(lasting)}; the budget is {format_bytes(problem.budget_bytes)}")
    runs = runs_of(problem, max_nodes, only_forward=True)
    search = _Search(problem, runs, tier)
    search.drop_only()
    if solver == "exact" or (solver == "auto" and len(runs) <= max_exact_nodes):
        search.solve(time_limit_seconds, relative_gap or 0.0)
    else:
        search.choose_gaps(time_limit_seconds, GAP_ENOUGH if relative_gap is None else relative_gap)
    if search.best is None:
        raise InfeasibleBudget(f"no schedule within {format_bytes(problem.budget_bytes)} was found; {search.why}", least_bytes=search.least)
    return replace(search.best, notes=(f"{search.note}; {above_once(problem, search.best_seconds)}",))


class _Search:
    """The schedule with the shortest simulated step so far that fits."""

    def __init__(self, problem: Problem, runs: list[range], tier: str) -> None:
        self.problem, self.tier = problem, tier
        self.free_bytes = problem.budget_bytes - problem.graph.lasting_bytes
        self.nodes = Nodes(problem, runs, only_forward=True)
        self.units = Nodes(problem, runs, unit=unit_bytes(problem, self.free_bytes), only_forward=True)
        self.best: Schedule | None = None
        self.best_seconds = math.inf
        self.least: int | None = None
        self.note = "dropping alone"
        self.why = "use a larger budget"

    def offer(self, schedule: Schedule, note: str) -> None:
        peaks = peak_bytes(self.problem, schedule)
        if any(peaks[tier.name] > tier.capacity_bytes for tier in self.problem.machine.tiers):
            return
        seconds = step_seconds(self.problem, schedule)
        if seconds < self.best_seconds:
            self.best, self.best_seconds, self.note = schedule, seconds, note

    def drop_only(self) -> None:
        """Node by node, taken back where there is room, and op by op."""
        for runs in ([node.ops for node in self.nodes.nodes], op_by_op(self.problem)):
            search = Search(self.problem, runs, only_forward=True)
            search.evict(*FIRST_ANSWERS)
            if search.best is not None:
                if len(search.nodes) == len(self.nodes):
                    search.polish()
                self.offer(search.best, "dropping alone was the best found")
            if len(self.problem.graph.ops) > MOST_OPS:
                break

    def solve(self, time_limit_seconds: float, relative_gap: float) -> None:
        program = PagedProgram(self.units, self.free_bytes // self.units.unit, self.problem, self.tier)
        found = program.program.solve(time_limit_seconds=time_limit_seconds, relative_gap=relative_gap)
        if found:
            self.offer(program.schedule(found), f"integer program of {len(self.nodes)} nodes, {found.status}, gap {found.gap:.1%}")
        elif found.status is Status.INFEASIBLE:
            self.why = "the integer program has no solution: use a larger budget"
        else:
            self.why = f"the solver reached its limit of {time_limit_seconds:g} s without a solution: use a larger budget or time_limit_seconds"

    def choose_gaps(self, time_limit_seconds: float, relative_gap: float) -> None:
        """The program over gaps, again with the room its last plan left, as long as that plan fits and is better."""
        capacity = self.free_bytes
        for _ in range(TRIES):
            program = GapProgram(self.units, capacity // self.units.unit, self.problem, self.tier)
            found = program.program.solve(time_limit_seconds=time_limit_seconds / TRIES, relative_gap=relative_gap)
            if not found:
                self.why = f"the program over the gaps of {len(self.nodes)} nodes is {found.status}: use a larger budget or time_limit_seconds"
                break
            schedule = build(self.problem, *program.choices(found))
            needed = peak_bytes(self.problem, schedule)[self.problem.device_tier]
            self.offer(schedule, f"a program over {len(program.gaps)} gaps of {len(self.nodes)} nodes, {found.status}, gap {found.gap:.1%}")
            left = self.problem.budget_bytes - needed
            if abs(left) < CLOSE * self.free_bytes:
                break
            capacity += left if left > 0 else left - int(CLOSE * self.free_bytes)
        if self.best is None:
            self.least = min(self._swap_everything(), self._least_by_dropping())

    def _least_by_dropping(self) -> int:
        search = Search(self.problem, [node.ops for node in self.nodes.nodes], only_forward=True)
        found = search.least_bytes(bytes_that_stay(self.problem, recompute_backward=False), *FIRST_ANSWERS)
        return found if found is not None else sum(s.nbytes for s in self.problem.graph.storages)

    def _swap_everything(self) -> int:
        """The last resort, and the bytes it takes of the device; all there are, where the other tier has no room for it."""
        graph = self.problem.graph
        idle = [
            gap for gap in gaps(self.problem) if not gap.wraps and not graph.storages[gap.storage].lasting and gap.storage not in graph.consumed_by
        ]
        schedule = build(self.problem, [Swap(gap.storage, self.tier, gap.start + 1, gap.start + 1, gap.end) for gap in idle])
        self.offer(schedule, "everything idle is swapped, and the device waits")
        peaks = peak_bytes(self.problem, schedule)
        has_room = peaks[self.tier] <= self.problem.machine.capacity(self.tier)
        return peaks[self.problem.device_tier] if has_room else sum(s.nbytes for s in graph.storages)
