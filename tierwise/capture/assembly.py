"""What the trace wrote down becomes a Graph: bytes are reused where a real step reuses them, releases and updates are added, all is numbered.

Where Python or autograd hold a storage longer than any op reads it, an op of kind "release", which costs nothing, reads it at the point where they
let go: a local variable that lives on, a saved tensor until its node is done. The batch and what the model returned, which a training loop keeps
until the step ends, are released when backward is done: updates allocate nothing, and after them nothing can be computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from ..ir import MASTER, Graph, Op, Phase, Role, Storage
from .calls import ROOT
from .fake_step import FakeStep
from .recipes import Recipe
from .regions import Regions
from .storages import Block
from .trace import Record
from .updates import Plan

RELEASE = "release"
_END_OF_STEP = -1


def assemble(step: FakeStep, regions: Regions, plan: Plan) -> tuple[Graph, dict[int, Recipe]]:
    """The graph, and how each of its ops that is one call was called."""
    assembly = _Assembly(step, regions, plan)
    graph = assembly.graph()
    return graph, {place: record.recipe for place, record in enumerate(assembly.ops) if record.recipe is not None}


class _Assembly:
    """Records and blocks become ops and storages; releases and updates are added."""

    def __init__(self, step: FakeStep, regions: Regions, plan: Plan) -> None:
        self.blocks: list[Block] = step.storages.blocks
        self.records: list[Record] = step.recorder.records
        self.step, self.regions, self.plan = step, regions, plan
        self.ops: list[Record] = []

    def graph(self) -> Graph:
        self._reuse_bytes()
        self._name_grads()
        released = self._releases()
        for place, record in enumerate(self.records):
            self.ops.append(record)
            self._release(released.get(place + 1, []), record.phase, record.call)
        self._release(released.get(_END_OF_STEP, []), Phase.BACKWARD, ROOT)
        self._add_updates()
        kept = self._kept_blocks()
        number = {block: place for place, block in enumerate(kept)}
        ops = tuple(self._op(place, record, number) for place, record in enumerate(self.ops))
        storages = tuple(
            Storage(number[block], self.blocks[block].name, self.blocks[block].nbytes, self.blocks[block].role, self.blocks[block].lasting)
            for block in kept
        )
        return Graph(ops, storages, self.regions.regions, self.regions.calls)

    def _reuse_bytes(self) -> None:
        """Where a real tensor would have been written into the bytes of one nobody holds any more."""
        for place, record in enumerate(self.records):
            old = record.may_reuse
            if old is None or len(record.writes) != 1 or record.in_place:
                continue
            was, now = self.blocks[old], self.blocks[record.writes[0]]
            if was.freed_at == place + 1 and was.nbytes == now.nbytes and not was.lasting:
                record.in_place = ((old, record.writes[0]),)

    def _name_grads(self) -> None:
        """A gradient, and the partial sums it grew from in place, are gradients."""
        grew_from = {new: old for record in self.records for old, new in record.in_place}
        for name, block in self.step.grads.items():
            self.blocks[block].name = f"{name}.grad"
            grown: int | None = block
            while grown is not None:
                self.blocks[grown].role = Role.GRAD
                grown = grew_from.get(grown)

    def _releases(self) -> dict[int, list[int]]:
        """Blocks held longer than any op uses them, by the number of ops that had run when they were let go."""
        last_use: dict[int, int] = {}
        for place, record in enumerate(self.records):
            for block in (*record.reads, *record.writes, *record.mutates):
                last_use[block] = place
        consumed = {old for record in self.records for old, _ in record.in_place}
        updated_from = {block for name, block in self.step.grads.items() if name in self.plan}
        found: dict[int, list[int]] = defaultdict(list)
        for number, held in enumerate(self.blocks):
            if held.lasting or number in consumed or number in updated_from:
                continue
            if held.freed_at is None:
                found[_END_OF_STEP].append(number)
            elif held.freed_at > last_use.get(number, -1) + 1:
                found[held.freed_at].append(number)
        return found

    def _release(self, blocks: list[int], phase: Phase, call: int) -> None:
        if not blocks:
            return
        largest = max(blocks, key=lambda block: self.blocks[block].nbytes)
        others = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
        name = f"{RELEASE} {self.blocks[largest].name}{others}"
        self.ops.append(Record(name, phase, RELEASE, call, reads=tuple(blocks), writes=()))

    def _add_updates(self) -> None:
        parameters = dict(self.step.model.named_parameters())
        for name, states in self.plan.items():
            parameter = parameters[name]
            lasting = []
            for state in states:
                self.blocks.append(Block(state.nbytes, Role.OPTIMIZER_STATE, f"{name}.{state.name}", lasting=True))
                lasting.append(len(self.blocks) - 1)
            block = self.step.storages.find(parameter)
            assert block is not None  # every parameter was added before the step
            precision = "fp32" if parameter.element_size() >= 4 or (states and states[0].name == MASTER) else str(_precision(parameter))
            grad = self.step.grads[name]
            self.ops.append(
                Record(f"{name}.update", Phase.UPDATE, "update", ROOT, (grad,), (), (block, *lasting), flops=parameter.numel(), precision=precision)
            )

    def _kept_blocks(self) -> list[int]:
        """Lasting storages and inputs are there whether or not an op touches them; of the rest, those some op touches."""
        touched = {block for record in self.ops for block in (*record.reads, *record.writes, *record.mutates)}
        grads = set(self.step.grads.values())
        return [
            index
            for index, block in enumerate(self.blocks)
            if index in touched or block.role is Role.INPUT or (block.lasting and (block.role is not Role.GRAD or index in grads))
        ]

    def _op(self, place: int, record: Record, number: Mapping[int, int]) -> Op:
        return Op(
            id=place,
            name=record.name,
            phase=record.phase,
            reads=tuple(number[block] for block in record.reads),
            writes=tuple(number[block] for block in record.writes),
            kind=record.kind,
            region=self.regions.of_call[record.call],
            mutates=tuple(number[block] for block in record.mutates),
            in_place=tuple((number[old], number[new]) for old, new in record.in_place),
            workspace_bytes=record.workspace_bytes,
            replayable=record.is_replayable,
            flops=record.flops,
            precision=record.precision,
        )


def _precision(parameter: torch.Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(parameter.dtype, "fp32")
