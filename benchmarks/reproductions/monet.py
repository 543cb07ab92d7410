"""MONeT's table (ICLR 2021): the extra time of five networks within 10 to 5 GB on a P100, and the memory PyTorch needs for them.

The steps are captured and costed by roofline on the same card. Theirs is measured, with faster convolution algorithms chosen together with the
checkpoints, which is why some of their numbers are negative; ours chooses checkpoints only. Budgets are theirs; the extra time is against
everything kept. Rockmate's plans stand beside them.
"""

from __future__ import annotations

from typing import Any

from tierwise import pipeline, policies
from tierwise.errors import InfeasibleBudget
from tierwise.ir import peak_bytes
from tierwise.policies import keep_all
from tierwise.simulate import simulate

GB = 1 << 30
BUDGETS = (10, 9, 8, 7, 6, 5)
# model, batch, GB with PyTorch, extra time in percent at each budget
PUBLISHED: dict[str, tuple[int, float, tuple[float, ...]]] = {
    "resnet-50": (184, 15.06, (3.22, 4.68, 5.56, 7.28, 9.31, 11.95)),
    "benchmarks.reproductions._nets:googlenet": (320, 14.93, (7.13, 7.87, 8.44, 9.71, 12.14, 15.77)),
    "benchmarks.reproductions._nets:unet": (11, 14.32, (-4.10, -2.07, -0.09, 1.39, 4.95, 11.51)),
    "benchmarks.reproductions._nets:mobilenet_v2": (272, 14.46, (2.40, 3.10, 4.77, 5.53, 7.55, 8.72)),
    "vgg-16": (176, 14.12, (-5.30, -4.64, -2.18, 1.99, 5.44, 9.11)),
}
SECONDS = 20.0  # for each plan
WHY_PEAK = {
    "unet": "which U-Net it was is not known here; ours is that of 2015 with a batch norm behind each convolution",
    "mobilenet-v2": "today's PyTorch keeps a copy of what a ReLU6 in place overwrites, for its backward; that of 2020 kept the result",
}
USUALLY = "PyTorch's workspaces and fragments count in theirs"
WHY_OOM = ("the backward of ReLU and of pooling is PyTorch's: it has three of the first layers' maps at a time, where MONeT's runs in place and "
           "from the output")  # fmt: skip
WHY_TIME = "ours computes again what is cheap by roofline and chooses no kernels; theirs is measured and gains from faster convolutions"


def rows() -> list[dict[str, Any]]:
    return [row for model in PUBLISHED for row in _rows(model)]


def _rows(model: str) -> list[dict[str, Any]]:
    batch, published_gb, extra = PUBLISHED[model]
    name = model.rpartition(":")[2].replace("_", "-")
    case = f"{name}, batch {batch}, P100 16 GB"
    graph = pipeline.capture_model(model, batch=batch, optimizer="sgd").graph
    problem = pipeline.make_problem(graph, "p100-16")
    ample = problem.with_budget(1 << 40)
    kept = keep_all.plan(ample)
    seconds, peak = simulate(ample, kept).seconds, peak_bytes(ample, kept)[problem.device_tier]
    found = [_row(case, "keep_all", None, peak, seconds) | {
        "ratio": 1.0, "published_bytes": round(published_gb * GB), "deviation": peak / (published_gb * GB) - 1, "why": WHY_PEAK.get(name, USUALLY),
    }]  # fmt: skip
    for policy in ("monet", "rockmate"):
        for budget, percent in zip(BUDGETS, extra, strict=True):
            way = f"{policy}, {budget} GB"
            limits = {"time_limit_seconds": SECONDS} if policy == "monet" else {}
            try:
                schedule = policies.plan(problem.with_budget(budget * GB), policy, **limits)
            except InfeasibleBudget:
                found.append(_row(case, way, budget * GB, None, None) | {
                    "outcome": "OOM", "published_ratio": 1 + percent / 100 if policy == "monet" else None, "why": WHY_OOM,
                })  # fmt: skip
                continue
            timeline = simulate(problem.with_budget(budget * GB), schedule)
            row = _row(case, way, budget * GB, timeline.peak_bytes[problem.device_tier], timeline.seconds)
            row["ratio"] = timeline.seconds / seconds
            if policy == "monet":
                row |= {"published_ratio": 1 + percent / 100, "deviation": row["ratio"] - 1 - percent / 100, "why": WHY_TIME}
            found.append(row)
    return found


def _row(case: str, way: str, budget: int | None, peak: int | None, seconds: float | None) -> dict[str, Any]:
    return {"case": case, "way": way, "budget_bytes": budget, "peak_bytes": peak, "seconds": seconds,
            "predicted_seconds": seconds, "predicted_peak_bytes": peak}  # fmt: skip
