"""Small problems worked by hand: every number in them is small enough to check on paper.

Sizes are bytes and times are seconds with no scale: a link of 10 moves ten bytes in a second.
"""

from __future__ import annotations

from tierwise.ir import Costs, Graph, Link, Machine, Op, Phase, Problem, Processor, Role, Storage, Tier

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def machine(hbm: int = 10_000, dram: int = 100_000, nvme: int = 1_000_000, *, rate: float = 10.0, disk_rate: float = 2.0) -> Machine:
    """A gpu in hbm and a cpu in dram; links of `rate` bytes a second each way, and a disk behind the same two lanes."""
    return Machine(
        name="toy",
        tiers=(Tier("hbm", hbm), Tier("dram", dram), Tier("nvme", nvme)),
        links=(
            Link("hbm", "dram", {"out": rate}),
            Link("dram", "hbm", {"in": rate}),
            Link("hbm", "nvme", {"out": rate, "disk write": disk_rate}),
            Link("nvme", "hbm", {"in": rate, "disk read": disk_rate}),
            Link("dram", "nvme", {"disk write": disk_rate}),
            Link("nvme", "dram", {"disk read": disk_rate}),
        ),
        processors=(Processor("gpu", "hbm"), Processor("cpu", "dram")),
        source="made up",
    )


class GraphBuilder:
    """Names in, ids out."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.seconds: dict[tuple[int, str], float] = {}

    def storage(self, name: str, nbytes: int, role: Role, *, lasting: bool | None = None) -> int:
        if lasting is None:
            lasting = role in (Role.PARAM, Role.BUFFER, Role.OPTIMIZER_STATE)
        self.storages.append(Storage(len(self.storages), name, nbytes, role, lasting))
        return len(self.storages) - 1

    def op(self, name: str, phase: Phase, reads, writes, *, seconds: float = 1.0, cpu_seconds: float | None = None, **more) -> int:
        self.ops.append(Op(len(self.ops), name, phase, tuple(reads), tuple(writes), **more))
        self.seconds[len(self.ops) - 1, "gpu"] = seconds
        if cpu_seconds is not None:
            self.seconds[len(self.ops) - 1, "cpu"] = cpu_seconds
        return len(self.ops) - 1

    def problem(self, on: Machine | None = None, *, cyclic: bool = True) -> Problem:
        return Problem(Graph(tuple(self.ops), tuple(self.storages)), on or machine(), Costs(self.seconds), cyclic)


def chain(
    length: int = 4,
    *,
    activation_bytes: int = 10,
    weight_bytes: int = 0,
    state_bytes: int = 0,
    seconds: float = 1.0,
    cpu_update_seconds: float | None = None,
    kinds: tuple[str, ...] = ("conv2d",),
    on: Machine | None = None,
    cyclic: bool = True,
) -> Problem:
    """batch -> fwd0 -> a0 -> fwd1 -> a1 ... and back: bwd_i reads the gradient of a_i, fwd_i's input and its weight.

    The last activation goes to a loss op that makes its gradient. With weights, each has a gradient and an update.
    """
    b = GraphBuilder()
    batch = b.storage("batch", activation_bytes, Role.INPUT)
    weights = [b.storage(f"w{i}", weight_bytes, Role.PARAM) for i in range(length)] if weight_bytes else []
    states = [b.storage(f"s{i}", state_bytes, Role.OPTIMIZER_STATE) for i in range(length)] if state_bytes else []
    acts = [batch]
    for i in range(length):
        acts.append(b.storage(f"a{i}", activation_bytes, Role.ACTIVATION))
        b.op(f"fwd{i}", FORWARD, [acts[i], *weights[i : i + 1]], [acts[-1]], kind=kinds[i % len(kinds)], seconds=seconds)
    grad = b.storage(f"d{length - 1}", activation_bytes, Role.ACTIVATION)
    b.op("loss", BACKWARD, [acts[-1]], [grad], kind="loss", seconds=seconds)
    weight_grads = {}
    for i in reversed(range(length)):
        writes = []
        if i > 0:
            writes.append(b.storage(f"d{i - 1}", activation_bytes, Role.ACTIVATION))
        if weights:
            weight_grads[i] = b.storage(f"g{i}", weight_bytes, Role.GRAD)
            writes.append(weight_grads[i])
        b.op(f"bwd{i}", BACKWARD, [grad, acts[i], *weights[i : i + 1]], writes, kind=kinds[i % len(kinds)] + "_backward", seconds=seconds)
        grad = writes[0] if writes else grad
    for i in range(length if weights else 0):
        mutated = [weights[i], *states[i : i + 1]]
        b.op(f"step{i}", UPDATE, [weight_grads[i]], [], mutates=tuple(mutated), kind="update", seconds=seconds, cpu_seconds=cpu_update_seconds)
    return b.problem(on, cyclic=cyclic)
