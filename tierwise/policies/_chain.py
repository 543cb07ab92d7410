"""A step as a chain: segments of forward that follow each other, each with its stretch of backward, and the turn between the two.

    head | F0 F1 ... Fn-1 | turn (the rest of forward, the loss, the first of backward) | Bn-1 ... B1 B0 | tail (the rest, updates)

A segment's own storages are used in its two stretches and nowhere else. A storage between two neighbours is what the one hands to the next. All that
reaches further (skip connections, what cannot be computed again) is fixed: it is kept from its first use to its last, whatever is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..ir import Graph, Phase, Problem
from ._blocks import blocks
from ._gaps import can_recompute


@dataclass(frozen=True, slots=True)
class Segment:
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    problem: Problem
    head: tuple[int, ...]
    segments: tuple[Segment, ...]
    turn: tuple[int, ...]
    tail: tuple[int, ...]

    @cached_property
    def place(self) -> dict[int, tuple[str, int]]:
        """Op -> ("F", segment), ("B", segment), ("F", number of segments) in the turn; head and tail are ("head", -1) and ("tail", -1)."""
        found: dict[int, tuple[str, int]] = dict.fromkeys(self.head, ("head", -1))
        for index, segment in enumerate(self.segments):
            found.update(dict.fromkeys(segment.forward, ("F", index)))
            found.update(dict.fromkeys(segment.backward, ("B", index)))
        found.update(dict.fromkeys(self.turn, ("F", len(self.segments))))
        found.update(dict.fromkeys(self.tail, ("tail", -1)))
        return found

    @cached_property
    def kinds(self) -> list[tuple[str, int]]:
        """For each storage what it is: ("own", i), ("between", i) made by i for i + 1, ("gradient", i) made in backward of i for i - 1, ("left", i)
        made in backward of i for the tail, or ("fixed", -1)."""
        return [self._kind(storage.id) for storage in self.problem.graph.storages]

    def _kind(self, storage: int) -> tuple[str, int]:
        graph, turn = self.problem.graph, len(self.segments)
        producer = graph.producer(storage)
        if graph.storages[storage].lasting or producer is None:
            return "fixed", -1
        phase, index = self.place[producer]
        users = {self.place[use] for use in graph.uses[storage]}
        if phase == "B" or (phase == "F" and index == turn):
            own: set[tuple[str, int]] = {(phase, index)}
            if users <= own:
                return "own", index
            return ("gradient", index) if users <= own | {("B", index - 1)} else ("left", index)
        if phase != "F" or not can_recompute(self.problem, storage):
            return "fixed", -1
        own = {("F", index), ("B", index)}
        if users <= own:
            return "own", index
        return ("between", index) if users <= own | {("F", index + 1), ("B", index + 1)} else ("fixed", -1)

    def bytes_of(self, kind: str, index: int) -> int:
        return sum(s.nbytes for s in self.problem.graph.storages if self.kinds[s.id] == (kind, index))

    @cached_property
    def fixed_bytes(self) -> int:
        """All that lasts, and all else that is fixed and may be there while segments run."""
        graph = self.problem.graph
        inside = {op for op, (phase, _) in self.place.items() if phase not in ("head", "tail")}
        return sum(
            s.nbytes for s in graph.storages
            if self.kinds[s.id][0] == "fixed" and (s.lasting or not inside.isdisjoint(graph.uses[s.id]))
        )  # fmt: skip


def chain_of(problem: Problem, *, most: int) -> Chain:
    """The step as a chain of at most so many segments, one for each block of the model if it has no more."""
    graph = problem.graph
    starts = _forward_starts(graph)
    while True:
        chain = _chain(problem, starts)
        if len(starts) > most:
            starts = starts[:: -(-len(starts) // most)]
        elif (merged := _without_takeovers(chain, starts)) != starts:
            starts = merged
        else:
            return chain


def _forward_starts(graph: Graph) -> list[int]:
    """Where segments begin in forward: blocks whose backward stretches come in the opposite order."""
    starts: list[int] = []
    earliest = len(graph.ops) + 1
    for block in blocks(graph):
        if block.backward < earliest:
            starts.append(block.ops[0])
            earliest = block.backward
    return starts


def _chain(problem: Problem, starts: Sequence[int]) -> Chain:
    graph = problem.graph
    found = blocks(graph)
    if not starts:
        return Chain(problem, (), (), tuple(range(len(graph.ops))), ())
    last = max(op for block in found if block.ops[0] >= starts[-1] for op in block.ops)
    stretches = [range(start, end) for start, end in zip(starts, [*starts[1:], last + 1], strict=True)]
    end_of_backward = 1 + max(op.id for op in graph.ops if op.phase is not Phase.UPDATE)
    returns = [min(end_of_backward, *(block.backward for block in found if block.ops[0] in stretch)) for stretch in stretches]
    for index in range(len(returns) - 2, -1, -1):  # backward may not begin with a segment before the one behind it has begun
        returns[index] = max(returns[index], returns[index + 1])
    end = _last_return(graph, stretches[0], returns[0])
    segments = tuple(
        Segment(tuple(stretch), tuple(range(begin, stop))) for stretch, begin, stop in zip(stretches, returns, [end, *returns[:-1]], strict=True)
    )
    return Chain(problem, tuple(range(starts[0])), segments, tuple(range(last + 1, returns[-1])), tuple(range(end, len(graph.ops))))


def _last_return(graph: Graph, stretch: range, begin: int) -> int:
    """Behind the last op of backward that reads what the stretch reads or makes."""
    touched = {s for op in stretch for s in graph.ops[op].reads + graph.ops[op].writes if not graph.storages[s].lasting}
    uses = (use for storage in touched for use in graph.uses[storage] if graph.ops[use].phase is Phase.BACKWARD)
    return max(begin, 1 + max(uses, default=-1))


def _without_takeovers(chain: Chain, starts: list[int]) -> list[int]:
    """A segment that takes over, in place, what another made cannot run again from its input: the two are one."""
    graph = chain.problem.graph
    for old, op in graph.consumed_by.items():
        producer = graph.producer(old)
        if producer is None or graph.ops[op].phase is not Phase.FORWARD:
            continue
        (phase, made), (_, taken) = chain.place[producer], chain.place[op]
        if phase == "F" and taken != made and taken < len(starts):
            return [start for index, start in enumerate(starts) if not made < index <= taken]
    return starts
