"""Which ops a layer-type rule means: the papers on conv nets speak of CONV and FC layers; we look at Op.kind."""

from __future__ import annotations

from ..ir import Graph, Op, Phase, Role

DENSE = ("matmul", "linear", "addmm", "mm", "bmm", "attention")
REGION = ("region_forward", "region_backward")  # a whole block in one op: in steps whose blocks are compiled


def is_conv(op: Op) -> bool:
    return "conv" in op.kind


def is_dense(op: Op) -> bool:
    return op.kind.removesuffix("_backward") in DENSE or is_region(op)


def is_region(op: Op) -> bool:
    return op.kind in REGION


def forward_uses(graph: Graph, storage: int) -> list[int]:
    return [op for op in graph.uses[storage] if graph.ops[op].phase is Phase.FORWARD]


def saved_for_backward(graph: Graph) -> list[tuple[int, int, int]]:
    """(storage, its last forward use, its first use after that) of every activation and input that waits for backward, by last forward use."""
    found = []
    for storage in graph.storages:
        if storage.role not in (Role.ACTIVATION, Role.INPUT) or storage.lasting or not storage.nbytes:
            continue
        uses = graph.uses[storage.id]
        forward = forward_uses(graph, storage.id)
        if forward and uses[-1] > forward[-1]:
            found.append((storage.id, forward[-1], uses[len(forward)]))
    return sorted(found, key=lambda saved: (saved[1], saved[0]))
