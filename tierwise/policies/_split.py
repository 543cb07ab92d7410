"""A step whose batch is done in pieces, layer by layer where layers allow it: a rewrite of the graph, for plans that no whole batch fits into.

A run of neighbouring ops that each treat every sample by itself is done piece after piece: all its ops on the first part of the batch, then all
on the second. What only such ops touch exists in pieces; what others touch too stays whole, made by the first piece and filled up by the next,
as are the gradients of weights, which every piece adds to. Batch norm looks at the whole batch, so it ends a run, and so does the loss.

The sums over the batch are made in another order and dropout draws other numbers: the result is that of training, not bit for bit that of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..ir import Codec, Costs, Graph, Op, Phase, Problem, Role, Storage, Variant

# Every sample by itself, and every activation they write has the batch in it.
BY_SAMPLE = frozenset({
    "adaptive_avg_pool2d", "add", "attention", "avg_pool2d", "cast", "cat", "clone", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "div",
    "dropout", "embedding", "gelu", "group_norm", "layer_norm", "log_softmax", "matmul", "max_pool2d", "mul", "neg", "release", "relu", "rms_norm",
    "sigmoid", "silu", "softmax", "tanh",
})  # fmt: skip


def split(problem: Problem, pieces: int) -> Problem:
    """The same step with its batch in so many pieces; the problem itself where no op can be split so."""
    splitter = _Splitter(problem, pieces)
    return splitter.problem() if splitter.runs else problem


class _Splitter:
    def __init__(self, problem: Problem, pieces: int) -> None:
        self.before, self.graph, self.pieces = problem, problem.graph, pieces
        self.batched = _with_the_batch_in_them(problem.graph)
        self.ops = {op.id for op in problem.graph.ops if self._can_be_split(op)}
        self.parts = self._in_pieces()
        while (stuck := self._stuck_in_place()) or (lost := self._alone()):
            self.ops -= stuck or lost
            self.parts = self._in_pieces()
        self.runs = self._runs()

    # -- what is split --------------------------------------------------------------------------------------------------------------

    def _can_be_split(self, op: Op) -> bool:
        kind, graph = op.kind.removesuffix("_backward"), self.graph
        if op.phase is Phase.UPDATE or (kind not in BY_SAMPLE and not (kind == "sum" and op.phase is Phase.BACKWARD)):
            return False
        if not any(s in self.batched for s in op.reads):
            return False
        if any(graph.storages[s].lasting for s in op.writes + op.mutates):
            return False
        return all(s in self.batched or graph.storages[s].role is Role.GRAD for s in op.writes + op.mutates)

    def _in_pieces(self) -> frozenset[int]:
        """Storages that only split ops touch, and whose bytes the pieces share evenly."""
        return frozenset(
            s.id
            for s in self.graph.storages
            if s.id in self.batched
            and s.role is Role.ACTIVATION
            and s.nbytes % self.pieces == 0
            and self.graph.uses[s.id]
            and all(use in self.ops for use in self.graph.uses[s.id])
        )

    def _stuck_in_place(self) -> set[int]:
        """Ops that hand over the bytes of something whole: no piece can do that."""
        return {op.id for op in self.graph.ops if op.id in self.ops and any(not {old, new} <= self.parts for old, new in op.in_place)}

    def _alone(self) -> set[int]:
        """Ops with nothing in pieces on either side: splitting them would only cost launches."""
        return {op for op in self.ops if self.parts.isdisjoint(self.graph.ops[op].reads + self.graph.ops[op].writes)}

    def _runs(self) -> dict[int, list[Op]]:
        """Neighbours of one phase that are split, by the first of them."""
        found: dict[int, list[Op]] = {}
        run: list[Op] = []
        for op in self.graph.ops:
            if op.id not in self.ops or (run and run[-1].phase is not op.phase):
                run = []
            if op.id in self.ops:
                run.append(op)
                found.setdefault(run[0].id, run)
        return found

    # -- the new step ---------------------------------------------------------------------------------------------------------------

    def problem(self) -> Problem:
        self.storages: list[Storage] = []
        self.place: dict[tuple[int, int], int] = {}  # (storage, piece) -> its new id
        for storage in self.graph.storages:
            for piece in range(self.pieces):
                if piece and storage.id not in self.parts:
                    self.place[storage.id, piece] = self.place[storage.id, 0]
                    continue
                self.place[storage.id, piece] = len(self.storages)
                part = self._part(storage, piece) if storage.id in self.parts else storage
                self.storages.append(replace(part, id=len(self.storages)))
        self.new_ops: list[Op] = []
        self.copies: dict[int, list[int]] = {}  # op -> its new ids
        in_a_run = {op.id for run in self.runs.values() for op in run}
        for op in self.graph.ops:
            if op.id in self.runs:
                order = range(self.pieces)
                written: set[int] = set()
                for piece in order if op.phase is Phase.FORWARD else reversed(order):  # backward meets the last piece first
                    for member in self.runs[op.id]:
                        self._add(self._piece(member, piece, written), member.id)
            elif op.id not in in_a_run:
                self._add(self._renamed(op), op.id)
        graph = Graph(tuple(self.new_ops), tuple(self.storages), self.graph.regions, self.graph.calls)
        return replace(self.before, graph=graph, costs=self._costs())

    def _add(self, op: Op, of: int) -> None:
        self.copies.setdefault(of, []).append(len(self.new_ops))
        self.new_ops.append(replace(op, id=len(self.new_ops)))

    def _part(self, storage: Storage, piece: int) -> Storage:
        return replace(storage, name=self._name(storage.name, piece), nbytes=storage.nbytes // self.pieces)

    def _name(self, name: str, piece: int) -> str:
        return f"{name} {piece + 1}/{self.pieces}"

    def _renamed(self, op: Op, piece: int = 0) -> Op:
        """The op on what has these ids now; what is done at once touches nothing that is in pieces."""

        def new(storages: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self.place[s, piece] for s in storages)

        in_place = tuple((self.place[old, piece], self.place[fresh, piece]) for old, fresh in op.in_place)
        return replace(op, reads=new(op.reads), writes=new(op.writes), mutates=new(op.mutates), in_place=in_place)

    def _piece(self, op: Op, piece: int, written: set[int]) -> Op:
        part = self._renamed(op, piece)
        whole = tuple(s for s in part.writes if s in written)  # a piece before has made it; this one fills up its part
        written.update(self.place[s, 0] for s in op.writes if s not in self.parts)
        return replace(
            part,
            name=self._name(op.name, piece),
            writes=tuple(s for s in part.writes if s not in whole),
            mutates=part.mutates + whole,
            workspace_bytes=-(-op.workspace_bytes // self.pieces),
            flops=op.flops // self.pieces,
        )

    def _costs(self) -> Costs:
        costs = self.before.costs
        seconds = {}
        for (op, processor), value in costs.op_seconds.items():
            share = self._share(op, processor)
            seconds.update({(new, processor): share(value) for new in self.copies[op]})
        codecs = tuple(replace(codec, encoded_bytes=self._encoded(codec)) for codec in costs.codecs)
        variants = tuple(new for variant in costs.variants for new in self._variants(variant))
        return Costs(seconds, codecs, variants)

    def _share(self, op: int, processor: str) -> Callable[[float], float]:
        """A piece takes its share of the work, and a launch of its own."""
        pieces = len(self.copies[op])
        launch = self.before.machine.processor_named[processor].launch_seconds
        return lambda seconds: seconds if pieces == 1 else min(launch, seconds) + max(0.0, seconds - launch) / pieces

    def _encoded(self, codec: Codec) -> Mapping[int, int]:
        found = {}
        for storage, nbytes in codec.encoded_bytes.items():
            pieces = self.pieces if storage in self.parts else 1
            found.update({self.place[storage, piece]: -(-nbytes // pieces) for piece in range(pieces)})
        return found

    def _variants(self, variant: Variant) -> list[Variant]:
        found = []
        copies = self.copies[variant.op]
        for new in copies:
            # A piece of an op touches one piece of each storage: which one, its reads say.
            where = dict(zip(self.graph.ops[variant.op].reads, self.new_ops[new].reads, strict=True))
            if variant.reads is not None and any(s in self.parts and s not in where for s in variant.reads):
                continue
            reads = None if variant.reads is None else tuple(where.get(s, self.place[s, 0]) for s in variant.reads)
            seconds = {processor: self._share(variant.op, processor)(value) for processor, value in variant.seconds.items()}
            forms = {where.get(s, self.place[s, 0]): form for s, form in variant.forms.items()}
            found.append(Variant(new, variant.name, seconds, -(-variant.workspace_bytes // len(copies)), reads, forms))
        return found


def _with_the_batch_in_them(graph: Graph) -> set[int]:
    """Inputs, and every activation made from one by ops that treat samples by themselves or, after the loss, from its gradient."""
    found = {s.id for s in graph.storages if s.role is Role.INPUT}
    for op in graph.ops:
        by_sample = op.kind.removesuffix("_backward") in BY_SAMPLE
        if by_sample and found.intersection(op.reads):
            found.update(s for s in op.writes if graph.storages[s].role is Role.ACTIVATION)
        elif op.phase is not Phase.FORWARD and not by_sample:
            # The loss turns what it reads into gradients of the same size; batch norm's backward does so too.
            sizes = {graph.storages[s].nbytes for s in op.reads if s in found}
            found.update(s for s in op.writes if graph.storages[s].role is Role.ACTIVATION and graph.storages[s].nbytes in sizes)
        elif op.phase is Phase.FORWARD:
            sizes = {graph.storages[s].nbytes for s in op.reads if s in found and graph.storages[s].role is Role.ACTIVATION}
            found.update(s for s in op.writes if graph.storages[s].role is Role.ACTIVATION and graph.storages[s].nbytes in sizes)
    return found
