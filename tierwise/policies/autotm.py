"""autotm: an integer program decides for every storage when it is in fast memory, and whether its moves stop the ops or run beside them.

Paper    Hildebrand, Khan, Trika, Lowe-Power, Akella, ASPLOS 2020; the program as its published code builds it.
Idea     the graph is fixed and its kernels are measured, so that moving tensors between a fast and a slow memory is one linear program over 0 and
         1.
Rule     each storage takes one path through fast and slow from use to use. min Σ_op max(t_op, Σ moves beside it) + Σ moves that stop the ops; while
         an op runs, what is in fast memory is within the limit. Static: no moves. Synchronous: moves at uses only, and the ops wait. Asynchronous:
         also beside any op within 15 ops of a use, which lasts at least as long as the moves beside it. On a GPU an op needs all it touches in fast
         memory. Weights are in slow memory between steps, or never.
Differs  ops are taken together in at most max_nodes runs (synchronous: four times as many), and storages used by the same runs are one up to a
         hundredth of the budget, so that HiGHS can solve it; 15 ops are then as many runs. Convolution algorithms are not chosen, nor are ops moved
         ahead of or behind others. An activation that leaves twice is written twice. The loop that lowers limits and solves again where the
         allocator's holes push a storage over is left to the option defrag. Without a solution in time or within these runs it is synchronous, and
         without one of that idle gaps are swapped, the most bytes times seconds first, until all fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ..errors import BadInput, InfeasibleBudget
from ..ir import Link, Problem, Schedule
from ..units import format_bytes
from ._fit import device_peak, largest_that_fits
from ._gaps import Swap, build, gap_seconds, gaps
from ._milp import Program, Solution
from ._placement import place_offline

DECIDES = "when each storage is in fast memory"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}
MODES = ("static", "synchronous", "asynchronous")
NEAR_OPS = 15  # of a use: where moves beside an op are allowed
DEFRAG_NODES = 10  # around an op: where the limit is lowered
DEFRAG_LEAST = 0.90  # of the limit: lowered by no more at once
MAX_DEFRAGS = 5
PARCELS = 100  # a share of the budget: storages that the same runs use are taken together up to that
FINER = 4  # times as many runs, where moves beside ops need no variables


def plan(
    problem: Problem,
    *,
    mode: str = "asynchronous",
    time_limit_seconds: float = 30.0,
    relative_gap: float = 0.01,
    max_nodes: int = 160,
    defrag: bool = False,
    tier: str = "dram",
) -> Schedule:
    """relative_gap: how far from the best a solution may be. defrag: give every storage an address, and solve again until all fit."""
    if mode not in MODES:
        raise BadInput(f"mode is {mode!r}; autotm knows {', '.join(MODES)}")
    everything = build(problem)
    kept = device_peak(problem, everything)
    if kept <= problem.budget_bytes:
        return everything
    if mode == "static":
        raise InfeasibleBudget(f"without moves the step needs {format_bytes(kept)}", least_bytes=kept)
    deadline = time.monotonic() + time_limit_seconds
    swaps = _stopping_swaps(problem, tier)
    needed = device_peak(problem, build(problem, swaps))
    if needed > problem.budget_bytes:
        raise InfeasibleBudget(f"with everything idle in {tier} the step still needs {format_bytes(needed)}", least_bytes=needed)
    why = ""
    for beside in (True, False) if mode == "asynchronous" else (False,):
        try:
            return _solved(problem, max_nodes if beside else FINER * max_nodes, tier, deadline, relative_gap, beside=beside, defrag=defrag)
        except _NoSolution as error:
            why += f"{error}; "
    kept, schedule = largest_that_fits(problem, 0, len(swaps), lambda kept: build(problem, swaps[kept:]))
    return replace(schedule, notes=(f"{why}{len(swaps) - kept} of {len(swaps)} idle gaps are swapped, and ops wait for it",))


class _NoSolution(Exception):
    """The program has no solution, or none was found in time."""


def _solved(problem: Problem, max_nodes: int, tier: str, deadline: float, relative_gap: float, *, beside: bool, defrag: bool) -> Schedule:
    nodes = _runs(len(problem.graph.ops), max_nodes)
    model = _Model(problem, nodes, tier, beside=beside)
    limit = np.full(len(nodes), problem.budget_bytes - _staging_bytes(problem, tier), dtype=np.int64)
    for _ in range(MAX_DEFRAGS if defrag else 1):
        solution = model.solve(limit, max(0.0, deadline - time.monotonic()), relative_gap)
        if not solution:
            raise _NoSolution(f"{MODES[1 + beside]}, {len(nodes)} runs of ops: {solution.status}")
        schedule = model.schedule(solution)
        note = f"{MODES[1 + beside]}, {len(nodes)} runs of ops: {solution.status}, at most {solution.gap:.1%} above the best of its program"
        if not defrag:
            return replace(schedule, notes=(note,))
        found = place_offline(problem, schedule)
        if found.height_bytes <= problem.budget_bytes:
            holes = f"placed in {format_bytes(found.height_bytes)}, {found.fragmentation:.1%} of it lost between storages"
            return replace(schedule, addresses=found.addresses, notes=(note, holes))
        limit = _lowered(problem, nodes, found.addresses, limit)
    raise _NoSolution(f"placing needs more than the budget after {MAX_DEFRAGS} solutions")


def _runs(ops: int, most: int) -> list[range]:
    """Runs of equally many ops, at most so many of them."""
    size = max(1, math.ceil(ops / most))
    return [range(start, min(start + size, ops)) for start in range(0, ops, size)]


def _staging_bytes(problem: Problem, tier: str) -> int:
    device, machine = problem.device_tier, problem.machine
    return sum(link.staging_bytes for link in (machine.link(device, tier), machine.link(tier, device)) if link.staging_tier == device)


def _stopping_swaps(problem: Problem, tier: str) -> list[Swap]:
    """Every idle gap as a swap that ops wait for, those with the most bytes times seconds last. Nothing needs less than all of them."""
    ops = len(problem.graph.ops)
    found = sorted(gaps(problem), key=lambda gap: (gap.nbytes * gap_seconds(problem, gap), gap.storage, gap.start))
    return [Swap(gap.storage, tier, gap.start + 1, gap.start + 1, gap.end - ops if gap.wraps else gap.end, wraps=gap.wraps) for gap in found]


# -- the program ------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Parcel:
    """Storages that the same nodes use."""

    uses: tuple[int, ...]  # nodes
    lasting: bool
    changed: bool  # some op of the step overwrites it
    members: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class _Absence:
    """A parcel between two of its uses, and the variables of its moves. Nodes count on into the next step for one that wraps."""

    parcel: _Parcel
    after: int  # the node behind which it is idle
    before: int  # the node that needs it again
    wraps: bool
    away: int  # whether it leaves
    out: dict[int, int] = field(default_factory=dict)  # node beside which it leaves -> variable; `after`: the ops stop for it
    back: dict[int, int] = field(default_factory=dict)  # node beside which it returns -> variable; `before`: the ops stop for it


class _Model:
    def __init__(self, problem: Problem, nodes: list[range], tier: str, *, beside: bool) -> None:
        self.problem, self.nodes, self.tier, self.beside = problem, nodes, tier, beside
        machine, device = problem.machine, problem.device_tier
        self.out_link, self.back_link = machine.link(device, tier), machine.link(tier, device)
        self.near = math.ceil(NEAR_OPS / max(1, len(nodes[0]))) if nodes else 0
        live = np.array(problem.graph.live_bytes, dtype=np.int64)
        self.live = np.array([int(live[run.start : run.stop].max()) for run in nodes], dtype=np.int64)
        self.seconds = [problem.op_starts[run.stop] - problem.op_starts[run.start] for run in nodes]
        self.parcels = self._pack()

    def _pack(self) -> list[_Parcel]:
        graph, single = self.problem.graph, len(self.nodes) == len(self.problem.graph.ops)
        node_of = [at for at, run in enumerate(self.nodes) for _ in run]
        enough = 0 if single else self.problem.budget_bytes // PARCELS
        found: list[_Parcel] = []
        filling: dict[tuple[tuple[int, ...], bool, bool], _Parcel] = {}
        for storage in graph.storages:
            uses = tuple(dict.fromkeys(node_of[op] for op in graph.uses[storage.id]))
            if not storage.nbytes or not uses:
                continue
            key = (uses, storage.lasting, storage.lasting and bool(graph.writers[storage.id]))
            if key not in filling or filling[key].nbytes + storage.nbytes > enough:
                filling[key] = _Parcel(*key)
                found.append(filling[key])
            filling[key].members.append(storage.id)
            filling[key].nbytes += storage.nbytes
        return found

    # -- building -----------------------------------------------------------------------------------------------------------------------

    def solve(self, limit: np.ndarray, time_limit_seconds: float, relative_gap: float) -> Solution:
        self.program = Program()
        self.program.variable(1, 1, cost=sum(self.seconds))  # every op's own time: the gap is asked of the whole step
        self.beside_node: list[list[tuple[int, float]]] = [[] for _ in self.nodes]  # moves beside each node, with their seconds
        self.absences: list[_Absence] = []
        self.gone_at: list[list[tuple[int, float]]] = [[] for _ in self.nodes]  # what is missing at each node: variable, bytes
        for parcel in self.parcels:
            self._absences_of(parcel)
        for node, short in enumerate(self.live - limit):
            if short > 0:
                # In units of the bytes that are too many, which every solution must find.
                self.program.constrain([(variable, nbytes / float(short)) for variable, nbytes in self.gone_at[node]], lower=1.0)
        for seconds, moves in zip(self.seconds, self.beside_node, strict=True):
            longer = self.program.variable(upper=sum(more for _, more in moves), cost=1.0)  # by how much the moves outlast the node
            self.program.constrain([(longer, -1.0), *moves], upper=seconds)
        return self.program.solve(time_limit_seconds=time_limit_seconds, relative_gap=relative_gap)

    def _absences_of(self, parcel: _Parcel) -> None:
        count = len(self.nodes)
        wrap = None
        if parcel.lasting and self.problem.cyclic and parcel.uses[0] + count > parcel.uses[-1] + 1:
            wrap = self._absence(parcel, parcel.uses[-1], parcel.uses[0] + count, copies_out=1.0 if parcel.changed else 0.0)
        for after, before in pairwise(parcel.uses):
            if before > after + 1:
                # A weight at home in slow memory is still up to date there until its update.
                self._absence(parcel, after, before, copies_out=1.0, home=wrap)

    def _absence(self, parcel: _Parcel, after: int, before: int, *, copies_out: float, home: _Absence | None = None) -> _Absence:
        count, program = len(self.nodes), self.program
        found = _Absence(parcel, after, before, before >= count, program.variable(integer=True))
        out_seconds, back_seconds = (self._seconds(parcel, link) for link in (self.out_link, self.back_link))
        moments = self._beside(after, before) if self.beside else []
        # A step cannot begin with a copy of the one before: what is away around its end leaves before it ends and returns after.
        leaves, returns = [n for n in moments if n < count], [n for n in moments if n >= count or not found.wraps]
        stop_out = program.variable(cost=0.0 if home is not None else copies_out * out_seconds, integer=True)
        stop_back = program.variable(cost=back_seconds, integer=True)
        found.out = {after: stop_out} | {node: program.variable(integer=True) for node in leaves}
        found.back = {node: program.variable(integer=True) for node in returns} | {before: stop_back}
        if home is not None:
            # Its copy out is free where it is at home in slow memory: one variable more pays for it where it is not.
            paid = program.variable(cost=out_seconds, integer=True)
            program.constrain([(paid, 1.0), (found.away, -1.0), (home.away, 1.0)], lower=0.0)
            program.constrain([(found.out[node], 1.0) for node in leaves], upper=0.0)
        for node in leaves:
            if copies_out and home is None:
                self.beside_node[node].append((found.out[node], copies_out * out_seconds))
        for node in returns:
            self.beside_node[node % count].append((found.back[node], back_seconds))
        for moves in (found.out, found.back):
            program.constrain([*((variable, 1.0) for variable in moves.values()), (found.away, -1.0)], lower=0.0, upper=0.0)
        for node in sorted({*leaves, *returns}):
            later_out = [(variable, 1.0) for at, variable in found.out.items() if at >= node]
            earlier_back = [(variable, 1.0) for at, variable in found.back.items() if at <= node]
            program.constrain([*later_out, *earlier_back, (found.away, -1.0)], upper=0.0)
        nbytes = float(parcel.nbytes)
        for node in range(after + 1, before):
            terms = self.gone_at[node % count]
            terms += [(variable, nbytes) for at, variable in found.out.items() if at < node]
            terms += [(variable, -nbytes) for at, variable in found.back.items() if at <= node]
        self.absences.append(found)
        return found

    def _beside(self, after: int, before: int) -> list[int]:
        idle = range(after + 1, before)
        return [node for node in idle if node - after <= self.near or before - node <= self.near]

    def _seconds(self, parcel: _Parcel, link: Link) -> float:
        return len(parcel.members) * link.latency_seconds + parcel.nbytes / link.bytes_per_second

    # -- reading ------------------------------------------------------------------------------------------------------------------------

    def schedule(self, solution: Solution) -> Schedule:
        swaps: list[Swap] = []
        for absence in self.absences:
            if solution.chosen(absence.away):
                out = next(node for node, variable in absence.out.items() if solution.chosen(variable))
                back = next(node for node, variable in absence.back.items() if solution.chosen(variable))
                swaps += self._swaps(absence, out, back)
        return build(self.problem, swaps)

    def _swaps(self, absence: _Absence, out: int, back: int) -> Iterable[Swap]:
        """The swaps of a parcel's members. Where the ops stop, each leaves behind its very last use and returns for its first."""
        count, uses = len(self.nodes), self.problem.graph.uses
        single = len(self.nodes[0]) == 1
        for storage in absence.parcel.members:
            last = max(op for op in uses[storage] if op < self.nodes[absence.after].stop)
            first = min(op for op in uses[storage] if op >= self.nodes[absence.before % count].start)
            stops_out, stops_back = out == absence.after, back == absence.before
            out_at = last + 1 if stops_out else self.nodes[out].start
            free_at = last + 1 if stops_out else self.nodes[out].stop
            in_at = first if stops_back else self.nodes[back % count].start
            yield Swap(storage, self.tier, out_at, free_at, in_at, join=True, wraps=absence.wraps, join_back=single and not stops_back)


def _lowered(problem: Problem, nodes: list[range], addresses: Mapping[tuple[int, int], int], limit: np.ndarray) -> np.ndarray:
    """Lower limits around the nodes that use a storage placed above the budget: a little if it is little above, a tenth at most."""
    node_of = [at for at, run in enumerate(nodes) for _ in run]
    ends = [(offset + problem.graph.storages[s].nbytes, s) for (_, s), offset in addresses.items() if s >= 0]
    over = [(end, storage) for end, storage in ends if end > problem.budget_bytes]
    worst = max((end for end, _ in over), default=problem.budget_bytes + 1)
    share = max(DEFRAG_LEAST, 1 - (worst / problem.budget_bytes - 1) / 2)
    touched = {near for _, s in over for op in problem.graph.uses[s] for near in range(node_of[op] - DEFRAG_NODES, node_of[op] + DEFRAG_NODES + 1)}
    around = sorted(touched & set(range(len(nodes)))) or list(range(len(nodes)))
    lowered = limit.copy()
    lowered[around] = (lowered[around] * share).astype(np.int64)
    return lowered
