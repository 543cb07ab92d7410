"""Write gpt-small.step.json: one training step of a small GPT as a Graph, from formulas alone.

    python examples/make_step.py [-o examples/gpt-small.step.json]

Four blocks of width 2048 with 16 heads over 16 sequences of 1024 tokens, everything in bf16, AdamW without masters. Attention is the flash kernel,
which saves one logsumexp for each query and head; layer norms save their row statistics; cross-entropy is the fused kernel that keeps logits only.
Flops are counted for products and attention; all other ops live off memory bandwidth. It needs no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tierwise.ir import Graph, Op, Phase, Region, RegionCall, Role, Storage, check_graph, serial

BLOCKS, WIDTH, HEADS, SEQUENCES, LENGTH, VOCABULARY = 4, 2048, 16, 16, 1024, 32000
TOKENS = SEQUENCES * LENGTH
HALF, SINGLE, INDEX = 2, 4, 8  # bytes of a bf16, an fp32 and an int64
FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE

EMBED, BLOCK, HEAD = range(3)  # region classes; calls are numbered in the order they run


class Step:
    """A graph under construction: names in, ids out."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.params: list[int] = []
        self.grads: dict[int, int] = {}  # parameter -> its gradient
        self.call = 0  # the region call that ops now belong to
        self.phase = FORWARD

    def storage(self, name: str, nbytes: int, role: Role = Role.ACTIVATION) -> int:
        self.storages.append(Storage(len(self.storages), name, nbytes, role, lasting=role in (Role.PARAM, Role.OPTIMIZER_STATE)))
        return len(self.storages) - 1

    def rows(self, name: str, width: int = WIDTH) -> int:
        """An activation of `width` bf16 numbers for each token."""
        return self.storage(name, TOKENS * width * HALF)

    def param(self, name: str, count: int) -> int:
        self.params.append(self.storage(name, count * HALF, Role.PARAM))
        return self.params[-1]

    def grad(self, param: int) -> int:
        found = self.storages[param]
        self.grads[param] = self.storage(f"{found.name}.grad", found.nbytes, Role.GRAD)
        return self.grads[param]

    def op(
        self, name: str, kind: str, reads: list[int], writes: list[int], *, flops: int = 0, workspace: int = 0, mutates: tuple[int, ...] = ()
    ) -> None:
        self.ops.append(
            Op(
                id=len(self.ops),
                name=name,
                phase=self.phase,
                reads=tuple(reads),
                writes=tuple(writes),
                kind=kind,
                region=-1 if self.phase is UPDATE else self.call,
                mutates=mutates,
                workspace_bytes=workspace,
                flops=flops,
                precision="bf16" if flops else "fp32",
            )
        )

    # -- layers: each makes its forward op and returns its output with a function that makes its backward ops -----------------------------

    def linear(self, name: str, x: int, into: int, out_of: int = WIDTH):  # type: ignore[no-untyped-def]
        weight = self.param(f"{name}.weight", into * out_of)
        y = self.rows(f"{name}.out", into)
        flops = 2 * TOKENS * into * out_of
        self.op(name, "matmul", [x, weight], [y], flops=flops)

        def backward(dy: int) -> int:
            dx = self.rows(f"{name}.in.grad", out_of)
            self.op(f"{name}.grad_in", "matmul", [dy, weight], [dx], flops=flops)
            self.op(f"{name}.grad_weight", "matmul", [dy, x], [self.grad(weight)], flops=flops)
            return dx

        return y, backward

    def norm(self, name: str, x: int):  # type: ignore[no-untyped-def]
        weight = self.param(f"{name}.weight", WIDTH)
        y, statistics = self.rows(f"{name}.out"), self.storage(f"{name}.statistics", 2 * TOKENS * SINGLE)
        self.op(name, "layer_norm", [x, weight], [y, statistics])

        def backward(dy: int) -> int:
            dx = self.rows(f"{name}.in.grad")
            self.op(f"{name}.grad", "layer_norm_backward", [dy, x, statistics, weight], [dx, self.grad(weight)])
            return dx

        return y, backward

    def gelu(self, name: str, x: int):  # type: ignore[no-untyped-def]
        y = self.rows(f"{name}.out", 4 * WIDTH)
        self.op(name, "gelu", [x], [y])

        def backward(dy: int) -> int:
            dx = self.rows(f"{name}.in.grad", 4 * WIDTH)
            self.op(f"{name}.grad", "gelu_backward", [dy, x], [dx])
            return dx

        return y, backward

    def attention(self, name: str, q: int, k: int, v: int):  # type: ignore[no-untyped-def]
        y, logsumexp = self.rows(f"{name}.out"), self.storage(f"{name}.logsumexp", TOKENS * HEADS * SINGLE)
        flops = 2 * 2 * TOKENS * LENGTH * WIDTH // 2  # two products, and the causal mask leaves half of each
        self.op(name, "attention", [q, k, v], [y, logsumexp], flops=flops)

        def backward(dy: int) -> tuple[int, int, int]:
            dq, dk, dv = (self.rows(f"{name}.{part}.grad") for part in "qkv")
            # The kernel makes the products again and sums dq in fp32, beside one number for each query and head.
            scratch = TOKENS * WIDTH * SINGLE + TOKENS * HEADS * SINGLE
            self.op(f"{name}.grad", "attention_backward", [dy, q, k, v, y, logsumexp], [dq, dk, dv], flops=flops * 5 // 2, workspace=scratch)
            return dq, dk, dv

        return y, backward

    def add(self, name: str, a: int, b: int) -> int:
        total = self.rows(name)
        self.op(name, "add", [a, b], [total])
        return total


def block(step: Step, name: str, x: int):  # type: ignore[no-untyped-def]
    normed, norm1_back = step.norm(f"{name}.norm1", x)
    q, q_back = step.linear(f"{name}.attn.q", normed, WIDTH)
    k, k_back = step.linear(f"{name}.attn.k", normed, WIDTH)
    v, v_back = step.linear(f"{name}.attn.v", normed, WIDTH)
    mixed, attention_back = step.attention(f"{name}.attn", q, k, v)
    projected, projection_back = step.linear(f"{name}.attn.proj", mixed, WIDTH)
    middle = step.add(f"{name}.residual1", x, projected)
    normed2, norm2_back = step.norm(f"{name}.norm2", middle)
    up, up_back = step.linear(f"{name}.mlp.up", normed2, 4 * WIDTH)
    active, gelu_back = step.gelu(f"{name}.mlp.gelu", up)
    down, down_back = step.linear(f"{name}.mlp.down", active, WIDTH, 4 * WIDTH)
    out = step.add(f"{name}.residual2", middle, down)

    def backward(dy: int) -> int:
        d_normed2 = up_back(gelu_back(down_back(dy)))
        d_middle = step.add(f"{name}.residual2.grad", dy, norm2_back(d_normed2))
        dq, dk, dv = attention_back(projection_back(d_middle))
        d_qk = step.add(f"{name}.attn.qk.grad", q_back(dq), k_back(dk))
        d_normed = step.add(f"{name}.attn.qkv.grad", d_qk, v_back(dv))
        return step.add(f"{name}.residual1.grad", d_middle, norm1_back(d_normed))

    return out, backward


def gpt_step() -> Graph:
    step = Step()
    tokens = step.storage("tokens", TOKENS * INDEX, Role.INPUT)
    targets = step.storage("targets", TOKENS * INDEX, Role.INPUT)
    table, positions = step.param("embed.tokens", VOCABULARY * WIDTH), step.param("embed.positions", LENGTH * WIDTH)
    x = step.rows("embed.out")
    step.op("embed", "embedding", [tokens, table, positions], [x])
    backs = []
    for i in range(BLOCKS):
        step.call = 1 + i
        x, back = block(step, f"blocks.{i}", x)
        backs.append(back)

    step.call = 1 + BLOCKS
    normed, norm_back = step.norm("norm", x)
    logits, head_back = step.linear("head", normed, VOCABULARY)
    loss, logsumexp = step.storage("loss", SINGLE), step.storage("loss.logsumexp", TOKENS * SINGLE)
    step.op("loss", "cross_entropy", [logits, targets], [loss, logsumexp])

    step.phase = BACKWARD
    d_logits = step.rows("head.out.grad", VOCABULARY)
    step.op("loss.grad", "cross_entropy_backward", [logits, targets, logsumexp], [d_logits])
    dx = norm_back(head_back(d_logits))
    for i in reversed(range(BLOCKS)):
        step.call = 1 + i
        dx = backs[i](dx)
    step.call = 0
    step.op("embed.grad", "embedding_backward", [tokens, dx], [step.grad(table), step.grad(positions)])

    step.phase = UPDATE
    for param in step.params:
        found = step.storages[param]
        moments = tuple(step.storage(f"{found.name}.{moment}", found.nbytes, Role.OPTIMIZER_STATE) for moment in ("exp_avg", "exp_avg_sq"))
        step.op(f"adamw.{found.name}", "adamw", [step.grads[param]], [], mutates=(param, *moments))

    calls = ["embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head"]
    classes = [EMBED, *[BLOCK] * BLOCKS, HEAD]
    graph = Graph(
        ops=tuple(step.ops),
        storages=tuple(step.storages),
        regions=(Region(EMBED, "embedding", "embed"), Region(BLOCK, "block", "blocks.0"), Region(HEAD, "norm, head and loss", "head")),
        calls=tuple(RegionCall(i, region, module) for i, (region, module) in enumerate(zip(classes, calls, strict=True))),
    )
    check_graph(graph)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).with_name("gpt-small.step.json"))
    out = parser.parse_args().out
    graph = gpt_step()
    serial.save(graph, out)
    print(f"wrote {out}: {len(graph.ops)} ops over {len(graph.storages)} storages")


if __name__ == "__main__":
    main()
