"""megatron: compute again only what is large and cheap, the inside of attention; where that is not enough, whole layers, as few as must be.

Paper    Korthikanti, Casper, Lym, McAfee, Andersch, Shoeybi, Catanzaro, MLSys 2023, arXiv:2205.05198; options as in Megatron-LM.
Idea     scores, softmax and dropout of attention are 5·a·s/h of (34 + 5·a·s/h) bytes per token and layer and hardly any of the work.
Rule     selective: of the chosen modules keep what goes in and what comes out. core_attn: QKᵀ, softmax, dropout, ·V.
         full, method=block: the first `layers` layers keep only their input. method=uniform: every run of `layers` layers does.
         auto: the first that fits of nothing, selective, block with the fewest layers, uniform with the shortest runs.
Differs  auto is ours: in Megatron the user decides. One device: no tensor or sequence parallelism. A fused attention kernel already does what
         core_attn does; with modules=auto a step that has only such kernels recomputes norms and activation functions instead, whose
         outputs are dropped too. A layer is a repeated block of the model (_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..errors import BadInput, InfeasibleBudget
from ..ir import Graph, Op, Phase, Problem, Role, Schedule, peak_bytes
from ..units import format_bytes
from ._blocks import blocks, checkpoint, is_work
from ._gaps import Drop, build, can_recompute
from ._layers import saved_for_backward

DECIDES = "recompute by module, then by layer"
FIDELITY = "faithful"
EXECUTABLE = True

GRANULARITIES = ("auto", "none", "selective", "full")
METHODS = ("block", "uniform")
MODULES = ("core_attn", "layernorm", "activation")
NORMS = ("layer_norm", "rms_norm", "group_norm")
ACTIVATIONS = ("gelu", "silu", "relu", "tanh", "sigmoid", "leaky_relu", "elu", "softplus", "mish", "hardswish")


def plan(problem: Problem, *, granularity: str = "auto", modules: str = "auto", method: str = "block", layers: int = 1) -> Schedule:
    """modules: some of core_attn, layernorm and activation, with commas between them."""
    for name, value, known in (("granularity", granularity, GRANULARITIES), ("method", method, METHODS)):
        if value not in known:
            raise BadInput(f"{name} is {value!r}; megatron knows {', '.join(known)}")
    if layers < 1:
        raise BadInput(f"layers is {layers}; give at least 1")
    chosen = _modules(problem.graph, modules)
    if granularity == "none":
        return build(problem)
    if granularity == "selective":
        return _selective(problem, chosen)
    if granularity == "full":
        return _full(problem, method, layers)
    return _first_that_fits(problem, chosen)


def _modules(graph: Graph, text: str) -> tuple[str, ...]:
    if text == "auto":
        return ("core_attn",) if _core_attentions(graph) else ("layernorm", "activation")
    chosen = tuple(part.strip() for part in text.split(",") if part.strip())
    for module in chosen:
        if module not in MODULES:
            raise BadInput(f"module {module!r}; megatron knows {', '.join(MODULES)}")
    return chosen


def _first_that_fits(problem: Problem, modules: tuple[str, ...]) -> Schedule:
    least = math.inf

    def attempt(schedule: Schedule) -> Schedule | None:
        nonlocal least
        needed = peak_bytes(problem, schedule)[problem.device_tier]
        least = min(least, needed)
        return schedule if needed <= problem.budget_bytes else None

    if found := attempt(build(problem)) or attempt(_selective(problem, modules)):
        return found
    count = len(blocks(problem.graph))
    low, best = 0, attempt(_full(problem, "block", count))
    if best is not None:  # the fewest layers: fewer never take less memory
        high = count
        while high - low > 1:
            middle = (low + high) // 2
            found = attempt(_full(problem, "block", middle))
            low, high, best = (low, middle, found) if found else (middle, high, best)
        return best
    for run in range(2, 2 * math.isqrt(count) + 2):
        if found := attempt(_full(problem, "uniform", run)):
            return found
    raise InfeasibleBudget(f"recomputing everything but the inputs of layers still takes {format_bytes(int(least))}", least_bytes=int(least))


# -- full -------------------------------------------------------------------------------------------------------------------------------


def _full(problem: Problem, method: str, layers: int) -> Schedule:
    found = blocks(problem.graph)
    runs = [[block] for block in found[:layers]] if method == "block" else [found[at : at + layers] for at in range(0, len(found), layers)]
    chosen = checkpoint(problem, runs)
    return build(problem, drops=chosen.drops, kept=chosen.kept)


# -- selective --------------------------------------------------------------------------------------------------------------------------


def _selective(problem: Problem, modules: tuple[str, ...]) -> Schedule:
    graph = problem.graph
    dropped: set[int] = set()
    again: set[int] = set()
    if "core_attn" in modules:
        for core in _core_attentions(graph):
            again |= core
            dropped |= _only_inside(graph, core)
    for op in graph.ops:
        norm = "layernorm" in modules and op.kind in NORMS
        activation = "activation" in modules and (op.kind in ACTIVATIONS or _is_gate(graph, op))
        if op.phase is Phase.FORWARD and (norm or activation):
            again.add(op.id)
            dropped |= set(op.writes)
    drops = [
        Drop(storage, last + 1)
        for storage, last, needed in saved_for_backward(graph)
        if storage in dropped and needed > last + 1 and can_recompute(problem, storage)
    ]
    made = {storage for op in again for storage in graph.ops[op].writes}
    return build(problem, drops=drops, kept={storage for op in again for storage in graph.ops[op].reads} - made)


def _core_attentions(graph: Graph) -> list[set[int]]:
    """For each softmax between two products of activations: the ops from the first product to the second."""
    return [core for op in graph.ops if op.kind == "softmax" and op.phase is Phase.FORWARD and (core := _core_around(graph, op))]


def _core_around(graph: Graph, softmax: Op) -> set[int]:
    before = list(_walk(graph, softmax, back=True))
    after = list(_walk(graph, softmax, back=False))
    products = [op for op in (*before, *after) if _multiplies_activations(graph, op)]
    if not any(op in before for op in products) or not any(op in after for op in products):
        return set()
    return {op.id for op in (*before, softmax, *after)}


def _walk(graph: Graph, start: Op, *, back: bool) -> Iterator[Op]:
    """Ops up to and with the nearest product; where the way branches, all of it that makes activations of the softmax's size or more."""
    pending, seen = [start], {start.id}
    while pending:
        op = pending.pop()
        for storage in op.reads if back else op.writes:
            if graph.storages[storage].role is not Role.ACTIVATION:
                continue
            producer = graph.producer(storage)
            for near in ([producer] if producer is not None else []) if back else graph.readers[storage]:
                other = graph.ops[near]
                if near in seen or other.phase is not Phase.FORWARD or not _is_about_as_large(graph, other if back else op, start):
                    continue
                seen.add(near)
                yield other
                if not is_work(other):
                    pending.append(other)


def _is_about_as_large(graph: Graph, op: Op, softmax: Op) -> bool:
    """A mask or a bias that is broadcast onto the scores is made elsewhere and once."""
    scores = max(graph.storages[s].nbytes for s in softmax.writes)
    return max((graph.storages[s].nbytes for s in op.writes), default=0) * 4 > scores  # a mask of bytes beside fp32 scores is a quarter


def _multiplies_activations(graph: Graph, op: Op) -> bool:
    """No weight among what it reads; q and k may be views of one storage."""
    return is_work(op) and bool(op.reads) and all(graph.storages[s].role is Role.ACTIVATION for s in op.reads)


def _only_inside(graph: Graph, ops: set[int]) -> set[int]:
    made = {storage for op in ops for storage in graph.ops[op].writes}
    return {s for s in made if all(use in ops or graph.ops[use].phase is not Phase.FORWARD for use in graph.readers[s])}


def _is_gate(graph: Graph, op: Op) -> bool:
    """SwiGLU's product of an activation function and a second projection."""
    makers = (graph.producer(read) for read in op.reads)
    return op.kind == "mul" and any(maker is not None and graph.ops[maker].kind in ACTIVATIONS for maker in makers)
