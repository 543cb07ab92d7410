"""A chain of equal blocks, small enough to count by hand.

Block i:  h_i (30 bytes) = matmul(x_i, w_i);  x_{i+1} (10 bytes) = relu(h_i);  its backward reads h_i, x_i, w_i and the gradient of x_{i+1}.
Weights have 5 bytes, inputs and gradients of activations 10. Every op takes 1 second; a choice that recomputes h takes 1 more in backward.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import problems

from tierwise.ir import (
    ON_DEVICE,
    Choice,
    Costs,
    Graph,
    Link,
    Machine,
    Menu,
    Op,
    Phase,
    Placement,
    Problem,
    Processor,
    Region,
    RegionCall,
    Role,
    SavedValue,
    Storage,
    Tier,
    peak_bytes,
)  # fmt: skip
from tierwise.lower import Image, image, keep_everything, with_budget
from tierwise.lower.choose import recompute_everything
from tierwise.regions import JointGraph, JointValue, Kind

KEEP = Choice("keep", (SavedValue("h", 30),), True, False, 2.0, 1.0, 0, 0)
IN_HOST, ON_DISK = Placement("host", "cpu", "host", "host"), Placement("nvme", "cpu", "host", "host")
CPU, THROUGH = Placement("host", "cpu", "device", "host"), Placement("host", "streamed", "device", "device")
EVERYWHERE = (ON_DEVICE, IN_HOST, CPU, THROUGH, replace(THROUGH, parameters="host"))
ALL_ON_DISK = Placement("nvme", "cpu", "nvme", "host")
CHECKPOINT = Choice("checkpoint", (), True, False, 2.0, 2.0, 0, 30)

JOINT = JointGraph(
    values=(
        JointValue("x", Kind.INPUT, nbytes=10, read_by_backward=True),
        JointValue("w", Kind.PARAMETER, nbytes=5, read_by_backward=True),
        JointValue("h", Kind.MATMUL, "mm", 30, 600, ("x", "w"), read_by_backward=True),
        JointValue("y", Kind.POINTWISE, "relu", 10, 0, ("h",), is_output=True),
    ),
    compiled=True,
    keep=("h",),
)


def chain(length: int) -> Graph:
    storages: list[Storage] = []
    ops: list[Op] = []

    def storage(name: str, nbytes: int, role: Role, lasting: bool = False) -> int:
        storages.append(Storage(len(storages), name, nbytes, role, lasting))
        return len(storages) - 1

    def op(
        name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...], kind: str, region: int = -1, mutates: tuple[int, ...] = ()
    ) -> None:
        ops.append(Op(len(ops), name, phase, reads, writes, kind=kind, region=region, mutates=mutates))

    weights = [storage(f"w{i}", 5, Role.PARAM, lasting=True) for i in range(length)]
    x = [storage("batch", 10, Role.INPUT)]
    h = []
    for i in range(length):
        h.append(storage(f"h{i}", 30, Role.ACTIVATION))
        x.append(storage(f"x{i + 1}", 10, Role.ACTIVATION))
        op(f"block{i}.mm", Phase.FORWARD, (x[i], weights[i]), (h[i],), "matmul", i)
        op(f"block{i}.relu", Phase.FORWARD, (h[i],), (x[i + 1],), "pointwise", i)
    gradient = storage("g", 10, Role.ACTIVATION)
    op("loss", Phase.BACKWARD, (x[length],), (gradient,), "pointwise")
    grads = []
    for i in reversed(range(length)):
        before, grad = storage(f"g{i}", 10, Role.ACTIVATION), storage(f"w{i}.grad", 5, Role.GRAD)
        op(f"block{i}.backward", Phase.BACKWARD, (gradient, h[i], x[i], weights[i]), (before, grad), "matmul", i)
        gradient = before
        grads.append((weights[i], grad))
    for weight, grad in grads:
        op(f"w{weight}.update", Phase.UPDATE, (grad,), (), "update", mutates=(weight,))
    calls = tuple(RegionCall(i, 0, f"block{i}") for i in range(length))
    return Graph(tuple(ops), tuple(storages), (Region(0, "Block", "block0"),), calls)


def machine(budget: int, *, bytes_per_second: float = 30.0) -> Machine:
    links = (Link("hbm", "dram", {"out": bytes_per_second}), Link("dram", "hbm", {"in": bytes_per_second}))
    return Machine("toy", (Tier("hbm", budget), Tier("dram", 1000)), links, (Processor("gpu", "hbm"),))


def menu(length: int, budget: int, *, bytes_per_second: float = 30.0) -> Menu:
    graph = chain(length)
    costs = Costs({(op.id, "gpu"): 0.0 if op.phase is Phase.UPDATE else 1.0 for op in graph.ops})
    return Menu(Problem(graph, machine(budget, bytes_per_second=bytes_per_second), costs), {0: (KEEP, CHECKPOINT)})


def menu_with_moments(length: int, *, hbm: int = 10_000, dram: int = 100_000, cpu_seconds: float = 1.0) -> Menu:
    """With 20 bytes of moments for each weight, which may live elsewhere; on the machine of problems.py, which has a cpu and a disk."""
    graph = chain(length)
    storages = [replace(s, name=f"block{s.name[1:]}.weight") if s.lasting else s for s in graph.storages]
    ops = list(graph.ops)
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            storages.append(Storage(len(storages), f"{storages[op.mutates[0]].name}.moments", 20, Role.OPTIMIZER_STATE, lasting=True))
            ops[op.id] = replace(op, mutates=(*op.mutates, storages[-1].id))
    seconds = {(op.id, "gpu"): 1.0 for op in ops} | {(op.id, "cpu"): cpu_seconds for op in ops if op.phase is Phase.UPDATE}
    problem = Problem(replace(graph, ops=tuple(ops), storages=tuple(storages)), problems.machine(hbm, dram), Costs(seconds))
    homes = {f"block{n}": (ON_DEVICE, IN_HOST, ON_DISK, ALL_ON_DISK) for n in range(length)}
    return Menu(problem, {0: (KEEP, CHECKPOINT)}, homes)


def with_compute_share(question: Menu, share: float) -> Menu:
    """Copies between device and host memory take that share of their time from compute."""
    machine = question.problem.machine
    links = tuple(replace(link, compute_share=share * ({link.src, link.dst} == {"hbm", "dram"})) for link in machine.links)
    return replace(question, problem=replace(question.problem, machine=replace(machine, links=links)))


def anything_anywhere(rng: Random, update: str) -> tuple[Image, Menu]:
    """A step with some state in some places over some link, and its menu with the memory it takes."""
    question = menu_with_moments(rng.choice((3, 4, 6)), cpu_seconds=rng.choice((0.5, 1.0, 3.0, 6.0)))
    rate = rng.choice((2.0, 5.0, 20.0, 100.0))
    machine = question.problem.machine.with_rates(lambda link, lane, other: rate)
    question = replace(question, problem=replace(question.problem, machine=machine), homes=dict.fromkeys(question.homes, EVERYWHERE))
    question = with_compute_share(question, rng.choice((0.0, 0.25)))
    states = {path: place for path in question.homes if (place := rng.choice(EVERYWHERE)) != ON_DEVICE}
    calls = rng.choice((keep_everything, recompute_everything))(question)
    made = image(question, replace(calls, states=states, update=update, ahead=rng.choice((1, 2, 3))))
    return made, with_budget(question, peak_bytes(made.problem, made.schedule)["hbm"])
