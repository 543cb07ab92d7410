"""A step whose regions are compiled, as a Graph: two macro-ops for each region call, forward and backward of one option.

Fused code is not additive: what a region makes and uses up itself never exists as a storage of the step. Of its inside only what it saves for
backward remains, as one storage, and the most it holds at once beyond that, as workspace. Everything outside the regions stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..ir import Graph, Op, Phase, Role, Storage, check_graph

WORK = ("matmul", "attention", "conv", "rnn")


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """What one option of a region class saves for backward."""

    saved_bytes: int  # beyond its inputs, parameters and results
    reads_inputs: bool  # backward reads inputs of the region, which somebody must keep
    reads_outputs: bool


@dataclass(frozen=True, slots=True)
class Coarse:
    graph: Graph
    members: tuple[tuple[int, ...], ...]  # for each op of the coarse graph, the ops of the fine one it stands for


def coarsen(graph: Graph, compiled: Mapping[int, CompiledRegion]) -> Coarse:
    """The step with every call of the regions in `compiled` (by region class) as two macro-ops."""
    of_call = {call.id: compiled[call.region] for call in graph.calls if call.region in compiled}
    groups: dict[tuple[int, Phase], list[Op]] = {}
    for op in graph.ops:
        if op.region in of_call and op.phase is not Phase.UPDATE:
            groups.setdefault((op.region, op.phase), []).append(op)
    storages = list(graph.storages)
    macros: dict[int, tuple[Op, list[Op]]] = {}  # place of the last member -> macro-op, members
    for call in graph.calls:
        if call.id not in of_call:
            continue
        forward, backward = groups.get((call.id, Phase.FORWARD), []), groups.get((call.id, Phase.BACKWARD), [])
        if not forward:
            continue
        for macro, members in _macros(graph, call.module, of_call[call.id], forward, backward, storages):
            macros[members[-1].id] = (macro, members)
    absorbed = {member.id for _, members in macros.values() for member in members}
    ops: list[Op] = []
    stand_for: list[tuple[int, ...]] = []
    for op in graph.ops:
        if op.id in macros:
            macro, members = macros[op.id]
            ops.append(macro)
            stand_for.append(tuple(member.id for member in members))
        elif op.id not in absorbed:
            ops.append(op)
            stand_for.append((op.id,))
    found = _renumber(ops, storages, graph)
    check_graph(found)
    return Coarse(found, tuple(stand_for))


def _macros(
    graph: Graph, module: str, region: CompiledRegion, forward: list[Op], backward: list[Op], storages: list[Storage]
) -> Iterable[tuple[Op, list[Op]]]:
    own = {op.id for op in forward} | {op.id for op in backward}
    made_forward = {s for op in forward for s in op.writes}
    made_backward = {s for op in backward for s in op.writes}
    outputs = {s for s in made_forward if any(use not in own for use in graph.uses[s])}
    inputs = {s for op in forward for s in op.reads if s not in made_forward and not graph.storages[s].lasting}
    saved: tuple[int, ...] = ()
    if backward and region.saved_bytes:
        storages.append(Storage(len(storages), f"{module}.saved", region.saved_bytes, Role.ACTIVATION))
        saved = (len(storages) - 1,)
    inside_forward = made_forward - outputs
    yield (
        _macro(graph, forward, f"{module}.forward", outputs, saved, (), _most_held(graph, forward, inside_forward) - region.saved_bytes),
        forward,
    )
    if backward:
        dropped = inside_forward | (set() if region.reads_inputs else inputs) | (set() if region.reads_outputs else outputs)
        given = {s for op in backward for s in op.reads} - made_backward - dropped
        results = {s for s in made_backward if any(use not in own for use in graph.uses[s])}
        held = _most_held(graph, backward, made_backward - results)
        yield replace(_macro(graph, backward, f"{module}.backward", results, (), saved, held), reads=(*sorted(given), *saved)), backward


def _macro(graph: Graph, members: list[Op], name: str, results: set[int], more: tuple[int, ...], reads: tuple[int, ...], workspace: int) -> Op:
    made = {s for op in members for s in op.writes}
    mutated = tuple(dict.fromkeys(s for op in members for s in op.mutates if s not in made))
    read = {s for op in members for s in op.reads} - made - set(mutated)
    return Op(
        id=-1,
        name=name,
        phase=members[0].phase,
        reads=(*sorted(read), *reads),
        writes=(*sorted(results), *more),
        kind=f"region_{members[0].phase}",
        region=members[0].region,
        mutates=mutated,
        workspace_bytes=max(0, workspace),
        replayable=all(op.replayable for op in members),
        flops=sum(op.flops for op in members),
        precision=max(members, key=lambda op: op.flops).precision,
    )


def _most_held(graph: Graph, members: list[Op], inside: set[int]) -> int:
    """The most bytes of a region's own storages at once, without those that a run of fused ops keeps in registers."""
    run_of: dict[int, int] = {}
    run = 0
    for op in members:
        run += op.kind.startswith(WORK)
        run_of[op.id] = run
        run += op.kind.startswith(WORK)
    place = {op.id: index for index, op in enumerate(members)}
    change = [0] * (len(members) + 1)
    for storage in inside:
        uses = [place[use] for use in graph.uses[storage] if use in place]
        if len({run_of[members[use].id] for use in uses}) > 1:
            change[uses[0]] += graph.storages[storage].nbytes
            change[uses[-1] + 1] -= graph.storages[storage].nbytes
    most = held = 0
    for more in change:
        held += more
        most = max(most, held)
    return most


def _renumber(ops: list[Op], storages: list[Storage], graph: Graph) -> Graph:
    """Ids are places again; storages nobody touches any more are left out, unless they are there anyway."""
    touched = {s for op in ops for s in op.reads + op.writes + op.mutates}
    kept = [s for s in storages if s.id in touched or s.lasting or s.role is Role.INPUT]
    number = {s.id: place for place, s in enumerate(kept)}
    return Graph(
        ops=tuple(
            replace(
                op,
                id=place,
                reads=tuple(number[s] for s in op.reads if s in number),
                writes=tuple(number[s] for s in op.writes if s in number),
                mutates=tuple(number[s] for s in op.mutates),
                in_place=tuple((number[old], number[new]) for old, new in op.in_place if old in number and new in number),
            )
            for place, op in enumerate(ops)
        ),
        storages=tuple(replace(s, id=place) for place, s in enumerate(kept)),
        regions=graph.regions,
        calls=graph.calls,
    )
