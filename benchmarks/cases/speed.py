"""How long planning and simulating take on a step of ten thousand ops, and how long `tierwise policies` takes to answer."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

NEEDS = ""
COLUMNS = ["what", "ops", "steps", "seconds"]
LAYERS = 5000  # a chain of forward, loss and backward: 10,001 ops
POLICIES = ("vdnn", "chen", "dtr", "capuchin", "g10", "flashneuron")


def run() -> list[list[Any]]:
    from tierwise.ir import peak_bytes
    from tierwise.policies import keep_all, plan
    from tierwise.simulate import lower_bound_seconds, simulate

    problem = chain(LAYERS)
    everything = keep_all.plan(problem)
    ops = len(problem.graph.ops)
    rows: list[list[Any]] = [["simulate keep_all", ops, len(everything.steps), _median(lambda: simulate(problem, everything))]]
    half = problem.with_budget(peak_bytes(problem, everything)["hbm"] // 2)
    for name in POLICIES:
        start = time.perf_counter()
        schedule = plan(half, name)
        rows.append([f"plan and judge {name}, half the memory", ops, len(schedule.steps), time.perf_counter() - start])
    rows.append(["lower bound", ops, None, _median(lambda: lower_bound_seconds(half))])
    command = [sys.executable, "-m", "tierwise", "policies"]
    rows.append(["tierwise policies", None, None, _median(lambda: subprocess.run(command, check=True, capture_output=True))])
    return rows


def _median(work: Callable[[], Any], repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def chain(layers: int) -> Any:
    """Layers of equal size and time: the plainest step there is."""
    from tierwise.ir import Costs, Graph, Link, Machine, Op, Phase, Problem, Processor, Role, Storage, Tier

    storages = [Storage(0, "batch", 10, Role.INPUT)]
    ops: list[Op] = []

    def add(name: str, phase: Phase, kind: str, reads: list[int]) -> int:
        storages.append(Storage(len(storages), f"{name}.out", 10, Role.ACTIVATION))
        ops.append(Op(len(ops), name, phase, tuple(reads), (len(storages) - 1,), kind=kind))
        return len(storages) - 1

    activations = [0]
    for layer in range(layers):
        activations.append(add(f"forward {layer}", Phase.FORWARD, "conv2d", [activations[-1]]))
    grad = add("loss", Phase.BACKWARD, "loss", [activations[-1]])
    for layer in reversed(range(layers)):
        grad = add(f"backward {layer}", Phase.BACKWARD, "conv2d_backward", [grad, activations[layer]])
    machine = Machine(
        "toy",
        (Tier("hbm", 10**9), Tier("dram", 10**9), Tier("nvme", 10**9)),
        (
            Link("hbm", "dram", {"out": 10.0}),
            Link("dram", "hbm", {"in": 10.0}),
            Link("hbm", "nvme", {"out": 10.0, "disk write": 2.0}),
            Link("nvme", "hbm", {"in": 10.0, "disk read": 2.0}),
        ),
        (Processor("gpu", "hbm"),),
    )
    return Problem(Graph(tuple(ops), tuple(storages)), machine, Costs({(op.id, "gpu"): 1.0 for op in ops}))
