"""The integer program over stages and nodes, and the search for a schedule with it: what Checkmate and its successors share.

Stage t is all that runs until node t has run for the first time (_nodes.py). The program says which earlier nodes run again in it, and what is
there when it begins. Small programs are solved; large ones are relaxed, and the answer is rounded.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import BadInput, InfeasibleBudget, InvalidSchedule
from ..ir import Compute, Op, Phase, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._gaps import build
from ._milp import Program, Solution, Status, above_once
from ._nodes import Nodes, Score, Victim, evict_in_order, runs_of, schedule_of

SOLVERS = ("auto", "exact", "rounding")
MOST_OPS = 4000  # to be looked at one by one
MEMORY_UNITS = 100_000  # the solver's tolerance of 1e-6 must stay far below one unit
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RELAXED_SHARES = (0.9, 0.95, 1.0)  # of the budget, for the relaxed program: rounding adds to what it holds
LEAST_TRIES = 10  # halvings of the interval in which a budget that works is looked for
LEAST_SECONDS = 1.0  # with less left, a relaxed program is not begun
LEAST_GAIN = 1e-6  # share of the step's seconds by which a better answer must be better

Stages = list[list[int]]


def op_by_op(problem: Problem) -> list[range]:
    """Every op a node of its own, but updates, which never run again, in one."""
    ops = problem.graph.ops
    end = next((op.id for op in ops if op.phase is Phase.UPDATE), len(ops))
    return [range(op, op + 1) for op in range(end)] + ([range(end, len(ops))] if end < len(ops) else [])


def bytes_that_stay(problem: Problem, *, recompute_backward: bool) -> int:
    """What some op needs at least: what lasts, what it touches, and what waits there that cannot be computed again."""
    graph = problem.graph
    waits = [0] * (len(graph.ops) + 1)  # change of the bytes that wait, from each op to the next
    for storage in graph.storages:
        producer, uses = graph.producer(storage.id), graph.uses[storage.id]
        if storage.lasting or producer is None or storage.id in graph.consumed_by:
            continue
        runs_once = graph.ops[producer].phase is not Phase.FORWARD and not recompute_backward
        if runs_once or storage.id not in graph.recomputable:
            waits[producer] += storage.nbytes
            waits[uses[-1] + 1] -= storage.nbytes
    lasting = graph.lasting_bytes
    most = level = 0
    for op in graph.ops:
        level += waits[op.id]
        most = max(most, level)
    touched = max((_touched_bytes(problem, op) for op in graph.ops), default=0)
    return lasting + max(most, touched)


def _touched_bytes(problem: Problem, op: Op) -> int:
    storages, taken_over = problem.graph.storages, {old for old, _ in op.in_place}
    touched = set(op.reads + op.writes + op.mutates) - taken_over
    return op.workspace_bytes + sum(storages[s].nbytes for s in touched if not storages[s].lasting)


def find(
    problem: Problem,
    *,
    solver: str,
    time_limit_seconds: float,
    relative_gap: float,
    max_exact_nodes: int,
    max_nodes: int,
    recompute_backward: bool = False,
    forward_once: bool = False,
) -> Schedule:
    """The best schedule found: by solving the program exactly, or by dropping op by op and by rounding the relaxed program of fewer nodes.

    forward_once: nothing runs again before backward begins.
    """
    if solver not in SOLVERS:
        raise BadInput(f"solver {solver!r}; give one of {', '.join(SOLVERS)}")
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    runs = runs_of(problem, max_nodes, only_forward=not recompute_backward)
    exact = solver == "exact" or (solver == "auto" and len(runs) <= max_exact_nodes)
    search, fine = (
        Search(problem, nodes, only_forward=not recompute_backward, first_again=_first_backward(problem, nodes) if forward_once else 0)
        for nodes in (runs, runs if exact or len(problem.graph.ops) > MOST_OPS else op_by_op(problem))
    )
    if (stays := bytes_that_stay(problem, recompute_backward=recompute_backward)) > problem.budget_bytes:
        search.why = f"what cannot be computed again alone takes {format_bytes(stays)}"
    elif exact:
        search.evict(*FIRST_ANSWERS)
        search.solve(time_limit_seconds, relative_gap)
    else:
        search.evict(*FIRST_ANSWERS)
        fine.evict(*FIRST_ANSWERS)
        search.learn(fine)
        search.round(time_limit_seconds)
        search.polish()
    if search.best is None:
        # Whatever finds the smaller budget: dropping whole nodes, or op by op.
        found = [] if exact else [each.least_bytes(stays, *FIRST_ANSWERS) for each in (search, fine)]
        least = min((each for each in found if each is not None), default=None)
        raise InfeasibleBudget(f"no schedule within {format_bytes(problem.budget_bytes)} was found; {search.why}", least_bytes=least)
    return replace(search.best, notes=(f"{search.note}; {above_once(problem, search.best_seconds)}",))


def _first_backward(problem: Problem, runs: Sequence[range]) -> int:
    """The first stage whose node is no longer forward alone."""
    ops = problem.graph.ops
    return next((stage for stage, run in enumerate(runs) if any(ops[op].phase is not Phase.FORWARD for op in run)), len(runs))


class Search:
    """The cheapest schedule so far that fits."""

    def __init__(self, problem: Problem, runs: Sequence[range], *, only_forward: bool, first_again: int = 0) -> None:
        """first_again: the first stage in which anything may run again."""
        self.problem, self.first_again = problem, first_again
        self.free_bytes = problem.budget_bytes - problem.graph.lasting_bytes
        self.nodes = Nodes(problem, runs, only_forward=only_forward)
        self.units = Nodes(problem, runs, unit=unit_bytes(problem, self.free_bytes), only_forward=only_forward)
        self.best: Schedule | None = None
        self.best_seconds = math.inf
        self.best_stages: Stages = []
        self.why = "use a larger budget"
        self.note = f"the first answer: of {len(self.nodes)} nodes, what is cheap to make again per byte is dropped"

    def offer(self, stages: Stages | None) -> None:
        if stages is None or any(len(stage) > 1 for stage in stages[: self.first_again]):
            return
        schedule = schedule_of(self.problem, self.nodes.computes(stages))
        seconds = sum(self.problem.device_seconds[step.op] for step in schedule.steps if isinstance(step, Compute))
        if seconds < self.best_seconds and peak_bytes(self.problem, schedule)[self.problem.device_tier] <= self.problem.budget_bytes:
            self.best, self.best_seconds, self.best_stages = schedule, seconds, stages

    def polish(self) -> None:
        """Take back what runs again where there turns out to be room to keep it, the longest first."""
        again = [(stage, node) for stage, nodes in enumerate(self.best_stages) for node in nodes if node != stage]
        for stage, node in sorted(again, key=lambda run: (-self.nodes.nodes[run[1]].seconds, run)):
            without = [[n for n in nodes if (t, n) != (stage, node)] for t, nodes in enumerate(self.best_stages)]
            # What an op in place took over is not there to be kept.
            with contextlib.suppress(InvalidSchedule):
                self.offer(without)

    def evict(self, *scores: Callable[[Nodes], Score]) -> None:
        for score in scores:
            self.offer(evict_in_order(self.nodes, self.free_bytes, score(self.nodes)))

    def learn(self, other: Search) -> None:
        """Take over what another search of the same step has found, if it is better."""
        if other.best is not None and other.best_seconds < self.best_seconds:
            self.best, self.best_seconds, self.best_stages, self.note = other.best, other.best_seconds, [], other.note

    def least_bytes(self, stays: int, *scores: Callable[[Nodes], Score]) -> int | None:
        """A budget at which dropping finds an answer, and not much less would do; found without the solver. `stays` is too little."""
        lasting = self.problem.budget_bytes - self.free_bytes

        def works(budget_bytes: int) -> bool:
            search = Search(
                self.problem.with_budget(budget_bytes), [node.ops for node in self.nodes.nodes], only_forward=True, first_again=self.first_again
            )
            search.evict(*scores)
            return search.best is not None

        low, high = max(self.problem.budget_bytes, stays), lasting + sum(self.nodes.size.values()) + max(node.peak for node in self.nodes.nodes)
        if not works(high):
            return None
        for _ in range(LEAST_TRIES):
            middle = low + (high - low) // 3  # most often not much more than what stays is needed
            low, high = (low, middle) if works(middle) else (middle, high)
        return high

    def solve(self, time_limit_seconds: float, relative_gap: float) -> None:
        """Look for something better than the first answer; proof that there is nothing better is as good."""
        model = StageProgram(self.units, self.free_bytes // self.units.unit, first_again=self.first_again)
        if self.best is not None:
            model.cost_at_most(self.best_seconds - LEAST_GAIN * self.problem.op_starts[-1])
        found = model.program.solve(time_limit_seconds=time_limit_seconds, relative_gap=relative_gap)
        if found:
            self.offer(model.stages(found))
            self.note = f"integer program of {len(self.nodes)} nodes, {found.status}, gap {found.gap:.1%}"
        elif found.status is Status.INFEASIBLE:
            self.why = "the integer program has no solution: use a larger budget"
            self.note = f"integer program of {len(self.nodes)} nodes: nothing is better than the first answer"
        else:
            self.note += f"; the solver found nothing better in {time_limit_seconds:g} s"
            self.why = f"the solver reached its limit of {time_limit_seconds:g} s without a solution: use a larger budget or time_limit_seconds"

    def round(self, time_limit_seconds: float) -> None:
        """The limit is for all relaxed programs together."""
        began = time.monotonic()
        for share in RELAXED_SHARES:
            left = time_limit_seconds - (time.monotonic() - began)
            if left < LEAST_SECONDS:
                return
            model = StageProgram(self.units, int(self.free_bytes * share) // self.units.unit, first_again=self.first_again)
            relaxed = model.program.solve(time_limit_seconds=left, relaxed=True)
            if relaxed:
                before = self.best_seconds
                self.why = "no rounding of the relaxed program fits: use a larger budget, or solver='exact'"
                for threshold in THRESHOLDS:
                    self.offer(model.rounded(relaxed, threshold))
                self.offer(evict_in_order(self.nodes, self.free_bytes, model.kept_first(relaxed)))
                program = f"the relaxed program of {len(self.nodes)} nodes with {share:g} of the free bytes"
                self.note = f"rounded from {program}" if self.best_seconds < before else f"{self.note}; rounding {program} gave nothing better"
                if share == 1:
                    self.note += f"; at most {self.best_seconds / relaxed.objective - 1:.1%} above the best"
            elif relaxed.status is Status.INFEASIBLE:
                self.why = "the relaxed program has no solution: use a larger budget"
            else:
                self.note += f"; the program of {len(self.nodes)} nodes was not relaxed in {time_limit_seconds:g} s"
                self.why = f"the solver did not relax the program in {time_limit_seconds:g} s: use fewer max_nodes or a larger time_limit_seconds"
            if self.best is not None:
                return


def unit_bytes(problem: Problem, free_bytes: int) -> int:
    """The largest unit in which all sizes are whole, or one in which the budget is MEMORY_UNITS."""
    sizes = [s.nbytes for s in problem.graph.storages if not s.lasting] + [op.workspace_bytes for op in problem.graph.ops]
    return max(1, math.gcd(*sizes), math.ceil(free_bytes / MEMORY_UNITS) if free_bytes // max(1, math.gcd(*sizes)) > MEMORY_UNITS else 1)


# -- whom to drop first -----------------------------------------------------------------------------------------------------------------


def per_byte(nodes: Nodes) -> Score:
    return lambda victim: (victim.seconds / nodes.size[victim.parcel], -victim.next_use)


def around_per_byte(nodes: Nodes) -> Score:
    return lambda victim: (victim.seconds_around / nodes.size[victim.parcel], -victim.next_use)


def around_per_byte_and_time(nodes: Nodes) -> Score:
    starts = [nodes.problem.op_starts[node.ops.start] for node in nodes.nodes]
    return lambda v: (v.seconds_around / nodes.size[v.parcel] / max(starts[v.next_use] - starts[v.now], 1e-300), -v.next_use)


FIRST_ANSWERS: tuple[Callable[[Nodes], Score], ...] = (per_byte, around_per_byte, around_per_byte_and_time)


# -- the program -----------------------------------------------------------------------------------------------------------------------


class StageProgram:
    """The integer program over stages and nodes."""

    def __init__(self, nodes: Nodes, capacity: int, *, first_again: int = 0, run_costs: bool = True) -> None:
        """first_again: the first stage in which anything may run again. run_costs: whether the seconds of what runs are the objective."""
        self.nodes, self.capacity, self.program = nodes, capacity, Program()
        count = len(nodes)
        self.once = self.program.variable(1, 1, cost=sum(node.seconds for node in nodes.nodes) * run_costs)  # every node's own run
        self.runs = {(t, t): self.once for t in range(count)}
        self.kept = {(0, s): self.once for s, home in nodes.home.items() if home == -1}
        for index, node in enumerate(nodes.nodes):
            for stage in range(max(index + 1, first_again), node.again_until + 1):
                self.runs[stage, index] = self.program.variable(cost=node.seconds * run_costs, integer=True)
        for parcel, home in nodes.home.items():
            for stage in range(max(home + 1, 1), nodes.needed_until[parcel] + 1):
                # Not declared integer: with all runs 0 or 1, the least that must be kept is too.
                self.kept[stage, parcel] = self.program.variable()
        self.prepare()
        for stage in range(count):
            freed = {}
            for parcel, home in nodes.home.items():
                if home <= stage:
                    goes = self._life(stage, parcel)
                    self.live(stage, parcel, goes)
                    freed.update(goes)
            self._memory(stage, freed)

    def prepare(self) -> None:
        """Further variables of a larger program."""

    def arrivals(self, stage: int, parcel: int) -> list[int]:
        """Variables: the parcel, which is not made, is there from the next stage on."""
        return []

    def arriving(self, stage: int, parcel: int) -> list[int]:
        """Variables: the parcel is on its way in this stage and takes its bytes."""
        return []

    def live(self, stage: int, parcel: int, freed: dict[tuple[int, int], int]) -> None:
        """Further constraints on a parcel within a stage."""

    def cost_at_most(self, seconds: float) -> None:
        total = sum(node.seconds for node in self.nodes.nodes) or 1.0
        terms = [(run, self.nodes.nodes[index].seconds / total) for (stage, index), run in self.runs.items() if index != stage]
        self.program.constrain(terms, upper=seconds / total - 1)

    def _life(self, stage: int, parcel: int) -> dict[tuple[int, int], int]:
        """A parcel within a stage: who reads it finds it, it goes once, and what is kept was there. Returns (parcel, node) -> it goes there."""
        home, constrain = self.nodes.home[parcel], self.program.constrain
        kept, made, next_kept = self.kept.get((stage, parcel)), self.runs.get((stage, home)), self.kept.get((stage + 1, parcel))
        have = [(variable, -1.0) for variable in (kept, made) if variable is not None]
        arrives = [(variable, -1.0) for variable in self.arrivals(stage, parcel)]
        if len(have + arrives) > 1:
            constrain([(variable, 1.0) for variable, _ in have + arrives], upper=1)  # made again only if it is not there: never worth less
        freed: dict[tuple[int, int], int] = {}
        for index in (home, *self.nodes.readers[parcel]):
            run = self.runs.get((stage, index))
            if run is None:
                continue
            if index != home:
                constrain([(run, 1.0), *((free, 1.0) for free in freed.values()), *have], upper=0)
            if parcel in self.nodes.nodes[index].consumes:
                if next_kept is not None:
                    constrain([(next_kept, 1.0), (run, 1.0)], upper=1)
            elif self._can_go(stage, parcel, index):
                free = freed[parcel, index] = self.program.variable()
                constrain([(free, 1.0), (run, -1.0)], upper=0)
        if next_kept is not None or freed:
            left = [(next_kept, 1.0)] if next_kept is not None else []
            constrain([*left, *((free, 1.0) for free in freed.values()), *have, *arrives], upper=0)
            if arrives and freed:
                constrain([*((free, 1.0) for free in freed.values()), *have], upper=0)
        return freed

    def _can_go(self, stage: int, parcel: int, index: int) -> bool:
        """Whether it matters that a parcel goes behind its last use within a node."""
        node = self.nodes.nodes[index]
        if not self.nodes.size[parcel]:
            return False
        if index == stage:
            return parcel not in node.stretches[-1].ends  # what goes with the stage's end is simply not kept
        return index != self.nodes.home[parcel] or len(node.makes) > 1  # a single output is not made again to be thrown away

    def _memory(self, stage: int, freed: dict[tuple[int, int], int]) -> None:
        size, constrain = self.nodes.size, self.program.constrain
        level = self.program.variable(upper=self.capacity)
        there = [(self.kept[stage, s], float(size[s])) for s in self.nodes.home if (stage, s) in self.kept]
        there += [(coming, float(size[s])) for s in self.nodes.home for coming in self.arriving(stage, s)]
        constrain([*there, (level, -1.0)], lower=0, upper=0)
        for index in range(stage + 1):
            run = self.runs.get((stage, index))
            if run is None:
                continue
            node = self.nodes.nodes[index]
            gone: list[tuple[int, float]] = []
            for stretch in node.stretches:
                constrain([(level, 1.0), (run, float(stretch.peak)), *gone], upper=self.capacity)
                gone += [(freed[s, index], -float(size[s])) for s in stretch.ends if (s, index) in freed]
            if index < stage:
                after = self.program.variable(upper=self.capacity)
                constrain([(level, 1.0), (run, float(node.grows)), *gone, (after, -1.0)], lower=0, upper=0)
                level = after

    # -- answers ------------------------------------------------------------------------------------------------------------------

    def stages(self, found: Solution) -> Stages:
        return [[index for index in range(stage + 1) if self._is_run(found, stage, index)] for stage in range(len(self.nodes))]

    def _is_run(self, found: Solution, stage: int, index: int) -> bool:
        return index == stage or ((stage, index) in self.runs and found.chosen(self.runs[stage, index]))

    def rounded(self, relaxed: Solution, threshold: float) -> Stages | None:
        """Keep what the relaxed program keeps to at least the threshold, and run again what is then missing, from the last stage back.

        None if an in-place op would take over what is to be kept.
        """
        kept = {key for key, variable in self.kept.items() if relaxed.values[variable] >= threshold}
        stages: Stages = []
        for stage in reversed(range(len(self.nodes))):
            run = {stage}
            wanted = [s for s, home in self.nodes.home.items() if (stage + 1, s) in kept and home != stage]
            while wanted:
                self._have(stage, wanted.pop(), run, kept)
            for index in range(stage, -1, -1):
                if index in run:
                    for parcel in self.nodes.nodes[index].reads:
                        self._have(stage, parcel, run, kept)
            if any((stage + 1, parcel) in kept for index in run for parcel in self.nodes.nodes[index].consumes):
                return None
            stages.append(sorted(run))
        return stages[::-1]

    def _have(self, stage: int, parcel: int, run: set[int], kept: set[tuple[int, int]]) -> None:
        """A parcel is there in a stage: it was kept, its node runs, or, where that cannot be, it is kept after all."""
        home = self.nodes.home[parcel]
        if (stage, parcel) in kept or home in run:
            return
        if (stage, home) in self.runs:
            run.add(home)
        else:
            kept.add((stage, parcel))

    def kept_first(self, relaxed: Solution) -> Score:
        """Drop first what the relaxed program keeps least."""

        def score(victim: Victim) -> tuple[float, ...]:
            variables = (self.kept.get((stage, victim.parcel)) for stage in range(victim.now + 1, victim.next_use + 1))
            kept = min((0.0 if v is None else relaxed.values[v] for v in variables), default=1.0)
            return (round(kept, 2), victim.seconds / self.nodes.size[victim.parcel], -victim.next_use)

        return score
