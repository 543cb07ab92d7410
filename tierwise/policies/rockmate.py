"""rockmate: a few ways to run each block, by integer programming, equal blocks solved once; the best of them along the chain, by dynamic programming.

Paper    Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, Rockmate, ICML 2023, arXiv:2307.01236.
Idea     within a block the best recomputation is a small integer program; between blocks it is a chain, for which dynamic programming is exact.
Rule     for a number of byte limits b:  min Σ seconds of ops run again  with  Σ bytes saved <= b  and all that the block's backward reads saved or
         made again; each answer is an option (bytes saved, peaks, seconds). Then opt(s, t, m) over blocks: run s with an option and go on with
         less memory, or run to r saving its input only, go on from there, and begin s to r - 1 again (_rotor.py).
Differs  an option runs each op again at most once, where the paper's inner program may do so more often; its peaks are counted, not bounded in
         the program. Sizes are rounded up to 1/slots of what keeping everything takes; the memory that rounding leaves is used by trying larger
         limits, as far as the plan really fits. What reaches over several blocks is kept. More than max_blocks blocks are joined.
         HiRemate's hierarchy and OffMate's offloading, by the same group, are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InfeasibleBudget
from ..ir import Compute, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._chain import Chain, Segment, chain_of
from ._gaps import build
from ._milp import Program, above_once
from ._nodes import schedule_of
from ._rotor import Choice, Rotor, Stage

DECIDES = "what to recompute"
FIDELITY = "like"
EXECUTABLE = "simulated only: blocks begun again run their forward between the backward of others, where no region begins or ends"


def plan(problem: Problem, *, limits: int = 12, slots: int = 4000, max_blocks: int = 64) -> Schedule:
    """limits: how many byte limits are tried for each block."""
    everything = build(problem)
    kept_bytes = peak_bytes(problem, everything)[problem.device_tier]
    if kept_bytes <= problem.budget_bytes:
        return everything
    chain = chain_of(problem, most=max_blocks)
    unit = max(1, -(-kept_bytes // slots))
    solver = _Solver(chain, unit, limits)
    ways = solver.ways((kept_bytes - chain.fixed_bytes) // unit)
    return _fastest_that_fits(problem, solver, ways)


def _fastest_that_fits(problem: Problem, solver: _Solver, ways: list[int]) -> Schedule:
    """Among ways of falling seconds and growing memory, the last whose schedule is within the budget."""
    least = math.inf
    best: Schedule | None = None
    low, high = 0, len(ways) - 1
    middle = 0  # the smallest first: if it does not fit, nothing does
    while low <= high:
        schedule = solver.schedule(ways[middle])
        needed = peak_bytes(problem, schedule)[problem.device_tier]
        least = min(least, needed)
        if needed <= problem.budget_bytes:
            best, low = schedule, middle + 1
        elif best is None:
            break
        else:
            high = middle - 1
        middle = (low + high) // 2
    if best is None:
        known = None if math.isinf(least) else int(least)
        raise InfeasibleBudget(
            f"the chain of {len(solver.chain.segments)} blocks needs {format_bytes(known)}"
            if known
            else "no way through the chain of blocks was found",
            least_bytes=known,
        )
    note = f"{len(solver.chain.segments)} blocks, {solver.solved} of them different, with {solver.options_found} options in all"
    seconds = sum(problem.device_seconds[step.op] for step in best.steps if isinstance(step, Compute))
    return replace(best, notes=(f"{note}; {above_once(problem, seconds)}",))


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run a segment, in places: which storage is the w-th output of the f-th op of its forward."""

    saved: frozenset[tuple[int, int]]


