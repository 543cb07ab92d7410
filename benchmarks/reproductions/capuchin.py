"""Capuchin's largest batches (ASPLOS 2020): what fits into a P100 of 16 GB with everything kept, and what with Capuchin.

Their numbers are of TensorFlow, as remembered; they agree with the ratios the paper states (9.27 times at most, 5.49 on average). Ours are the
largest batches for which the planner has a plan, on captured steps whose bytes are affine in the batch, in fp32 with momentum SGD.
"""

from __future__ import annotations

from typing import Any

from tierwise import pipeline, policies
from tierwise.errors import InfeasibleBudget, OverCapacity
from tierwise.estimation import BatchScale
from tierwise.ir import Problem, check_schedule
from tierwise.simulate import simulate

# model, (options of the capture, published with everything kept, published with Capuchin)
PUBLISHED: tuple[tuple[str, dict[str, Any], int, int], ...] = (
    ("vgg-16", {}, 228, 350),
    ("resnet-50", {}, 190, 1014),
    ("resnet-152", {}, 86, 798),
    ("inception-v4", {}, 88, 468),
    ("bert-base", {"seq": 128, "dtype": "fp32"}, 64, 450),
    ("bert-base", {"seq": 384, "dtype": "fp32"}, 64, 450),
)
MACHINE = "p100-16"
WHY = {
    "keep_all": "TensorFlow's allocator and workspaces take memory too; which optimizer it ran and how long BERT's inputs were is not known here",
    "capuchin": "ours is limited by the inputs, outputs and gradients of the largest op and sends everything else away, however slow that is, "
    "where theirs had workspaces and fragments beside it and tensors its hooks do not see",
}


def rows() -> list[dict[str, Any]]:
    return [row for name, options, kept, capuchin in PUBLISHED for row in _rows(name, options, kept, capuchin)]


def _rows(name: str, options: dict[str, Any], kept: int, capuchin: int) -> list[dict[str, Any]]:
    batch = 8
    one, two = (pipeline.capture_model(name, batch=b, optimizer="sgd", **options).graph for b in (batch, 2 * batch))
    sizes = BatchScale(one, two, batch)

    def at(size: int) -> Problem:
        return pipeline.make_problem(sizes.graph(size), MACHINE)

    case = ", ".join([name, *([f"length {options['seq']}"] if "seq" in options else []), "P100 16 GB"])
    found = []
    for policy, published in (("keep_all", kept), ("capuchin", capuchin)):
        largest = _largest(at, policy, published)
        problem = at(largest)
        timeline = simulate(problem, policies.plan(problem, policy))
        peak = timeline.peak_bytes[problem.device_tier]
        found.append({
            "case": case, "way": policy, "budget_bytes": problem.budget_bytes, "peak_bytes": peak, "seconds": timeline.seconds,
            "ratio": timeline.seconds / problem.op_starts[-1], "predicted_seconds": timeline.seconds, "predicted_peak_bytes": peak,
            "largest_batch": largest, "published_batch": published, "deviation": largest / published - 1, "why": WHY[policy],
        })  # fmt: skip
    gained, theirs = found[1]["largest_batch"] / found[0]["largest_batch"], capuchin / kept
    found[1] |= {"times_larger": gained, "published_times_larger": theirs}
    return found


def _largest(at, policy: str, start: int) -> int:  # type: ignore[no-untyped-def]
    """The largest batch the policy has a plan for, between powers of two of what was published."""
    low, high = 0, start
    while _fits(at(high), policy):
        low, high = high, 2 * high
    while not low:
        high, low = high if high > 1 else 2, high // 2
        if low and not _fits(at(low), policy):
            high, low = low, 0
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(at(middle), policy) else (low, middle)
    return low


def _fits(problem: Problem, policy: str) -> bool:
    try:
        check_schedule(problem, policies.load(policy).plan(problem))
    except (InfeasibleBudget, OverCapacity):
        return False
    return True
