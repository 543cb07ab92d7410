"""pytorch_budget: save a minimum cut of the graph, and of the costly values only as many as a fraction allows; compute the rest again.

Paper    none; min-cut partitioner and activation_memory_budget of torch._functorch, PyTorch 2024 (since version 2.4; rules read in 2.13).
Idea     what a compiler fuses is as good as free to compute again; of what is not, save the most work per byte.
Rule     saved values are a minimum cut between what may not be computed again and what backward reads; a value weighs bytes·1.1^(ops to backward),
         twice if all who read it are fused with it. Not again: work, random ops, reductions, what is not fusible, what an op that is not fused
         reads in backward, what is read far apart, long chains. fraction 1 is this cut. Below 1: the cut without the last three bans, or without the
         list of fusible ops too, if its bytes are below that fraction; otherwise a knapsack of that capacity picks, by FLOPs, what stays banned.
         0 saves the inputs alone. Without a fraction: the largest of a grid that fits, and three halvings above it.
Differs  The choice of the fraction is ours: PyTorch's is the user's, and no promise about the peak. Norms and softmax are one op here and count as
         fusible, their small statistics as reductions. Recomputation costs what the op costs, fused or not. graphs="blocks" applies it to
         each repeated block by itself, as when blocks are compiled one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import BadInput, InfeasibleBudget
from ..ir import Op, Phase, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._blocks import blocks, is_work
from ._gaps import Drop, build, can_recompute
from ._layers import saved_for_backward
from ._milp import Program

DECIDES = "what to recompute"
FIDELITY = "faithful"
EXECUTABLE = True

GRAPHS = ("whole", "blocks")
GRID = 10  # fractions tried, from the largest down
HALVINGS = 3
KNAPSACK_UNITS = 10_000  # of the table, as in torch
LONG_CHAIN = 100  # ops
DISTANCE_WEIGHT, LARGEST_DISTANCE = 1.1, 100
# In torch a list of aten ops; norms and softmax are decomposed into such before it is asked.
FUSIBLE = {
    "add", "sub", "mul", "div", "pow", "neg", "abs", "relu", "silu", "gelu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "reciprocal",
    "erf", "cos", "sin", "clamp", "where", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "leaky_relu", "elu", "hardswish", "mish",
    "softplus", "masked_fill", "cast", "clone", "arange", "full", "full_like", "zeros", "zeros_like", "ones", "new_zeros", "scalar_tensor",
    "triu", "tril", "sum", "mean", "amax", "var", "std", "gather", "index", "rsub", "floor_divide", "layer_norm", "rms_norm", "group_norm",
    "batch_norm", "softmax", "log_softmax", "nll_loss",
}  # fmt: skip
RANDOM = {"dropout", "bernoulli", "rand_like", "randn_like"}


def plan(problem: Problem, *, fraction: float | None = None, graphs: str = "whole") -> Schedule:
    if graphs not in GRAPHS:
        raise BadInput(f"graphs is {graphs!r}; pytorch_budget knows {', '.join(GRAPHS)}")
    if fraction is not None and not 0 <= fraction <= 1:
        raise BadInput(f"fraction is {fraction:g}; give 0 to 1")
    graph = problem.graph
    units = [block.ops for block in blocks(graph)] if graphs == "blocks" else [[op.id for op in graph.ops if op.phase is Phase.FORWARD]]
    partitions = [_Partition(problem, unit) for unit in units if unit]
    peaks: dict[float, int] = {}

    def attempt(share: float) -> Schedule:
        schedule = _schedule(problem, partitions, share)
        peaks[share] = peak_bytes(problem, schedule)[problem.device_tier]
        return schedule

    if fraction is not None:
        return attempt(fraction)
    too_much = None
    for step in range(GRID, -1, -1):
        share = step / GRID
        found = attempt(share)
        if peaks[share] > problem.budget_bytes:
            too_much = share
            continue
        for _ in range(HALVINGS if too_much is not None else 0):
            assert too_much is not None
            middle = (share + too_much) / 2
            better = attempt(middle)
            share, found, too_much = (middle, better, too_much) if peaks[middle] <= problem.budget_bytes else (share, found, middle)
        return found
    least = min(peaks.values())
    raise InfeasibleBudget(f"no fraction of a grid of {GRID + 1} takes less than {format_bytes(least)}", least_bytes=least)


def _schedule(problem: Problem, partitions: Iterable[_Partition], fraction: float) -> Schedule:
    saved: set[int] = set()
    decided: set[int] = set()
    for partition in partitions:
        saved |= partition.saved(fraction)
        decided |= partition.values
    drops = [
        Drop(storage, last + 1)
        for storage, last, needed in saved_for_backward(problem.graph)
        if storage in decided and storage not in saved and needed > last + 1 and can_recompute(problem, storage)
    ]
    return build(problem, drops=drops, kept=saved)


@dataclass(frozen=True, slots=True)
class _Bans:
    """Which heuristics forbid recomputation."""

    reads_in_backward: bool = True
    far_apart: bool = True
    long_chains: bool = True
    not_listed: bool = True


class _Partition:
    """One compiled graph: which of its forward values are saved for backward."""

    def __init__(self, problem: Problem, ops: Iterable[int]) -> None:
        self.problem, self.graph = problem, problem.graph
        self.ops = [self.graph.ops[op] for op in ops]
        inside = {op.id for op in self.ops}
        self.outside = {s for op in self.ops for s in op.reads if self.graph.producer(s) not in inside}
        self.given = {s for s in self.outside if self.graph.storages[s].lasting}  # parameters are free
        made = {s for op in self.ops for s in op.writes}
        self.read_later = {s for s, _, _ in saved_for_backward(self.graph) if s in made | self.outside}
        self.distance = self._distances()
        self.values = {s for s in made | self.outside if s in self.distance and s not in self.given}
        self.readers = {s: [self.graph.ops[use] for use in self.graph.readers[s]] for s in made | self.outside}
        self._found: dict[tuple[_Bans, frozenset[int]], set[int]] = {}

    def _distances(self) -> dict[int, int]:
        """Ops from a value to backward; nothing for what backward has no need of."""
        found: dict[int, int] = dict.fromkeys(self.read_later, 1)
        for op in reversed(self.ops):
            near = [found[s] + 1 for s in op.writes if s in found]
            for storage in op.reads if near else ():
                found[storage] = min([*near, found.get(storage, near[0])])
        return found

    # -- the choice -----------------------------------------------------------------------------------------------------------------

    def saved(self, fraction: float) -> set[int]:
        inputs = self.values & self.outside
        if fraction == 0:
            return inputs | {s for s in self.values if not can_recompute(self.problem, s) and s not in self.graph.consumed_by}
        default = self._cut(_Bans())
        largest, smallest = self._bytes(default), self._bytes(inputs)
        if fraction == 1 or largest <= smallest:
            return default
        for bans in (_Bans(False, False, False), _Bans(False, False, False, False)):
            cut = self._cut(bans)
            if (self._bytes(cut) - smallest) / (largest - smallest) < fraction:
                return cut
        items = sorted((s for s in self._banned(bans) if s not in self.outside and can_recompute(self.problem, s)), key=lambda s: (-self._size(s), s))
        sizes = [self._size(s) / (largest - smallest) for s in items]
        work = [float(self._flops(s)) for s in items]
        unsaved = frozenset(items[place] for place in _left_out(sizes, work, fraction))
        return self._cut(bans, unsaved)

    def _size(self, storage: int) -> int:
        return self.graph.storages[storage].nbytes

    def _bytes(self, storages: Collection[int]) -> int:
        return sum(map(self._size, storages))

    def _flops(self, storage: int) -> int:
        producer = self.graph.producer(storage)
        return max(1, self.graph.ops[producer].flops if producer is not None and is_work(self.graph.ops[producer]) else 1)

    # -- what may not be computed again ---------------------------------------------------------------------------------------------

    def _banned(self, bans: _Bans) -> set[int]:
        found = {s for s in self.values if s in self.outside or not can_recompute(self.problem, s)}
        for op in self.ops:
            listed = op.kind in FUSIBLE if bans.not_listed else not (is_work(op) or op.kind in RANDOM)
            largest_output = max(map(self._size, op.writes), default=0)
            # A fused op reads its input anyway, and gives its large output; the small ones beside it are what took a reduction.
            inputs = max(sum(map(self._size, op.reads)), largest_output)
            for storage in op.writes:
                in_backward = bans.reads_in_backward and any(
                    reader.phase is not Phase.FORWARD and reader.kind != "release" and not _is_fusible(reader) for reader in self.readers[storage]
                )
                if not listed or in_backward or self._size(storage) * 4 < inputs:
                    found.add(storage)
        if bans.far_apart:
            found |= self._read_far_apart()
        if bans.long_chains:
            found |= self._end_of_long_chains(found)
        return found & self.values

    def _forward_readers(self, op: Op) -> list[Op]:
        ids = {reader.id for s in op.writes for reader in self.readers[s] if reader.phase is Phase.FORWARD}
        return [self.graph.ops[reader] for reader in sorted(ids)]

    def _read_far_apart(self) -> set[int]:
        """What fused ops make from a value, behind the first op that is not fused: there it would have to be read a second time."""
        found: set[int] = set()
        for op in self.ops:
            readers = self._forward_readers(op)
            if not readers:
                continue
            barrier = self._first_not_fused(readers, readers[-1].id)
            for reader in readers:
                if reader.id > barrier and _fuse(op, reader):
                    found.update(reader.writes)
        return found

    def _first_not_fused(self, starts: list[Op], end: int) -> int:
        heap = [(op.id, True) for op in starts]
        heapq.heapify(heap)
        seen = set(heap)
        while heap:
            at, fused = heapq.heappop(heap)
            if not fused:
                return at
            for reader in self._forward_readers(self.graph.ops[at]):
                entry = (reader.id, _fuse(self.graph.ops[at], reader))
                if reader.id <= end and entry not in seen:
                    seen.add(entry)
                    heapq.heappush(heap, entry)
        return end

    def _end_of_long_chains(self, banned: set[int]) -> set[int]:
        place = {op.id: place for place, op in enumerate(self.ops)}
        found: set[int] = set()
        visited: set[int] = set()
        for start in self.ops:
            chain = [start.id]
            while chain:
                at = heapq.heappop(chain)
                if at in visited:
                    continue
                visited.add(at)
                op = self.graph.ops[at]
                if place[at] > place[start.id] + LONG_CHAIN and not chain:
                    found.update(op.writes)
                    break
                for reader in self._forward_readers(op):
                    if reader.id in place and _fuse(op, reader) and not (banned | found).issuperset(reader.writes):
                        heapq.heappush(chain, reader.id)
        return found

    # -- the cut --------------------------------------------------------------------------------------------------------------------

    def _cut(self, bans: _Bans, unbanned: frozenset[int] = frozenset()) -> set[int]:
        key = (bans, unbanned)
        if key not in self._found:
            self._found[key] = self._minimum_cut(self._banned(bans) - unbanned)
        return self._found[key]

    def _minimum_cut(self, banned: set[int]) -> set[int]:
        """min Σ weight·saved  with  there <= saved + again,  again <= there of all it is made from,  there = 1 where backward reads.

        The matrix is that of a network: the best solution of the relaxed program is whole.
        """
        program = Program()
        total = max(1.0, sum(self._weight(s) for s in self.values))
        saved = {s: program.variable(0, 0 if s in self.graph.consumed_by else 1, cost=self._weight(s) / total) for s in sorted(self.values)}
        there = {s: program.variable(int(s in self.read_later), 1) for s in sorted(self.values)}
        again: dict[int, int] = {}
        for op in self.ops:
            if any(s in self.values and s not in banned for s in op.writes):
                again[op.id] = program.variable()
                for storage in op.reads:
                    if storage in self.values:
                        program.constrain([(again[op.id], 1.0), (there[storage], -1.0)], upper=0)
        for storage in sorted(self.values):
            producer = self.graph.producer(storage)
            ways = [(saved[storage], -1.0)]
            if storage not in banned and producer in again:
                ways.append((again[producer], -1.0))
            program.constrain([(there[storage], 1.0), *ways], upper=0)
        solution = program.solve(relaxed=True)
        return {s for s in self.values if solution.chosen(saved[s])}

    def _weight(self, storage: int) -> float:
        """In bytes; what is free to save still costs a little, so that nothing is saved for nothing."""
        nbytes = max(1, self._size(storage)) * DISTANCE_WEIGHT ** min(max(self.distance[storage], 1), LARGEST_DISTANCE)
        producer = self.graph.producer(storage)
        op = None if producer is None else self.graph.ops[producer]
        materialised = storage in self.outside or op is None or not all(_fuse(op, reader) for reader in self.readers[storage])
        return nbytes if materialised else 2 * nbytes


def _is_fusible(op: Op) -> bool:
    return op.kind.removesuffix("_backward") in FUSIBLE | RANDOM


def _fuse(op: Op, reader: Op) -> bool:
    return reader.kind in ("cat", "release") or (_is_fusible(op) and _is_fusible(reader))


def _left_out(sizes: list[float], values: list[float], capacity: float) -> list[int]:
    """The items a knapsack leaves out, by dynamic programming on sizes in ten-thousandths."""
    units = [round(size * KNAPSACK_UNITS) for size in sizes]
    best = np.zeros((len(sizes) + 1, round(capacity * KNAPSACK_UNITS) + 1))
    for item, unit in enumerate(units):
        best[item + 1] = best[item] if unit else best[item] + values[item]
        if unit and unit < best.shape[1]:
            best[item + 1, unit:] = np.maximum(best[item, unit:], best[item, :-unit] + values[item])
    left_out, room = [], best.shape[1] - 1
    for item in range(len(sizes) - 1, -1, -1):
        if best[item + 1, room] != best[item, room]:
            room -= units[item]
        else:
            left_out.append(item)
    return left_out
