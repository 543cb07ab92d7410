"""Kernels to choose from, for steps that bring none: convolutions by Winograd's transform, which trades memory for arithmetic.

The step's own kernel is taken as the one without workspace. A 3 by 3 convolution with stride 1 can also be done on tiles of 4 by 4 outputs: a
quarter of the multiplications, on a transformed input and output that take 36 / 16 of their bytes each and are written and read once (counted,
not measured). Tensor cores multiply faster than memory feeds such tiles, so there it is not offered. Measured kernels belong into Costs.variants.

Graphs have no shapes. With stride 1 and padding that keeps the size, outputs and inputs have as many positions, and flops and bytes say the rest:
flops = 2 · outputs · channels · window, weights = channels · filters · window.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Graph, Op, Problem, Role, Variant

WINOGRAD = "winograd"
FEWER_PRODUCTS = 4.0
TILE_BYTES = 36 / 16  # of the input and of the output
ELEMENT_BYTES = 4


def with_conv_kernels(problem: Problem) -> Problem:
    """The problem with the transform as a variant of each convolution it fits, where none of them has a variant yet."""
    device = problem.machine.device
    rates = device.flops_per_second
    if any(problem.graph.ops[v.op].kind.startswith("conv") for v in problem.costs.variants) or not device.bytes_per_second:
        return problem
    found = []
    for op in problem.graph.ops:
        maps = _maps_of_3x3(problem.graph, op)
        if not maps or rates.get(op.precision, 0.0) != rates.get("fp32", -1.0):
            continue
        workspace = round(TILE_BYTES * sum(maps))
        passes = 2 if op.kind.endswith("_backward") else 1  # the gradients of input and of weights, each a convolution
        moving = 2 * passes * workspace / device.bytes_per_second
        seconds = problem.seconds(op.id, device.name)
        faster = max(device.launch_seconds + (seconds - device.launch_seconds) / FEWER_PRODUCTS, moving)
        if faster < seconds:
            found.append(Variant(op.id, WINOGRAD, {device.name: faster}, workspace))
    return replace(problem, costs=replace(problem.costs, variants=(*problem.costs.variants, *found))) if found else problem


def _maps_of_3x3(graph: Graph, op: Op) -> tuple[int, int] | None:
    """Bytes of the feature maps on both sides of a 3 by 3 convolution with stride 1; None for every other op."""
    if op.kind not in ("conv2d", "conv2d_backward"):
        return None
    weights = [graph.storages[s].nbytes for s in op.reads if graph.storages[s].role is Role.PARAM]
    maps = [graph.storages[s].nbytes for s in op.reads if graph.storages[s].role in (Role.ACTIVATION, Role.INPUT)]
    made = [graph.storages[s].nbytes for s in op.writes if graph.storages[s].role is Role.ACTIVATION]
    sides = (maps[0], made[0]) if op.kind == "conv2d" and maps and made else (maps[1], maps[0]) if len(maps) > 1 else None
    if not weights or sides is None or not op.flops:
        return None
    inputs, outputs = (side / ELEMENT_BYTES for side in sides)
    products = op.flops / (4 if op.kind.endswith("_backward") else 2)  # backward is two convolutions
    per_output = products / outputs  # channels · window
    filters = max(weights) / ELEMENT_BYTES / per_output if per_output else 0.0
    channels = inputs * filters / outputs
    window = per_output / channels if channels else 0.0
    return (int(sides[0]), int(sides[1])) if abs(window - 9) < 1e-6 else None
