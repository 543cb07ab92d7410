"""The layers of a model, as the people mean who checkpoint "every layer": a transformer block, a residual block, a level of a U-Net.

A block is a call of a submodule whose class is called more than once in a step, if it does more than one op and one of them is work (a product, a
convolution, attention, a recurrence), or if it is all in one op, compiled. A graph that names no such submodules is cut before each op that is work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ir import Graph, Op, Phase, Problem, Role
from ._gaps import Drop, can_recompute
from ._layers import is_region, saved_for_backward

WORK = ("matmul", "linear", "addmm", "mm", "bmm", "attention", "rnn")


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    ops: tuple[int, ...]  # forward
    inputs: tuple[int, ...]  # what it reads and does not make, parameters aside
    outputs: tuple[int, ...]  # what it makes and forward ops outside of it read
    inside: tuple[tuple[int, int], ...]  # (storage, last forward use) of all else it makes that backward reads
    backward: int  # the first op after forward for which the block must run again, or else that reads what goes in; the number of ops if none


def is_work(op: Op) -> bool:
    return "conv" in op.kind or op.kind.removesuffix("_backward") in WORK or is_region(op)


def blocks(graph: Graph) -> list[Block]:
    """In the order in which forward begins them."""
    saved = {storage: last for storage, last, _ in saved_for_backward(graph)}
    return [_block(graph, name, ops, saved) for name, ops in (_called(graph) or _cut(graph))]


def _called(graph: Graph) -> list[tuple[str, list[int]]]:
    kind_of = {region.id: region.kind for region in graph.regions}
    calls = Counter(kind_of[call.region] for call in graph.calls)
    ops: dict[int, list[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            ops.setdefault(op.region, []).append(op.id)
    found = []
    for call in graph.calls:
        members = ops.get(call.id, [])
        several = len(members) > 1 or any(is_region(graph.ops[op]) for op in members)
        if calls[kind_of[call.region]] > 1 and several and any(is_work(graph.ops[op]) for op in members):
            found.append((call.module, members))
    return sorted(found, key=lambda block: block[1][0])


def _cut(graph: Graph) -> list[tuple[str, list[int]]]:
    found: list[tuple[str, list[int]]] = []
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        if not found or is_work(op):
            found.append((op.name, []))
        found[-1][1].append(op.id)
    return found


def _block(graph: Graph, name: str, ops: list[int], saved: dict[int, int]) -> Block:
    members = set(ops)
    made = dict.fromkeys(storage for op in ops for storage in graph.ops[op].writes)
    read = dict.fromkeys(storage for op in ops for storage in graph.ops[op].reads)
    outputs = {s for s in made if any(graph.ops[use].phase is Phase.FORWARD and use not in members for use in graph.readers[s])}
    inputs = [s for s in read if s not in made and graph.storages[s].role in (Role.ACTIVATION, Role.INPUT) and not graph.storages[s].lasting]
    inside = [(s, saved[s]) for s in made if s in saved and s not in outputs]
    starts = [start for s, last in inside if (start := _first_after_forward(graph, s)) > last + 1] or [_first_after_forward(graph, s) for s in inputs]
    return Block(
        name, tuple(ops), tuple(inputs), tuple(s for s in made if s in outputs), tuple(inside), min(starts, default=len(graph.ops))
    )  # fmt: skip


def _first_after_forward(graph: Graph, storage: int) -> int:
    return next((use for use in graph.uses[storage] if graph.ops[use].phase is not Phase.FORWARD), len(graph.ops))


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What to drop, and what must be kept for it to come back from (build's `drops` and `kept`)."""

    drops: list[Drop]
    kept: set[int]


def checkpoint(problem: Problem, runs: Iterable[Sequence[Block]]) -> Checkpointing:
    """Of each run of blocks keep what goes in and what comes out; the rest is computed again when backward reaches the run.

    What is read right after its last forward use, by the loss, stays.
    """
    graph = problem.graph
    dropped: set[int] = set()
    kept: set[int] = set()
    for run in runs:
        members = {op for block in run for op in block.ops}
        for block in run:
            dropped.update(storage for storage, _ in block.inside)
            dropped.update(s for s in block.outputs if _is_handed_on(graph, s, members))
            kept.update(block.inputs)
    drops = [
        Drop(storage, last + 1)
        for storage, last, needed in saved_for_backward(graph)
        if storage in dropped and needed > last + 1 and can_recompute(problem, storage)
    ]
    return Checkpointing(drops, kept - dropped)


def _is_handed_on(graph: Graph, storage: int, members: set[int]) -> bool:
    """Whether nobody reads it in forward but the run itself."""
    return all(use in members or graph.ops[use].phase is not Phase.FORWARD for use in graph.readers[storage])
