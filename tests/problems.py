"""Small problems worked by hand: every number in them is small enough to check on paper.

Sizes are bytes and times are seconds with no scale: a link of 10 moves ten bytes in a second.
"""

from __future__ import annotations

from dataclasses import replace

from tierwise.ir import Codec, Costs, Graph, Link, Machine, Op, Phase, Problem, Processor, Role, Storage, Tier, Variant

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


def with_codecs(problem: Problem, *, rate: float = 20.0) -> Problem:
    """`half` gives back every bit of half the bytes, `tenth` rounds to a tenth; the gpu codes `rate` bytes a second, the cpu half of that."""
    sizes = {s.id: s.nbytes for s in problem.graph.storages if s.role in (Role.ACTIVATION, Role.INPUT)}
    rates = {"gpu": rate, "cpu": rate / 2}
    codecs = (
        Codec("half", {s: -(-size // 2) for s, size in sizes.items()}, rates, rates),
        Codec("tenth", {s: -(-size // 10) for s, size in sizes.items()}, rates, rates, lossy=True),
    )
    return replace(problem, costs=replace(problem.costs, codecs=codecs))


def with_engines(on: Machine) -> Machine:
    """The links between device and host encode and decode `half` on the way, 15 plain bytes a second."""
    links = tuple(replace(link, codecs={"half": 15.0}) if {link.src, link.dst} == {"hbm", "dram"} else link for link in on.links)
    return replace(on, links=links)


def with_sign_bits(problem: Problem) -> Problem:
    """Each relu's backward can do with the signs of what it reads: an eighth of the bytes, in half the time. Signs do not become numbers again."""
    graph, sizes, variants = problem.graph, {}, []
    for op in graph.ops:
        if op.kind == "relu_backward":
            saved = [s for s in op.reads if any(graph.ops[w].kind == "relu" for w in graph.writers[s])]
            sizes |= {s: -(-graph.storages[s].nbytes // 8) for s in saved}
            variants.append(Variant(op.id, "signs", {"gpu": problem.seconds(op.id, "gpu") / 2}, forms=dict.fromkeys(saved, "sign")))
    codecs = (*problem.costs.codecs, Codec("sign", sizes, {"gpu": 20.0}))
    return replace(problem, costs=replace(problem.costs, codecs=codecs, variants=(*problem.costs.variants, *variants)))


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


def skip(*, on: Machine | None = None, cyclic: bool = True) -> Problem:
    """A residual block: f0 -> a, f1(a) -> b, f2(a, b) -> c, and back. `a` has three forward uses and two backward ones."""
    b = GraphBuilder()
    x, w = b.storage("x", 10, Role.INPUT), b.storage("w", 4, Role.PARAM)
    a, mid, c = (b.storage(name, 10, Role.ACTIVATION) for name in ("a", "b", "c"))
    b.op("f0", FORWARD, [x, w], [a], kind="conv2d")
    b.op("f1", FORWARD, [a], [mid], kind="relu", seconds=0.5)
    b.op("f2", FORWARD, [a, mid], [c], kind="conv2d", seconds=2)
    dc, db, da1, da, g = (b.storage(name, 10, Role.ACTIVATION) for name in ("dc", "db", "da1", "da", "gx"))
    gw = b.storage("gw", 4, Role.GRAD)
    b.op("loss", BACKWARD, [c], [dc], kind="loss")
    b.op("b2", BACKWARD, [dc, a, mid], [da1, db], kind="conv2d_backward", seconds=3)
    b.op("b1", BACKWARD, [db, mid], [g], kind="relu_backward")
    b.op("add", BACKWARD, [da1, g], [da], kind="add")
    b.op("b0", BACKWARD, [da, x], [gw], kind="conv2d_backward", seconds=2)
    b.op("step", UPDATE, [gw], [], mutates=(w,), kind="update", cpu_seconds=2)
    return b.problem(on, cyclic=cyclic)


def shared_weight(*, on: Machine | None = None) -> Problem:
    """One weight used by two layers; its two gradients are added up."""
    b = GraphBuilder()
    x, w, s = b.storage("x", 8, Role.INPUT), b.storage("w", 6, Role.PARAM), b.storage("s", 12, Role.OPTIMIZER_STATE)
    a0, a1 = b.storage("a0", 8, Role.ACTIVATION), b.storage("a1", 8, Role.ACTIVATION)
    b.op("f0", FORWARD, [x, w], [a0], kind="matmul")
    b.op("f1", FORWARD, [a0, w], [a1], kind="matmul")
    d1, d0 = b.storage("d1", 8, Role.ACTIVATION), b.storage("d0", 8, Role.ACTIVATION)
    g1, g = b.storage("g1", 6, Role.GRAD), b.storage("g", 6, Role.GRAD)
    b.op("loss", BACKWARD, [a1], [d1], kind="loss")
    b.op("b1", BACKWARD, [d1, a0, w], [d0, g1], kind="matmul_backward")
    b.op("b0", BACKWARD, [d0, x], [g], kind="matmul_backward")
    b.op("add", BACKWARD, [g1], [], mutates=(g,), kind="add")
    b.op("step", UPDATE, [g], [], mutates=(w, s), kind="update", cpu_seconds=3)
    return b.problem(on)


def one_op(*, on: Machine | None = None) -> Problem:
    b = GraphBuilder()
    x, y = b.storage("x", 5, Role.INPUT), b.storage("y", 5, Role.ACTIVATION)
    b.op("only", FORWARD, [x], [y])
    return b.problem(on)


def one_large_storage(*, on: Machine | None = None) -> Problem:
    """One activation is larger than everything else together: no budget below it can do."""
    b = GraphBuilder()
    x, small, large, d, g = (b.storage(n, z, r) for n, z, r in (("x", 5, Role.INPUT), ("small", 5, Role.ACTIVATION), ("large", 500, Role.ACTIVATION),
                                                               ("d", 5, Role.ACTIVATION), ("g", 5, Role.ACTIVATION)))  # fmt: skip
    b.op("f0", FORWARD, [x], [small], kind="conv2d")
    b.op("f1", FORWARD, [small], [large], kind="conv2d", workspace_bytes=20)
    b.op("loss", BACKWARD, [large], [d], kind="loss")
    b.op("b1", BACKWARD, [d, small, large], [g], kind="conv2d_backward")
    return b.problem(on)


def zero_activations(*, on: Machine | None = None) -> Problem:
    """Only a weight and its update: nothing waits for backward."""
    b = GraphBuilder()
    w, s, g = b.storage("w", 10, Role.PARAM), b.storage("s", 20, Role.OPTIMIZER_STATE), b.storage("g", 10, Role.GRAD)
    b.op("grad", BACKWARD, [w], [g])
    b.op("step", UPDATE, [g], [], mutates=(w, s), kind="update", cpu_seconds=2)
    return b.problem(on)


def masters(*, on: Machine | None = None) -> Problem:
    """fp32 masters: the update reads the gradient, changes master and state, and overwrites the parameter without reading it."""
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    acts, layers = [x], []
    for i in range(3):
        w = b.storage(f"w{i}", 4, Role.PARAM)
        layers.append((w, b.storage(f"m{i}", 8, Role.OPTIMIZER_STATE), b.storage(f"s{i}", 16, Role.OPTIMIZER_STATE)))
        acts.append(b.storage(f"a{i}", 10, Role.ACTIVATION))
        b.op(f"fwd{i}", FORWARD, [acts[i], w], [acts[-1]], kind="matmul")
    d = b.storage("d2", 10, Role.ACTIVATION)
    b.op("loss", BACKWARD, [acts[-1]], [d], kind="loss")
    grads = {}
    for i in (2, 1, 0):
        grads[i] = b.storage(f"g{i}", 4, Role.GRAD)
        writes = [grads[i]]
        if i:
            writes.append(b.storage(f"d{i - 1}", 10, Role.ACTIVATION))
        b.op(f"bwd{i}", BACKWARD, [d, acts[i], layers[i][0]], writes, kind="matmul_backward")
        d = writes[-1]
    for i, (w, m, s) in enumerate(layers):
        b.op(f"step{i}", UPDATE, [grads[i]], [w], mutates=(m, s), kind="update", cpu_seconds=1.5)
    return b.problem(on)


def awkward(*, on: Machine | None = None) -> Problem:
    """An in-place op, an op with two outputs, one that cannot be replayed, and a buffer that forward changes."""
    b = GraphBuilder()
    x, stats = b.storage("x", 10, Role.INPUT), b.storage("stats", 2, Role.BUFFER)
    a, r, mean, drop, mask, c = (
        b.storage(n, z, Role.ACTIVATION) for n, z in (("a", 10), ("r", 10), ("mean", 2), ("drop", 10), ("mask", 3), ("c", 10))
    )
    b.op("conv", FORWARD, [x], [a], kind="conv2d")
    b.op("relu_", FORWARD, [a], [r], kind="relu", in_place=((a, r),))
    b.op("norm", FORWARD, [r], [mean], mutates=(stats,), kind="batch_norm")
    b.op("dropout", FORWARD, [r], [drop, mask], kind="dropout", replayable=False)
    b.op("out", FORWARD, [drop], [c], kind="conv2d")
    dc, dd, dr, dx = (b.storage(n, 10, Role.ACTIVATION) for n in ("dc", "dd", "dr", "dx"))
    b.op("loss", BACKWARD, [c], [dc], kind="loss")
    b.op("out'", BACKWARD, [dc, drop], [dd], kind="conv2d_backward")
    b.op("dropout'", BACKWARD, [dd, mask], [dr], kind="dropout_backward")
    b.op("conv'", BACKWARD, [dr, r, mean, x], [dx], kind="conv2d_backward")
    return b.problem(on)


def relu_net(*, on: Machine | None = None, cyclic: bool = True) -> Problem:
    """conv, relu, pool, conv, relu, conv: the first relu feeds a pool and the second a conv. With codecs of the papers' names, sized by hand.

    A value has 4 bytes, an index of a maximum 8. Half of r0 and r1 are zeros: r0, 16 values, is a mask of 2 bytes and 8 values as zvc, 34 bytes.
    """
    b = GraphBuilder()
    x = b.storage("x", 16, Role.INPUT)
    names = (("c0", 64), ("r0", 64), ("p0", 16), ("i0", 32), ("c1", 32), ("r1", 32), ("c2", 16))
    c0, r0, p0, i0, c1, r1, c2 = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in names)
    w = b.storage("w", 4, Role.PARAM)
    b.op("conv0", FORWARD, [x, w], [c0], kind="conv2d", seconds=2)
    b.op("relu0", FORWARD, [c0], [r0], kind="relu", in_place=((c0, r0),))
    b.op("pool0", FORWARD, [r0], [p0, i0], kind="max_pool2d")
    b.op("conv1", FORWARD, [p0], [c1], kind="conv2d", seconds=2)
    b.op("relu1", FORWARD, [c1], [r1], kind="relu")
    b.op("conv2", FORWARD, [r1], [c2], kind="conv2d", seconds=2)
    gradients = (("dc2", 16), ("dr1", 32), ("dc1", 32), ("dp0", 16), ("dr0", 64), ("dc0", 64))
    dc2, dr1, dc1, dp0, dr0, dc0 = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in gradients)
    b.op("loss", BACKWARD, [c2], [dc2], kind="loss")
    b.op("conv2'", BACKWARD, [dc2, r1], [dr1], kind="conv2d_backward", seconds=3)
    b.op("relu1'", BACKWARD, [dr1, r1], [dc1], kind="relu_backward")
    b.op("conv1'", BACKWARD, [dc1, p0], [dp0], kind="conv2d_backward", seconds=3)
    b.op("pool0'", BACKWARD, [dp0, r0, i0], [dr0], kind="max_pool2d_backward")
    b.op("relu0'", BACKWARD, [dr0, r0], [dc0], kind="relu_backward")
    b.op("conv0'", BACKWARD, [dc0, x], [g := b.storage("g", 4, Role.GRAD)], kind="conv2d_backward", seconds=3)
    b.op("step", UPDATE, [g], [], mutates=(w,), kind="update")
    rates = {"gpu": 64.0, "cpu": 16.0}
    codecs = (
        Codec("zvc", {r0: 34, r1: 17}, rates, rates),
        Codec("csr", {r0: 44, r1: 24}, rates, rates),
        Codec("bit1", {r0: 2, r1: 1}, {"gpu": 64.0}),
        Codec("argmax4", {i0: 2}, rates, rates),
        Codec("fp16", {s: b.storages[s].nbytes // 2 for s in (c0, r0, p0, c1, r1, c2)}, rates, rates, lossy=True),
    )
    problem = b.problem(on, cyclic=cyclic)
    return replace(problem, costs=replace(problem.costs, codecs=codecs))


ODD_PROBLEMS = {
    "chain": lambda on=None: chain(6, on=on),
    "chain with weights": lambda on=None: chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2, on=on),
    "dense chain": lambda on=None: chain(5, weight_bytes=3, kinds=("matmul", "relu"), on=on),
    "skip": lambda on=None: skip(on=on),
    "shared weight": lambda on=None: shared_weight(on=on),
    "one op": lambda on=None: one_op(on=on),
    "one large storage": lambda on=None: one_large_storage(on=on),
    "zero activations": lambda on=None: zero_activations(on=on),
    "masters": lambda on=None: masters(on=on),
    "awkward": lambda on=None: awkward(on=on),
    "relu net": lambda on=None: relu_net(on=on),
    "cold chain": lambda on=None: chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2, on=on, cyclic=False),
}
