"""vDNN's headline (MICRO 2016): VGG-16 at batch 256 needs 28 GB, and trains in a 12 GB Titan X at 18% less than a card with enough memory would.

The step is captured and costed by roofline for the same card, as PyTorch runs it, with the backward of ReLU in place, and with cuDNN's pooling
besides, as their framework ran it: a feature map of the first layers has 3.3 GB, and PyTorch's ReLU has three of them at a time; its pooling saves
8 bytes for each maximum, where cuDNN's reads what it made. Kernels are the step's own, without workspace, or
Winograd's transform where that fits, which is counted, not measured (policies/_kernels.py). Where vDNN does not fit into the card, it is also given
the least it needs, so that its loss can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tierwise import pipeline, policies
from tierwise.errors import InfeasibleBudget
from tierwise.ir import Graph, Op, Problem, peak_bytes
from tierwise.policies._kernels import with_conv_kernels
from tierwise.simulate import simulate

GB = 10**9
PUBLISHED_BYTES, PUBLISHED_LOSS = 28 * GB, 0.18
AMPLE = 1 << 40
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("vdnn", {}), ("vdnn", {"mode": "all", "kernels": "memory"}), ("vdnn_plus_plus", {}), ("cdma", {}), ("modnn", {}),
)  # fmt: skip
KEPT = ("what is kept is given back after its last use and shared by later gradients, and no workspace is counted; "
        "their 28 GB are what a framework allocates for the whole network")  # fmt: skip
TRANSFORMED = "the transform of the first layers' maps alone has 14 GB at this batch, more than cuDNN's kernels take"
TIMES = ("the loss is copies that no kernel hides: with the step's own kernels, slower than cuDNN's on that card, nearly all of them hide; with the "
         "transform, faster than cuDNN's, few do; theirs lies between")  # fmt: skip
TOO_LITTLE = ("at the first pooling's backward PyTorch's indices, 8 bytes for each maximum, take 1.6 GB that cuDNN's pooling does not have, "
              "beside momentum of 0.6 GB")  # fmt: skip


def rows() -> list[dict[str, Any]]:
    graph = pipeline.capture_model("vgg-16", batch=256, optimizer="sgd").graph
    found = []
    in_place = _in_place(graph)
    steps = {"PyTorch's step": graph, "ReLU's backward in place": in_place, "ReLU in place, cuDNN's pooling": _without_indices(in_place)}
    for step, made in steps.items():
        problem = pipeline.make_problem(made, "titanx-12")
        found += [*_rows(problem, step, "own kernels", KEPT), *_rows(with_conv_kernels(problem), step, "Winograd to choose", TRANSFORMED)]
    return found


def _in_place(graph: Graph) -> Graph:
    """The gradient of a ReLU's input takes over the bytes of its output's gradient, where nobody else reads that."""
    return replace(graph, ops=tuple(_on_its_gradient(graph, op) for op in graph.ops))


def _on_its_gradient(graph: Graph, op: Op) -> Op:
    if op.kind != "relu_backward" or graph.uses[op.reads[0]][-1] != op.id:
        return op
    return replace(op, in_place=((op.reads[0], op.writes[0]),))


def _without_indices(graph: Graph) -> Graph:
    """A pooling's backward finds the maxima again in what went in and came out; nothing else is saved for it."""
    made = {op.writes[1]: op.writes[0] for op in graph.ops if op.kind == "max_pool2d" and len(op.writes) == 2}
    storages = tuple(replace(storage, nbytes=0) if storage.id in made else storage for storage in graph.storages)
    ops = tuple(replace(op, reads=tuple(dict.fromkeys((*op.reads, *(made[s] for s in op.reads if s in made))))) for op in graph.ops)
    return replace(graph, storages=storages, ops=ops)


def _rows(problem: Problem, step: str, kernels: str, why: str) -> Iterator[dict[str, Any]]:
    case = f"vgg-16, batch 256, Titan X 12 GB: {step}, {kernels}"
    ample = problem.with_budget(AMPLE)
    kept = policies.plan(ample, "vdnn", mode="none")
    oracle, peak = simulate(ample, kept).seconds, peak_bytes(ample, kept)[problem.device_tier]
    yield _row(case, "everything kept", AMPLE, peak, oracle) | {
        "ratio": 1.0, "published_bytes": PUBLISHED_BYTES, "deviation": peak / PUBLISHED_BYTES - 1, "why": why,
    }  # fmt: skip
    for policy, options in WAYS:
        way = " ".join([policy, *(f"{key}={value}" for key, value in options.items())])
        try:
            yield _planned(problem, case, way, policy, options, oracle)
        except InfeasibleBudget as error:
            yield _row(case, way, problem.budget_bytes) | {"outcome": "OOM", "least_bytes": error.least_bytes, "why": TOO_LITTLE}
            if error.least_bytes:
                yield _planned(problem.with_budget(error.least_bytes), case, f"{way}, in the least it needs", policy, options, oracle)


def _planned(problem: Problem, case: str, way: str, policy: str, options: dict[str, Any], oracle: float) -> dict[str, Any]:
    prepared, schedule = policies.planned(problem, policy, **options)
    timeline = simulate(prepared, schedule)
    row = _row(case, way, problem.budget_bytes, timeline.peak_bytes[problem.device_tier], timeline.seconds)
    row["ratio"] = timeline.seconds / oracle
    if policy == "vdnn" and not options:
        published = 1 / (1 - PUBLISHED_LOSS)
        row |= {"published_ratio": published, "deviation": row["ratio"] / published - 1, "why": TIMES}
    return row


def _row(case: str, way: str, budget: int, peak: int | None = None, seconds: float | None = None) -> dict[str, Any]:
    return {"case": case, "way": way, "budget_bytes": budget, "peak_bytes": peak, "seconds": seconds,
            "predicted_seconds": seconds, "predicted_peak_bytes": peak}  # fmt: skip
