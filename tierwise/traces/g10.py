"""Step traces of the G10 artifact (MICRO 2023): kernels with their times and tensors, and what was reported for them.

One cold step: every global tensor is on the GPU when it begins. What the form leaves open is settled here, so that no other part has to know it:

- a tensor that is not global is born at the first kernel that touches it, even one that only reads it; a later write changes it in place;
- a tensor that is never read is scratch of the kernel that writes it;
- the GPU reaches the disk and the host each over its own lane in each direction: the disk at its own rate, the host at what the bus has left;
- the kernel that makes the loss is the first of backward; a kernel that applies a gradient is an update, wherever it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BadFile, InvalidGraph
from ..ir import Costs, Graph, Link, Machine, Op, Phase, Problem, Processor, Role, Storage, Tier, check_graph
from . import read_json

DISK_BYTES = 1 << 50  # the form gives the disk a rate and no size: a pebibyte holds any step
TIER_OF = {"gpu": "hbm", "host": "dram", "ssd": "nvme"}
MILLISECOND, MICROSECOND = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Move:
    """What the artifact planned: before kernel `op` starts, send `storage` to `tier`."""

    op: int
    storage: int
    tier: str


@dataclass(frozen=True, slots=True)
class G10Trace:
    name: str
    source: str
    problem: Problem
    published: Mapping[str, float | None]  # seconds of a step by system; None: it could not run
    published_sensitivity: Mapping[str, Any]  # the artifact's sweeps, as they stand in the file
    published_traffic_bytes: Mapping[str, Mapping[str, int]]
    loss_op: int
    visit: tuple[tuple[int, ...], ...]  # the order in which the artifact walks each kernel's tensors
    plans: Mapping[str, tuple[Move, ...]] = field(default_factory=dict)  # by system, in the order of issue
    planning_line_bytes: Mapping[str, int] = field(default_factory=dict)  # by system: what its planner kept below
    page_bytes: int = 1
    alloc_seconds_per_byte: float = 0.0  # how long before its birth the planner counts a tensor
    disk_latency_seconds: float = 0.0  # the planner's allowance for a transfer; its executor has none
    host_latency_seconds: float = 0.0

    def on(self, *, bus_bytes_per_second: float | None = None, disk_bytes_per_second: float | None = None, host_bytes: int | None = None) -> Problem:
        """The same step with another bus, disk or host memory, as in the sensitivity sweeps."""
        machine = self.problem.machine
        write, read = _rate(machine, "hbm", "nvme"), _rate(machine, "nvme", "hbm")
        bus = bus_bytes_per_second or write + _rate(machine, "hbm", "dram")
        write, read = disk_bytes_per_second or write, disk_bytes_per_second or read
        host = machine.capacity("dram") if host_bytes is None else host_bytes
        return replace(self.problem, machine=_machine(machine.name, self.problem.budget_bytes, host, bus, write, read, machine.source))

    def without_updates(self) -> Problem:
        """The same step with globals that are only read: the artifact lets a kernel overwrite what is still being copied, and so can this."""
        graph = self.problem.graph
        lasting = {storage.id for storage in graph.storages if storage.lasting}
        ops = tuple(
            replace(
                op,
                reads=op.reads + tuple(s for s in op.writes + op.mutates if s in lasting),
                writes=tuple(s for s in op.writes if s not in lasting),
                mutates=tuple(s for s in op.mutates if s not in lasting),
            )
            for op in graph.ops
        )
        return replace(self.problem, graph=replace(graph, ops=ops))


def load(path: str | Path) -> G10Trace:
    """Read a trace, or raise BadFile with what is wrong with it."""
    document = read_json(path)
    if missing := sorted({"tensors", "kernels", "loss_kernel", "machine", "published"} - document.keys()):
        raise BadFile(f"{path} is not a G10 trace: it has no {' nor '.join(map(repr, missing))}")
    try:
        return _trace(document, Path(path).name.removesuffix(".gz").removesuffix(".json"))
    except KeyError as error:
        raise BadFile(f"{path}: {error} is missing; the file may be cut short or of another form") from None
    except (TypeError, ValueError, AttributeError, InvalidGraph) as error:
        raise BadFile(f"{path}: {error}; the file may be cut short or of another form") from None


class _Places(dict[int, int]):
    """Tensor id -> storage id."""

    def __missing__(self, tensor: object) -> int:
        raise ValueError(f"a kernel or plan names tensor {tensor!r}, and there is none")


def _trace(document: Mapping[str, Any], name: str) -> G10Trace:
    place = _Places((tensor["id"], at) for at, tensor in enumerate(document["tensors"]))
    if len(place) != len(document["tensors"]):
        raise ValueError("two tensors have the same id")
    kernels = document["kernels"]
    loss = _count(document["loss_kernel"], "loss_kernel")
    if loss >= len(kernels):
        raise ValueError(f"loss_kernel is {loss} and there are {len(kernels)} kernels")
    graph = Graph(tuple(_ops(kernels, place, document["tensors"], loss)), tuple(_storage(at, t) for at, t in enumerate(document["tensors"])))
    check_graph(graph)
    numbers = document["machine"]
    machine = _machine(
        "g10 artifact",
        _count(numbers["gpu_bytes"], "gpu_bytes"),
        _count(numbers["host_bytes"], "host_bytes"),
        _positive(numbers["pcie_bytes_per_second"], "pcie_bytes_per_second"),
        _positive(numbers["ssd_write_bytes_per_second"], "ssd_write_bytes_per_second"),
        _positive(numbers["ssd_read_bytes_per_second"], "ssd_read_bytes_per_second"),
        str(document.get("source", "")),
    )
    costs = Costs({(at, "gpu"): _positive(kernel["time_ms"], "time_ms", or_zero=True) * MILLISECOND for at, kernel in enumerate(kernels)})
    system_latency = float(numbers.get("system_latency_us", 0.0)) * MICROSECOND
    return G10Trace(
        name=name,
        source=str(document.get("source", "")),
        problem=Problem(graph, machine, costs, cyclic=False),
        published={key.removesuffix("_s"): None if s is None else float(s) for key, s in document["published"].items()},
        published_sensitivity=dict(document.get("published_sensitivity", {})),
        published_traffic_bytes=dict(document.get("published_traffic_bytes", {})),
        loss_op=loss,
        visit=tuple(_visit(kernel, place) for kernel in kernels),
        plans={
            system: tuple(Move(_count(at, "kernel"), place[tensor], TIER_OF[to]) for at, tensor, to in moves)
            for system, moves in document.get("plans", {}).items()
        },
        planning_line_bytes={system: _count(line, "planning line") for system, line in document.get("planning_line_bytes", {}).items()},
        page_bytes=_count(numbers.get("page_bytes", 1), "page_bytes"),
        alloc_seconds_per_byte=float(numbers.get("alloc_us_per_byte", 0.0)) * MICROSECOND,
        disk_latency_seconds=system_latency + float(numbers.get("ssd_latency_us", 0.0)) * MICROSECOND,
        host_latency_seconds=system_latency,
    )


def _visit(kernel: Mapping[str, Any], place: Mapping[int, int]) -> tuple[int, ...]:
    touched = {*kernel["inputs"], *kernel["outputs"]}
    visit = kernel.get("visit", sorted(touched))
    if set(visit) != touched:
        raise ValueError(f"the visit of kernel {kernel.get('id')} is {visit}, and it touches {sorted(touched)}")
    return tuple(place[tensor] for tensor in visit)


def _storage(at: int, tensor: Mapping[str, Any]) -> Storage:
    kind, lasting = str(tensor.get("kind", "")), tensor["is_global"]
    if not isinstance(lasting, bool):
        raise TypeError(f"is_global of tensor {tensor['id']} is {lasting!r}, not true or false")
    if lasting:
        role = Role.BUFFER if "running" in kind else Role.PARAM
    else:
        role = Role.GRAD if kind.startswith("grad_") and kind != "grad_activation" else Role.ACTIVATION
    return Storage(at, f"{kind or 'tensor'}.{tensor['id']}", _count(tensor["bytes"], "bytes"), role, lasting)


def _ops(kernels: list[Mapping[str, Any]], place: Mapping[int, int], tensors: list[Mapping[str, Any]], loss: int) -> list[Op]:
    born: set[int] = set()
    found = []
    for at, kernel in enumerate(kernels):
        inputs, outputs = ([place[tensor] for tensor in dict.fromkeys(kernel[side])] for side in ("inputs", "outputs"))
        reads, writes, mutates = [], [], []
        for storage in dict.fromkeys(inputs + outputs):
            if not tensors[storage]["is_global"] and storage not in born:
                born.add(storage)
                writes.append(storage)
            elif storage not in outputs:
                reads.append(storage)
            elif storage in inputs or not tensors[storage]["is_global"]:
                mutates.append(storage)
            else:
                writes.append(storage)
        kind = str(kernel["type"])
        phase = Phase.FORWARD if at < loss else Phase.UPDATE if "Apply_Grad" in kind else Phase.BACKWARD
        found.append(
            Op(
                at,
                f"{kind}.{kernel.get('node', at)}",
                phase,
                tuple(reads),
                tuple(writes),
                kind=_layer(kind, phase),
                mutates=tuple(mutates),
                workspace_bytes=_count(kernel.get("workspace_bytes", 0), "workspace_bytes"),
            )
        )
    return found


def _layer(kind: str, phase: Phase) -> str:
    """'Conv2d_Backward_Weight' -> 'conv2d_backward', the words that rules by layer type look for."""
    layer = kind.split("_")[0].lower()
    return "update" if phase is Phase.UPDATE else f"{layer}_backward" if "Backward" in kind else layer


def _machine(name: str, gpu_bytes: int, host_bytes: int, bus: float, disk_write: float, disk_read: float, source: str) -> Machine:
    links = [Link("hbm", "nvme", {"disk write": disk_write}), Link("nvme", "hbm", {"disk read": disk_read})]
    if bus > disk_write and bus > disk_read:  # otherwise the disk fills the bus and nothing reaches the host
        links += [Link("hbm", "dram", {"host write": bus - disk_write}), Link("dram", "hbm", {"host read": bus - disk_read})]
    tiers = (Tier("hbm", gpu_bytes), Tier("dram", host_bytes), Tier("nvme", DISK_BYTES))
    return Machine(name, tiers, tuple(links), (Processor("gpu", "hbm"),), source)


def _rate(machine: Machine, src: str, dst: str) -> float:
    link = machine.link_between.get((src, dst))
    return link.bytes_per_second if link else 0.0


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} is {value!r}, not a whole number of at least 0")
    return value


def _positive(value: object, what: str, *, or_zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{what} is {value!r}, not a number larger than 0")
    return float(value)
