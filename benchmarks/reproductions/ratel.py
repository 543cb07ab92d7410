"""Ratel's throughput on one RTX 4090 (ICDE 2025): 13B and 175B parameters by batch, and 13B by the number of SSDs, in TFLOP/s.

The machine is the shipped card with their host: 768 GB of memory and twelve P5510, each at its data sheet's 6.5 GB/s read and 3.4 GB/s write.
Steps are GPT-3's shapes at 1024 tokens with fp32 masters, by roofline. How the authors count operations is not said with their table; ours are 8
for each parameter and token, as with full recomputation, so the growth with the batch and with the disks says more than the level. Logits of 50257
words at once take more than the card from batch 48 on; whatever they did about that, `body` is the model without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tierwise import machines, pipeline, policies
from tierwise.errors import InfeasibleBudget
from tierwise.estimation import BatchScale
from tierwise.ir import Machine
from tierwise.simulate import simulate

GB, TFLOP = 10**9, 1e12
TOKENS = 1024
HOST_BYTES, HOST_BYTES_PER_SECOND = 768 * GB, 240e9  # two Xeon 5320 with eight channels of DDR4-2933 each, at about two thirds of 375 GB/s
SSD_READ, SSD_WRITE, SSDS = 6.5e9, 3.4e9, 12
BY_BATCH: dict[str, dict[int, float | None]] = {
    "gpt_13b": {8: 42.8, 16: 84.3, 32: 143.1, 64: 155.8, 128: 153.8},
    "gpt_13b_body": {8: 42.8, 16: 84.3, 32: 143.1, 64: 155.8, 128: 153.8},
    "gpt_175b_body": {8: 52.6, 16: 86.9, 32: None},
}
OPTIONS = {"gpt_175b_body": {"parameters": "nvme"}}  # 350 GB of them and as many of gradients leave no room for activations in host memory
BY_DISKS = {
    32: {1: 37.5, 2: 64.3, 3: 81.1, 6: 121.7, 12: 142.0},
    48: {1: 53.1, 2: 89.7, 3: 121.7, 6: 146.3, 12: 153.9},
    64: {1: 70.3, 2: 111.7, 3: 136.3, 6: 151.5, 12: 148.2},
}
WHY = ("how operations are counted is not known, and the card is profiled at 132 TFLOP/s of bf16, below some of their numbers; "
       "of the disks the data sheet is taken, of the cpu's update its memory's speed")  # fmt: skip


def rows() -> list[dict[str, Any]]:
    found = []
    for model, cells in BY_BATCH.items():
        scale, parameters = _steps(model)
        found += [_row(scale, parameters, model, batch, SSDS, published) for batch, published in cells.items()]
        if model == "gpt_13b_body":
            found += [_row(scale, parameters, model, b, disks, published) for b, row in BY_DISKS.items() for disks, published in row.items()]
    return found


def _steps(model: str) -> tuple[BatchScale, int]:
    spec = f"benchmarks.reproductions._nets:{model}"
    one, two = (pipeline.capture_model(spec, batch=batch, seq=TOKENS, masters="fp32") for batch in (8, 16))
    return BatchScale(one.graph, two.graph, 8), one.parameters


def _row(scale: BatchScale, parameters: int, model: str, batch: int, disks: int, published: float | None) -> dict[str, Any]:
    machine = _machine(disks)
    problem = pipeline.make_problem(scale.graph(batch), machine)
    name = model.replace("gpt_", "GPT ").replace("_body", ", body").replace("b", "B", 1)
    row: dict[str, Any] = {
        "case": f"{name}, RTX 4090, {disks} SSD{'s' * (disks > 1)}", "way": f"ratel, batch {batch}", "budget_bytes": problem.budget_bytes,
        "published_tflops": published,
    }  # fmt: skip
    try:
        schedule = policies.plan(problem, "ratel", **OPTIONS.get(model, {}))
    except InfeasibleBudget as error:
        return row | {"outcome": "OOM", "least_bytes": error.least_bytes, "why": "" if published is None else WHY}
    timeline = simulate(problem, schedule)
    tflops = 8 * parameters * batch * TOKENS / timeline.seconds / TFLOP
    peak = timeline.peak_bytes[problem.device_tier]
    return row | {
        "peak_bytes": peak, "seconds": timeline.seconds, "predicted_seconds": timeline.seconds, "predicted_peak_bytes": peak, "tflops": tflops,
        "deviation": tflops / published - 1 if published else None, "why": WHY,
    }  # fmt: skip


def _machine(disks: int) -> Machine:
    card = machines.load("rtx4090")
    rates = {"disk read": SSD_READ * disks, "disk write": SSD_WRITE * disks}
    links = tuple(replace(link, lanes={lane: rates.get(lane, rate) for lane, rate in link.lanes.items()}) for link in card.links)
    cpu = tuple(replace(p, bytes_per_second=HOST_BYTES_PER_SECOND) if p.name == "cpu" else p for p in card.processors)
    return replace(card, name=f"rtx4090 with {disks} SSDs", links=links, processors=cpu, tiers=tuple(_tiers(card, disks)))


def _tiers(card: Machine, disks: int) -> Iterator[Any]:
    sizes = {"dram": HOST_BYTES, "nvme": disks * 3840 * GB}
    return (replace(tier, capacity_bytes=sizes.get(tier.name, tier.capacity_bytes)) for tier in card.tiers)