class _Solver:
    def __init__(self, chain: Chain, unit: int, limits: int) -> None:
        self.chain, self.problem, self.graph = chain, chain.problem, chain.problem.graph
        self.unit, self.limits = unit, limits
        known: dict[tuple[object, ...], list[Option]] = {}
        self.saved: list[list[frozenset[int]]] = []  # for each segment and option, the storages it saves
        stages = []
        for index, segment in enumerate(chain.segments):
            key = self._signature(segment)
            if key not in known:
                known[key] = self._options(index, segment)
            saved = [frozenset(self.graph.ops[segment.forward[f]].writes[w] for f, w in option.saved) for option in known[key]]
            stage, kept = self._stage(index, segment, saved)
            self.saved.append(kept)
            stages.append(stage)
        stages.append(self._turn())
        self.stages = stages
        self.solved, self.options_found = len(known), sum(map(len, known.values()))

    def ways(self, most_units: int) -> list[int]:
        """Numbers of units at which a faster way begins, fewest first."""
        self.rotor = Rotor(self.stages, max(0, most_units))
        best = self.rotor.best
        falls = np.flatnonzero(np.isfinite(best) & (best < np.concatenate(([np.inf], best[:-1]))))
        return [int(units) for units in falls]

    # -- options --------------------------------------------------------------------------------------------------------------------

    def _signature(self, segment: Segment) -> tuple[object, ...]:
        """Equal for segments that are copies of each other."""
        first = segment.forward[0]
        made = {s: (f, w) for f, op in enumerate(segment.forward) for w, s in enumerate(self.graph.ops[op].writes)}
        found: list[object] = []
        for op in (*segment.forward, *segment.backward):
            reads = tuple(made.get(read, ("outside", self.graph.storages[read].nbytes)) for read in self.graph.ops[op].reads)
            sizes = tuple((self.graph.storages[s].nbytes, self.chain.kinds[s][0]) for s in self.graph.ops[op].writes)
            found.append((op - first if op in segment.forward else -1, reads, sizes, self.problem.device_seconds[op]))
        return tuple(found)

    def _options(self, index: int, segment: Segment) -> list[Option]:
        """Answers of the integer program for limits from everything to nothing."""
        wanted = self._read_in_backward(index, segment)
        place = {s: (f, w) for f, op in enumerate(segment.forward) for w, s in enumerate(self.graph.ops[op].writes)}
        total = sum(self.graph.storages[s].nbytes for s in wanted)
        found: dict[frozenset[tuple[int, int]], Option] = {}
        for step in range(self.limits, -1, -1):
            saved = self._save_within(index, segment, wanted, total * step // max(1, self.limits))
            if saved is not None:
                option = Option(frozenset(place[s] for s in saved))
                found.setdefault(option.saved, option)
        return list(found.values())

    def _read_in_backward(self, index: int, segment: Segment) -> list[int]:
        backward = set(segment.backward)
        return [
            s for op in segment.forward for s in self.graph.ops[op].writes
            if self.chain.kinds[s] == ("own", index) and not backward.isdisjoint(self.graph.uses[s])
        ]  # fmt: skip

    def _save_within(self, index: int, segment: Segment, wanted: list[int], limit: int) -> set[int] | None:
        """The storages to save, at most `limit` bytes, so that the fewest seconds are computed again; None if there is no such set."""
        program = Program()
        own = [s for op in segment.forward for s in self.graph.ops[op].writes if self.chain.kinds[s] == ("own", index)]
        unit = max(1, limit)
        saved = {s: program.variable(0, 0 if s in self.graph.consumed_by else 1, integer=True) for s in own}
        there = {s: program.variable(int(s in wanted), 1) for s in own}
        again = {}
        for op in segment.forward:
            if not self.graph.ops[op].mutates and any(s in saved for s in self.graph.ops[op].writes):
                again[op] = program.variable(cost=max(self.problem.device_seconds[op], 1e-12), integer=True)
                for read in self.graph.ops[op].reads:
                    if read in there:
                        program.constrain([(again[op], 1.0), (there[read], -1.0)], upper=0)
        for op in segment.forward:
            for s in self.graph.ops[op].writes:
                if s in there:
                    ways = [(saved[s], -1.0)] + ([(again[op], -1.0)] if op in again else [])
                    program.constrain([(there[s], 1.0), *ways], upper=0)
        program.constrain([(saved[s], self.graph.storages[s].nbytes / unit) for s in own], upper=limit / unit)
        found = program.solve()
        return {s for s in own if found.chosen(saved[s])} if found else None

    # -- what options cost ------------------------------------------------------------------------------------------------------------

    def _stage(self, index: int, segment: Segment, options: list[frozenset[int]]) -> tuple[Stage, list[frozenset[int]]]:
        choices: list[Choice] = []
        kept: list[frozenset[int]] = []
        for saved in options:
            again = list(self._recomputed(index, segment, saved))
            seconds = sum(self.problem.device_seconds[op] for op, is_again in again if is_again)
            saved_bytes = sum(self.graph.storages[s].nbytes for s in saved)
            peaks = self._forward_peak(index, segment, saved), self._backward_peak(index, segment, saved, again)
            choices.append(Choice(self._units(saved_bytes), self._units(peaks[0]), self._units(peaks[1]), seconds))
            kept.append(saved)
        stage = Stage(
            seconds=sum(self.problem.device_seconds[op] for op in segment.forward),
            choices=tuple(choices),
            passing_peak=self._units(self._forward_peak(index, segment, frozenset())),
            output=self._units(self.chain.bytes_of("between", index)),
            gradient=self._units(self.chain.bytes_of("gradient", index)),
            left=self._units(self.chain.bytes_of("left", index)),
        )
        return stage, kept

    def _turn(self) -> Stage:
        index = len(self.chain.segments)
        level = _Level(self, index)
        for op in self.chain.turn:
            level.run(op, {s for s in self.graph.ops[op].reads + self.graph.ops[op].writes if self.graph.uses[s][-1] <= op})
        peak = self._units(level.peak)
        gradient, left = (self._units(self.chain.bytes_of(kind, index)) for kind in ("gradient", "left"))
        return Stage(0.0, (Choice(0, peak, peak, 0.0),), peak, 0, gradient, left)

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _forward_peak(self, index: int, segment: Segment, saved: frozenset[int]) -> int:
        level = _Level(self, index)
        last = {s: op for op in segment.forward for s in self.graph.ops[op].reads + self.graph.ops[op].writes}
        for op in segment.forward:
            touched = self.graph.ops[op].reads + self.graph.ops[op].writes
            level.run(op, {s for s in touched if last[s] == op and s not in saved and self.chain.kinds[s] == ("own", index)})
        return level.peak

    def _recomputed(self, index: int, segment: Segment, saved: frozenset[int]) -> Iterator[tuple[int, bool]]:
        """The ops of backward, and before each those that must run again for it: (op, whether it runs again)."""
        here = set(saved)
        maker = {s: op for op in segment.forward for s in self.graph.ops[op].writes if self.chain.kinds[s] == ("own", index)}
        wanted = (
            {s: max(uses) for s in maker if (uses := [use for use in self.graph.uses[s] if use >= segment.backward[0]])} if segment.backward else {}
        )
        for op in segment.backward:
            again: set[int] = set()
            pending = [read for read in self.graph.ops[op].reads if read in maker and read not in here]
            while pending:
                made_by = maker[pending.pop()]
                if made_by not in again:
                    again.add(made_by)
                    pending.extend(read for read in self.graph.ops[made_by].reads if read in maker and read not in here)
            for run in sorted(again):
                yield run, True
                here.update(s for s in self.graph.ops[run].writes if wanted.get(s, -1) >= op)
            yield op, False

    def _backward_peak(self, index: int, segment: Segment, saved: frozenset[int], order: list[tuple[int, bool]]) -> int:
        level = _Level(self, index)
        level.hold(saved)
        last = {s: place for place, (op, _) in enumerate(order) for s in self.graph.ops[op].reads + self.graph.ops[op].writes}
        for place, (op, is_again) in enumerate(order):
            touched = self.graph.ops[op].reads + self.graph.ops[op].writes
            level.run(op, {s for s in touched if last[s] == place and self.chain.kinds[s] == ("own", index)}, twice=is_again)
        return level.peak

    # -- the schedule -------------------------------------------------------------------------------------------------------------------

    def schedule(self, units: int) -> Schedule:
        computes = list(self.chain.head)
        ran: set[int] = set()
        for what, index, choice in self.rotor.steps(units):
            if what == "turn":
                computes += self.chain.turn
                continue
            segment = self.chain.segments[index]
            if what == "forward":
                # What changes something in place, or cannot be replayed, runs once; what it made is fixed.
                ops = [op for op in segment.forward if op not in ran or (self.graph.ops[op].replayable and not self.graph.ops[op].mutates)]
                computes += ops
                ran.update(ops)
            else:
                computes += [op for op, _ in self._recomputed(index, segment, self.saved[index][choice])]
        return schedule_of(self.problem, computes + list(self.chain.tail))


class _Level:
    """Bytes of a segment as its ops run, without what is fixed and without what others hold."""

    def __init__(self, solver: _Solver, index: int) -> None:
        self.solver, self.index = solver, index
        self.here: set[int] = set()
        self.level = self.peak = 0

    def hold(self, storages: frozenset[int]) -> None:
        self.here |= storages
        self.level += sum(self.solver.graph.storages[s].nbytes for s in storages)

    def run(self, op_id: int, ends: set[int], *, twice: bool = False) -> None:
        graph, kinds = self.solver.graph, self.solver.chain.kinds
        op = graph.ops[op_id]
        taken_over = {new: old for old, new in op.in_place}
        extra = op.workspace_bytes
        for storage in op.writes:
            if kinds[storage][0] == "fixed":
                if twice:
                    extra += graph.storages[storage].nbytes
                continue
            old = taken_over.get(storage)
            if old in self.here:
                self.here.discard(old)
                self.level -= graph.storages[old].nbytes
            if storage in self.here:
                extra += graph.storages[storage].nbytes
            else:
                self.here.add(storage)
                self.level += graph.storages[storage].nbytes
        self.peak = max(self.peak, self.level + extra)
        for storage in ends:
            if storage in self.here:
                self.here.discard(storage)
                self.level -= graph.storages[storage].nbytes
