"""Megatron's formulas for activation memory (MLSys 2023), and its selective recomputation, against captured layers of its three largest shapes.

A layer as the paper draws it, attention written out and with dropout, is captured in bf16 at 2048 tokens; what waits for backward is counted for
three layers and for two, and the difference is a layer's. Selective and full recomputation are the policy's. The extra time is by roofline on an
A100 for one device with the whole layer, where theirs is measured on eight of them with the layer divided.
"""

from __future__ import annotations

from typing import Any

import torch

from tierwise import machines, policies
from tierwise.capture import capture_step, on_fake_tensors
from tierwise.ir import Copy, Graph, Phase, Problem, Role, Schedule
from tierwise.profile.roofline import roofline_costs
from tierwise.simulate import simulate

from ._nets import Layers

LENGTH, BATCH = 2048, 1
# hidden, heads, extra time of full recomputation and of selective as published (measured for 22B; the FLOPs' share for the others)
SHAPES: dict[str, tuple[int, int, float | None, float | None]] = {
    "22B": (6144, 64, 0.39, 0.07),
    "175B": (12288, 96, None, 0.027),
    "530B": (20480, 128, None, 0.016),
}
FORMULAS = {
    "none": lambda s, b, h, a: s * b * h * (34 + 5 * a * s / h),
    "selective": lambda s, b, h, a: 34 * s * b * h,
    "full": lambda s, b, h, a: 2 * s * b * h,
}
WHY = {
    "none": "PyTorch's layer also keeps the causal mask, a byte for each of the scores of one head, and a mean and a deviation for each token",
    "selective": "as above",
    "full": "a layer keeps its input",
}
TIME_WHY = ("roofline, eager, one device: every pass over the scores is a kernel of its own, where theirs are fused and the layer is divided among "
            "eight GPUs that also exchange results")  # fmt: skip


def rows() -> list[dict[str, Any]]:
    return [row for name in SHAPES for row in _rows(name)]


def _rows(name: str) -> list[dict[str, Any]]:
    hidden, heads, full_extra, selective_extra = SHAPES[name]
    two, three = (_problem(layers, hidden, heads) for layers in (2, 3))
    seconds = {}
    found = []
    for way, formula in FORMULAS.items():
        options = {"granularity": way, "modules": "core_attn"}
        plans = [policies.plan(problem, "megatron", layers=layers, **options) for layers, problem in ((2, two), (3, three))]
        ours = _held_at_the_turn(three, plans[1]) - _held_at_the_turn(two, plans[0])
        seconds[way] = simulate(three, plans[1]).seconds - simulate(two, plans[0]).seconds
        published = formula(LENGTH, BATCH, hidden, heads)
        extra = {"full": full_extra, "selective": selective_extra}.get(way)
        ratio = seconds[way] / seconds["none"]
        found.append({
            "case": f"one layer of {name}, {LENGTH} tokens", "way": way, "peak_bytes": ours, "predicted_peak_bytes": ours, "seconds": seconds[way],
            "predicted_seconds": seconds[way], "ratio": ratio, "published_bytes": round(published), "deviation": ours / published - 1,
            "published_ratio": None if extra is None else 1 + extra, "deviation_of_time": None if extra is None else ratio / (1 + extra) - 1,
            "why": WHY[way] + ("" if extra is None else "; time: " + TIME_WHY),
        })  # fmt: skip
    return found


def _problem(layers: int, hidden: int, heads: int) -> Problem:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with on_fake_tensors():
            model, batch = Layers(layers, hidden, heads), {"x": torch.empty(BATCH, LENGTH, hidden)}
    finally:
        torch.set_default_dtype(usual)
    graph = capture_step(model, batch, optimizer="sgd").graph
    machine = machines.load("a100-80")
    return Problem(graph, machine, roofline_costs(graph, machine)).with_budget(1 << 42)


def _held_at_the_turn(problem: Problem, schedule: Schedule) -> int:
    """Bytes of activations on the device when the first op of backward has run."""
    graph: Graph = problem.graph
    held: set[int] = set()
    for step in schedule.steps:
        if hasattr(step, "op"):
            op = graph.ops[step.op]
            held |= {s for s in op.writes if graph.storages[s].role is Role.ACTIVATION}
            held -= {old for old, _ in op.in_place}
            if op.phase is not Phase.FORWARD:
                break
        elif not isinstance(step, Copy):
            held.discard(step.storage)
    return sum(graph.storages[s].nbytes for s in held)
