"""Transformer layers by hand, with every byte of Korthikanti et al. (2023): a layer keeps 34 + 5·r for backward, in units of tokens × hidden.

r = heads × sequence / hidden: scores, softmax and dropout of attention are r times as large as a byte per token and hidden. fp16 is two bytes, a
dropout mask one. Products take most of the time.
"""

from __future__ import annotations

import dataclasses

from problems import BACKWARD, FORWARD, GraphBuilder

from tierwise.ir import Machine, Problem, Region, RegionCall, Role

SECONDS = {"qkv": 3.0, "scores": 1.0, "context": 1.0, "proj": 1.0, "up": 4.0, "down": 4.0}  # the rest: a quarter


def transformer(layers: int = 2, *, r: int = 4, unit: int = 1, on: Machine | None = None, fused: bool = False) -> Problem:
    """x -> layer 0 -> ... -> loss, and back. Every layer is a region call. fused: attention is one op, which keeps its result and no scores."""
    b = GraphBuilder()
    names = {"x": b.storage("x", 2 * unit, Role.INPUT)}

    def op(name: str, layer: int, phase, reads: str, writes: dict[str, int], kind: str) -> None:
        suffix = f".{layer}"
        for made, size in writes.items():
            names[made + suffix] = b.storage(made + suffix, size * unit, Role.ACTIVATION)
        seconds = SECONDS.get(name.rstrip("'"), 0.25) * (2 if phase is BACKWARD else 1)
        found = [names[read] if read in names else names[read + suffix] for read in reads.split()]
        b.op(name + suffix, phase, found, [names[made + suffix] for made in writes], seconds=seconds, kind=kind, region=layer)

    x = "x"
    for layer in range(layers):
        names[f"in.{layer}"] = names[x]
        op("norm1", layer, FORWARD, "in", {"n1": 2}, "layer_norm")
        op("qkv", layer, FORWARD, "n1", {"q": 2, "k": 2, "v": 2}, "matmul")
        if fused:
            op("attention", layer, FORWARD, "q k v", {"ctx": 2}, "attention")
        else:
            op("scores", layer, FORWARD, "q k", {"s": 2 * r}, "matmul")
            op("softmax", layer, FORWARD, "s", {"p": 2 * r}, "softmax")
            op("drop0", layer, FORWARD, "p", {"pd": 2 * r, "m0": r}, "dropout")
            op("context", layer, FORWARD, "pd v", {"ctx": 2}, "matmul")
        op("proj", layer, FORWARD, "ctx", {"o": 2}, "matmul")
        op("drop1", layer, FORWARD, "o", {"od": 2, "m1": 1}, "dropout")
        op("add1", layer, FORWARD, "in od", {"y": 2}, "add")
        op("norm2", layer, FORWARD, "y", {"n2": 2}, "layer_norm")
        op("up", layer, FORWARD, "n2", {"u": 8}, "matmul")
        op("gelu", layer, FORWARD, "u", {"g": 8}, "gelu")
        op("down", layer, FORWARD, "g", {"dn": 2}, "matmul")
        op("drop2", layer, FORWARD, "dn", {"dd": 2, "m2": 1}, "dropout")
        op("add2", layer, FORWARD, "y dd", {"z": 2}, "add")
        x = f"z.{layer}"
    names["dz"] = b.storage("dz", 2 * unit, Role.ACTIVATION)
    b.op("loss", BACKWARD, [names[x]], [names["dz"]], kind="loss")
    dz = "dz"
    for layer in reversed(range(layers)):
        names[f"out'.{layer}"] = names[dz]
        op("drop2'", layer, BACKWARD, "out' m2", {"ddn": 2}, "dropout_backward")
        op("down'", layer, BACKWARD, "ddn g", {"dg": 8}, "matmul_backward")
        op("gelu'", layer, BACKWARD, "dg u", {"du": 8}, "gelu_backward")
        op("up'", layer, BACKWARD, "du n2", {"dn2": 2}, "matmul_backward")
        op("norm2'", layer, BACKWARD, "dn2 y", {"dy2": 2}, "layer_norm_backward")
        op("add2'", layer, BACKWARD, "out' dy2", {"dy": 2}, "add_backward")
        op("drop1'", layer, BACKWARD, "dy m1", {"do": 2}, "dropout_backward")
        op("proj'", layer, BACKWARD, "do ctx", {"dctx": 2}, "matmul_backward")
        if fused:
            op("attention'", layer, BACKWARD, "dctx q k v ctx", {"dq": 2, "dk": 2, "dv": 2}, "attention_backward")
        else:
            op("context'", layer, BACKWARD, "dctx pd v", {"dpd": 2 * r, "dv": 2}, "matmul_backward")
            op("drop0'", layer, BACKWARD, "dpd m0", {"dp": 2 * r}, "dropout_backward")
            op("softmax'", layer, BACKWARD, "dp p", {"ds": 2 * r}, "softmax_backward")
            op("scores'", layer, BACKWARD, "ds q k", {"dq": 2, "dk": 2}, "matmul_backward")
        op("qkv'", layer, BACKWARD, "dq dk dv n1", {"dn1": 2}, "matmul_backward")
        op("norm1'", layer, BACKWARD, "dn1 in", {"dx1": 2}, "layer_norm_backward")
        op("add1'", layer, BACKWARD, "dy dx1", {"dx": 2}, "add_backward")
        dz = f"dx.{layer}"
    problem = b.problem(on)
    graph = dataclasses.replace(
        problem.graph,
        regions=(Region(0, "Layer", "layers.0"),),
        calls=tuple(RegionCall(layer, 0, f"layers.{layer}") for layer in range(layers)),
    )
    return dataclasses.replace(problem, graph=graph)


def kept_for_backward(problem: Problem, schedule) -> int:
    """Bytes on the device while the loss runs, without the last output and its gradient."""
    from tierwise.policies._gaps import device_bytes

    loss = next(op.id for op in problem.graph.ops if op.name == "loss")
    ends = problem.graph.ops[loss].reads + problem.graph.ops[loss].writes
    return device_bytes(problem, schedule)[loss] - sum(problem.graph.storages[storage].nbytes for storage in ends)
