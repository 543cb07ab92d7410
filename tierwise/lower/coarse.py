"""A step whose regions run as compiled choices, as a Graph: two macro-ops for each region call, forward and backward.

Fused code is not additive: what a region makes and uses up itself never exists as a storage of the step. Of its inside only what it saves for
backward remains, a storage for each value, and the most it holds at once beyond that, as workspace. Everything outside the regions stays as it
was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..ir import Choice, Graph, Op, Phase, Role, Storage, check_graph

WORK = ("matmul", "attention", "conv", "rnn")


@dataclass(frozen=True, slots=True)
class Coarse:
    graph: Graph
    members: tuple[tuple[int, ...], ...]  # for each op of the coarse graph, the ops of the fine one it stands for
    forward: Mapping[int, int]  # region call -> its macro-op
    backward: Mapping[int, int]
    saved: Mapping[tuple[int, str], int]  # (region call, saved value) -> storage
    inputs: Mapping[int, tuple[int, ...]]  # region call -> storages it was given and its backward reads


def coarsen(graph: Graph, choices: Mapping[int, Choice]) -> Coarse:
    """The step with every call in `choices` as two macro-ops."""
    groups: dict[tuple[int, Phase], list[Op]] = {}
    for op in graph.ops:
        if op.region in choices and op.phase is not Phase.UPDATE:
            groups.setdefault((op.region, op.phase), []).append(op)
    storages = list(graph.storages)
    saved: dict[tuple[int, str], int] = {}
    inputs: dict[int, tuple[int, ...]] = {}
    macros: dict[int, tuple[Op, list[Op]]] = {}  # place of the last member -> macro-op, members
    for call in graph.calls:
        forward, backward = groups.get((call.id, Phase.FORWARD), []), groups.get((call.id, Phase.BACKWARD), [])
        if call.id not in choices or not forward:
            continue
        border = RegionBorder(graph, forward, backward)
        if backward:
            for value in choices[call.id].saved:
                saved[call.id, value.name] = len(storages)
                storages.append(Storage(len(storages), f"{call.module}.{value.name}", value.nbytes, Role.ACTIVATION))
        own = tuple(saved[call.id, value.name] for value in choices[call.id].saved if backward)
        for macro, members in border.macros(call.module, choices[call.id], own):
            macros[members[-1].id] = (macro, members)
        inputs[call.id] = tuple(sorted(border.inputs)) if backward and choices[call.id].reads_inputs else ()
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
    found, number = renumber(ops, storages, graph)
    check_graph(found)
    macro_of = {(op.region, op.phase): op.id for op in found.ops if op.kind.startswith("region_")}
    return Coarse(
        graph=found,
        members=tuple(stand_for),
        forward={call: op for (call, phase), op in macro_of.items() if phase is Phase.FORWARD},
        backward={call: op for (call, phase), op in macro_of.items() if phase is Phase.BACKWARD},
        saved={key: number[storage] for key, storage in saved.items() if storage in number},
        inputs={call: tuple(number[s] for s in given if s in number) for call, given in inputs.items()},
    )


class RegionBorder:
    """One region call in the fine graph: what goes in, what comes out, what stays inside."""

    def __init__(self, graph: Graph, forward: list[Op], backward: list[Op]) -> None:
        self.graph, self.forward_ops, self.backward_ops = graph, forward, backward
        own = {op.id for op in forward} | {op.id for op in backward}
        self.made_forward = {s for op in forward for s in op.writes}
        self.made_backward = {s for op in backward for s in op.writes}
        self.outputs = {s for s in self.made_forward if any(use not in own for use in graph.uses[s])}
        self.results = {s for s in self.made_backward if any(use not in own for use in graph.uses[s])}
        self.inputs = {s for op in forward for s in op.reads if s not in self.made_forward and not graph.storages[s].lasting}
        self.inside = self.made_forward - self.outputs
        self.mutated = {s for op in forward for s in op.mutates if s not in self.made_forward}
        self.mutated_backward = {s for op in backward for s in op.mutates if s not in self.made_backward}
        self.precision = max((*forward, *backward), key=lambda op: op.flops).precision

    def forward_workspace(self) -> int:
        """The most it holds of its own at once, what it saves included."""
        return _most_held(self.graph, self.forward_ops, self.inside)

    def backward_workspace(self) -> int:
        return _most_held(self.graph, self.backward_ops, self.made_backward - self.results)

    def macros(self, module: str, choice: Choice, saved: tuple[int, ...]) -> Iterable[tuple[Op, list[Op]]]:
        workspace = choice.forward_workspace_bytes
        if workspace is None:
            workspace = self.forward_workspace() - choice.saved_bytes
        yield _macro(self.forward_ops, f"{module}.forward", self.outputs, saved, workspace), self.forward_ops
        if not self.backward_ops:
            return
        dropped = self.inside | (set() if choice.reads_inputs else self.inputs) | (set() if choice.reads_outputs else self.outputs)
        given = {s for op in self.backward_ops for s in op.reads} - self.made_backward - dropped
        if choice.reads_inputs:
            given |= {s for s in self.inputs if self.graph.storages[s].role is not Role.INPUT}
        workspace = choice.backward_workspace_bytes
        if workspace is None:
            workspace = self.backward_workspace()
        macro = _macro(self.backward_ops, f"{module}.backward", self.results, (), workspace)
        yield replace(macro, reads=(*sorted(given), *saved)), self.backward_ops


def _macro(members: list[Op], name: str, results: set[int], more: tuple[int, ...], workspace: int) -> Op:
    made = {s for op in members for s in op.writes}
    mutated = tuple(dict.fromkeys(s for op in members for s in op.mutates if s not in made))
    read = {s for op in members for s in op.reads} - made - set(mutated)
    return Op(
        id=-1,
        name=name,
        phase=members[0].phase,
        reads=tuple(sorted(read)),
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


def renumber(ops: list[Op], storages: list[Storage], graph: Graph) -> tuple[Graph, dict[int, int]]:
    """Ids are places again; storages nobody touches any more are left out, unless they are there anyway."""
    touched = {s for op in ops for s in op.reads + op.writes + op.mutates}
    kept = [s for s in storages if s.id in touched or s.lasting or s.role is Role.INPUT]
    number = {s.id: place for place, s in enumerate(kept)}
    found = Graph(
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
    return found, number
