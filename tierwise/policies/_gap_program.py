"""Keep, page or compute again: one choice for each gap in which a parcel of nodes is idle, by integer programming. For steps of a hundred nodes.

Smaller than a program over stages and all that could run in them: what is paged out goes at once and begins to come back in one of few stages;
what is computed again is made in the stage that needs it, from what is there in that stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..ir import Phase, Problem
from ._gaps import Drop, Swap, can_recompute
from ._milp import Program, Solution
from ._nodes import Nodes
from ._paged import LEAST_COST, copy_ends, shares

EARLIEST = 3  # stages among which a copy back may begin, the last of which is just in time
NEGLIGIBLE = 10_000  # what is smaller than this part of the free bytes stays, uncounted
DEEPEST = 8  # how many nodes may run again for one


@dataclass(frozen=True, slots=True)
class IdleParcel:
    """A parcel that node `start` uses and node `end` uses next, with nodes between."""

    parcel: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Page:
    variable: int
    out_end: int  # the stage with which it is out
    back: int  # the stage with which it begins to come back


class GapProgram:
    def __init__(self, nodes: Nodes, capacity: int, problem: Problem, tier: str) -> None:
        self.nodes, self.capacity, self.problem, self.tier = nodes, capacity, problem, tier
        self.program = Program()
        machine, device = problem.machine, problem.device_tier
        self.rates = {"out": machine.link_between[device, tier].bytes_per_second, "in": machine.link_between[tier, device].bytes_per_second}
        self.total = sum(node.seconds for node in nodes.nodes) or 1.0
        self.keep: dict[IdleParcel, int] = {}
        self.page: dict[IdleParcel, list[_Page]] = {}
        self.drop: dict[IdleParcel, int] = {}
        self.again: dict[tuple[int, int], int] = {}  # (stage, node) -> it runs again there
        self.gap_over: dict[tuple[int, int], IdleParcel] = {}  # (stage, parcel) -> the gap that the stage is in
        self.load: dict[tuple[str, int], list[tuple[int, float]]] = {}
        self.gaps = list(self._find_gaps())
        for gap in self.gaps:
            self._choose(gap)
        for gap, variable in self.drop.items():
            run = self._run_again(gap.end, nodes.home[gap.parcel], DEEPEST)
            if run is None:
                self.program.constrain([(variable, 1.0)], upper=0)
            else:
                self.program.constrain([(variable, 1.0), (run, -1.0)], upper=0)
        for stage in range(len(nodes)):
            self._memory(stage)
        self._times()

    def _find_gaps(self) -> Iterator[IdleParcel]:
        for parcel, home in self.nodes.home.items():
            if self.nodes.size[parcel] * NEGLIGIBLE < self.capacity:
                continue
            for start, end in pairwise([max(home, 0), *self.nodes.readers[parcel]]):
                if end > start + 1:
                    gap = IdleParcel(parcel, start, end)
                    for stage in range(start + 1, end):
                        self.gap_over[stage, parcel] = gap
                    yield gap

    def _choose(self, gap: IdleParcel) -> None:
        self.keep[gap] = self.program.variable(integer=True)
        consumed = gap.parcel in self.problem.graph.consumed_by
        self.page[gap] = [] if consumed else list(self._pages(gap))
        ways = [self.keep[gap], *(page.variable for page in self.page[gap])]
        if self._can_drop(gap):
            self.drop[gap] = self.program.variable(integer=True)
            ways.append(self.drop[gap])
        self.program.constrain([(way, 1.0) for way in ways], lower=1, upper=1)

    def _can_drop(self, gap: IdleParcel) -> bool:
        home = self.nodes.home[gap.parcel]
        graph = self.problem.graph
        return (
            home >= 0
            and self.nodes.nodes[home].again_until >= gap.end
            and all(can_recompute(self.problem, s) for s in self.nodes.storages_of(gap.parcel))
            and graph.ops[self.nodes.nodes[gap.end].ops.start].phase is not Phase.UPDATE
        )

    def _pages(self, gap: IdleParcel) -> Iterator[_Page]:
        seconds = {way: self.nodes.size[gap.parcel] * self.nodes.unit / rate for way, rate in self.rates.items()}
        out_end = copy_ends(self.nodes, gap.start + 1, seconds["out"])
        in_time = [back for back in range(out_end + 1, gap.end) if copy_ends(self.nodes, back, seconds["in"]) < gap.end]
        for back in in_time[-EARLIEST:]:
            variable = self.program.variable(cost=LEAST_COST * sum(seconds.values()) / self.total, integer=True)
            for way, first, last in (("out", gap.start + 1, out_end), ("in", back, copy_ends(self.nodes, back, seconds["in"]))):
                for stage, share in shares(self.nodes, first, last):
                    self.load.setdefault((way, stage), []).append((variable, seconds[way] * share))
            yield _Page(variable, out_end, back)

    def _run_again(self, stage: int, node: int, deepest: int) -> int | None:
        """The variable for a node that runs again in a stage, from what is there; None if that cannot be."""
        if (stage, node) in self.again:
            return self.again[stage, node]
        if not deepest or self.nodes.nodes[node].again_until < stage:
            return None
        variable = self.again[stage, node] = self.program.variable()
        for read in self.nodes.nodes[node].reads:
            if stage in self.nodes.readers[read]:
                continue  # whoever brings it for the stage's own node brings it for this one
            ways = self._there(stage, read)
            home = self.nodes.home[read]
            if home >= 0 and (made := self._run_again(stage, home, deepest - 1)) is not None:
                ways.append(made)
            elif home < 0 and (stage, read) not in self.gap_over:
                continue  # an input outlives its last use
            self.program.constrain([(variable, 1.0), *((way, -1.0) for way in ways)], upper=0)
        return variable

    def _there(self, stage: int, parcel: int) -> list[int]:
        gap = self.gap_over.get((stage, parcel))
        if gap is None:
            return []
        return [self.keep[gap], *(page.variable for page in self.page[gap] if stage <= page.out_end)]

    def _memory(self, stage: int) -> None:
        size, own = self.nodes.size, self.nodes.nodes[stage]
        fixed = sum(size[p] for p, home in self.nodes.home.items() if home != stage and (stage in self.nodes.readers[p] or (home < 0 and stage == 0)))
        terms: list[tuple[int, float]] = []
        for (at, parcel), gap in self.gap_over.items():
            if at == stage:
                terms.append((self.keep[gap], float(size[parcel])))
                terms += [(page.variable, float(size[parcel])) for page in self.page[gap] if stage <= page.out_end or stage >= page.back]
        self.program.constrain(terms, upper=self.capacity - fixed - own.peak)
        for (at, node), run in self.again.items():
            if at == stage:
                wanted = sum(size[parcel] for parcel in self.nodes.nodes[node].makes if stage in self.nodes.readers[parcel])
                more = max(0, self.nodes.nodes[node].peak - wanted)
                self.program.constrain([*terms, (run, float(more))], upper=self.capacity - fixed)

    def _times(self) -> None:
        for stage, node in enumerate(self.nodes.nodes):
            seconds = self.program.variable(0.0, 1e9, cost=1.0)
            again = [(run, self.nodes.nodes[index].seconds / self.total) for (at, index), run in self.again.items() if at == stage]
            self.program.constrain([*again, (seconds, -1.0)], upper=-node.seconds / self.total)
            for way in ("out", "in"):
                if copies := self.load.get((way, stage)):
                    self.program.constrain([*((variable, share / self.total) for variable, share in copies), (seconds, -1.0)], upper=0)

    def choices(self, found: Solution) -> tuple[list[Swap], list[Drop]]:
        swaps: list[Swap] = []
        drops: list[Drop] = []
        graph = self.problem.graph
        for gap in self.gaps:
            if found.chosen(self.keep[gap]):
                continue
            back = next((page.back for page in self.page[gap] if found.chosen(page.variable)), None)
            for storage in self.nodes.storages_of(gap.parcel):
                before = max(use for use in (-1, *graph.uses[storage]) if use < self.nodes.nodes[gap.start].ops.stop)
                after = min(use for use in graph.uses[storage] if use >= self.nodes.nodes[gap.end].ops.start)
                if back is None:
                    drops.append(Drop(storage, before + 1))
                else:
                    in_at = max(before + 2, self.nodes.nodes[back].ops.start)
                    if in_at <= after:
                        swaps.append(Swap(storage, self.tier, before + 1, before + 1, in_at))
        return swaps, drops
