"""A step with the inside of its regions as their code sees it, so that any policy can plan what a region saves.

Forward is op by op, each making the value it would make if it ran by itself; backward is one op for each call, for the compiler makes of it what it
likes, and reads what the region saves when memory does not matter. A policy that frees one of those values and computes it again before that
op has chosen not to save it; one that copies it away has chosen to send it. `lowering.py` reads these choices off its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir import Graph, Op, Phase, Role, Storage, check_graph
from ..regions import JointGraph, JointValue, Kind
from .coarse import RegionBorder, renumber

_KINDS = {Kind.MATMUL: "matmul", Kind.CONVOLUTION: "conv", Kind.ATTENTION: "attention"}
_GIVEN = (Kind.INPUT, Kind.PARAMETER)


@dataclass(frozen=True, slots=True)
class Expanded:
    graph: Graph
    values: Mapping[int, tuple[int, str]]  # storage -> (region call, value), of values inside regions
    inputs: Mapping[int, tuple[int, ...]]  # region call -> storages it is given
    forward: Mapping[int, tuple[int, ...]]  # region call -> its forward ops, in order
    backward: Mapping[int, int]  # region call -> its backward op
    source: Mapping[int, int]  # op -> the op of the fine graph it is, where it is one


def expand(graph: Graph, joints: Mapping[int, JointGraph]) -> Expanded:
    """The step with every call of the regions in `joints` (by region class) expanded so. Calls without a backward stay as they are."""
    groups: dict[tuple[int, Phase], list[Op]] = {}
    for op in graph.ops:
        if op.region >= 0 and op.phase is not Phase.UPDATE and graph.calls[op.region].region in joints:
            groups.setdefault((op.region, op.phase), []).append(op)
    storages = list(graph.storages)
    inside: dict[int, tuple[int, str]] = {}
    inputs: dict[int, tuple[int, ...]] = {}
    put: dict[int, list[Op]] = {}  # place of the last member of a group -> what stands in its place
    absorbed: set[int] = set()
    for call in graph.calls:
        forward, backward = groups.get((call.id, Phase.FORWARD), []), groups.get((call.id, Phase.BACKWARD), [])
        if not forward or not backward:
            continue
        border = RegionBorder(graph, forward, backward)
        writer = _Writer(call.id, call.module, joints[call.region], border, storages)
        put[forward[-1].id], put[backward[-1].id] = writer.forward(), [writer.backward()]
        inside |= {storage: (call.id, value) for value, storage in writer.made.items()}
        inputs[call.id] = tuple(sorted(border.inputs))
        absorbed |= {op.id for op in (*forward, *backward)}
    ops: list[Op] = []
    source: list[int] = []
    for op in graph.ops:
        if op.id in put:
            ops += put[op.id]
            source += [-1] * len(put[op.id])
        elif op.id not in absorbed:
            ops.append(op)
            source.append(op.id)
    found, number = renumber(ops, storages, graph)
    check_graph(found)
    mine = [op for op in found.ops if source[op.id] < 0]
    return Expanded(
        graph=found,
        values={number[storage]: value for storage, value in inside.items() if storage in number},
        inputs={call: tuple(number[s] for s in given if s in number) for call, given in inputs.items()},
        forward={call: tuple(op.id for op in mine if op.region == call and op.phase is Phase.FORWARD) for call in inputs},
        backward={op.region: op.id for op in mine if op.phase is Phase.BACKWARD},
        source={place: fine for place, fine in enumerate(source) if fine >= 0},
    )


class _Writer:
    """The ops of one call."""

    def __init__(self, call: int, module: str, joint: JointGraph, border: RegionBorder, storages: list[Storage]) -> None:
        self.call, self.module, self.joint, self.border, self.storages = call, module, joint, border, storages
        self.made: dict[str, int] = {}  # value -> its storage
        self.results = _results(joint, border, storages)
        self.lasting = tuple(sorted(s for s in {s for op in border.forward_ops for s in op.reads} if storages[s].lasting and s not in border.mutated))

    def forward(self) -> list[Op]:
        ops = []
        for value in self.joint.values:
            if value.kind in (*_GIVEN, Kind.VIEW, Kind.PART) or not value.in_forward:
                continue
            parts = [part for part in self._own(value) if part.name in self.results or part.nbytes]
            writes = tuple(dict.fromkeys(storage for part in parts for storage in self._storages(part)))
            if writes:
                ops.append(self._op(value, writes))
        ops[0] = replace(ops[0], reads=tuple(dict.fromkeys((*ops[0].reads, *self.lasting))))
        left = self.border.outputs - {s for op in ops for s in op.writes}
        ops[-1] = replace(ops[-1], writes=(*ops[-1].writes, *sorted(left)))
        if self.border.mutated:  # running statistics and the like: once, whatever is computed again
            ops.append(
                Op(
                    -1,
                    f"{self.module}.statistics",
                    Phase.FORWARD,
                    (),
                    (),
                    kind="statistics",
                    region=self.call,
                    mutates=tuple(sorted(self.border.mutated)),
                )
            )
        return ops

    def backward(self) -> Op:
        joint, border = self.joint, self.border
        handover = joint.hand_over(joint.keep)
        saved = {s for name in handover.saved for s in self._found(joint.named[name])}
        given = {s for op in border.backward_ops for s in op.reads} - border.made_backward - border.inside
        if any(joint.named[name].kind is Kind.INPUT for name in handover.given):
            given |= border.inputs
        else:
            given -= border.inputs
        if not any(joint.named[name].is_output for name in handover.saved):
            given -= border.outputs
        return Op(
            id=-1,
            name=f"{self.module}.backward",
            phase=Phase.BACKWARD,
            reads=tuple(sorted(given | saved)),
            writes=tuple(sorted(border.results)),
            kind="region_backward",
            region=self.call,
            mutates=tuple(sorted(border.mutated_backward)),
            workspace_bytes=border.backward_workspace(),
            flops=sum(op.flops for op in border.backward_ops),
            precision=border.precision,
        )

    def _op(self, value: JointValue, writes: tuple[int, ...]) -> Op:
        reads: dict[int, None] = {}
        for name in value.made_from:
            source = self.joint.owner(name)
            found = self.border.inputs if source.kind is Kind.INPUT else self._found(source)
            reads |= dict.fromkeys(sorted(found))
        return Op(
            id=-1,
            name=f"{self.module}.{value.name}",
            phase=Phase.FORWARD,
            reads=tuple(read for read in reads if read not in writes),
            writes=writes,
            kind=_KINDS.get(value.kind, "pointwise"),
            region=self.call,
            replayable=not value.must_save,
            flops=value.flops,
            precision=self.border.precision,
        )

    def _own(self, value: JointValue) -> list[JointValue]:
        parts = self.joint.parts.get(value.name)
        return [value] if parts is None else [self.joint.named[part] for part in parts]

    def _storages(self, value: JointValue) -> tuple[int, ...]:
        if value.name in self.results:
            return self.results[value.name]
        if value.name not in self.made:
            self.made[value.name] = len(self.storages)
            self.storages.append(Storage(len(self.storages), f"{self.module}.{value.name}", value.nbytes, Role.ACTIVATION))
        return (self.made[value.name],)

    def _found(self, value: JointValue) -> tuple[int, ...]:
        """Storages of a value that was made; what lies behind an op with several results, and behind what only backward makes."""
        if value.kind in _GIVEN:
            return ()
        if value.name in self.results:
            return self.results[value.name]
        if value.name in self.made:
            return (self.made[value.name],)
        if value.name in self.joint.parts:
            return tuple(s for part in self.joint.parts[value.name] for s in self._found(self.joint.named[part]))
        return tuple(dict.fromkeys(s for name in value.made_from for s in self._found(self.joint.owner(name)))) if not value.in_forward else ()


def _results(joint: JointGraph, border: RegionBorder, storages: list[Storage]) -> dict[str, tuple[int, ...]]:
    """Which value is which result of the region: by size, in order."""
    left = sorted(border.outputs)
    found: dict[str, tuple[int, ...]] = {}
    for value in joint.values:
        if value.is_output and value.kind not in (*_GIVEN, Kind.VIEW):
            match = next((storage for storage in left if storages[storage].nbytes == value.nbytes), None)
            if match is not None:
                left.remove(match)
                found[value.name] = (match,)
    return found
