"""Training steps for hypothesis: a random forward DAG with its backward and, for the weights, updates."""

from __future__ import annotations

from hypothesis import strategies as st
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, machine

from tierwise.ir import Problem, Role


@st.composite
def training_steps(draw, max_layers: int = 6) -> Problem:
    b = GraphBuilder()
    sizes = st.integers(1, 40)
    seconds = st.sampled_from((0.0, 0.25, 1.0, 3.0))
    acts = [b.storage("x", draw(sizes), Role.INPUT)]
    layers = []
    weight = None
    for i in range(draw(st.integers(1, max_layers))):
        inputs = sorted({acts[-1], *draw(st.lists(st.sampled_from(acts), max_size=2))})
        fresh_weight = draw(st.sampled_from(("none", "own", "shared")))
        if fresh_weight == "own" or (fresh_weight == "shared" and weight is None):
            weight = b.storage(f"w{i}", draw(sizes), Role.PARAM)
        uses_weight = weight if fresh_weight != "none" else None
        outputs = [b.storage(f"a{i}", draw(sizes), Role.ACTIVATION)]
        if draw(st.booleans()):
            outputs.append(b.storage(f"mask{i}", draw(sizes), Role.ACTIVATION))
        kind = draw(st.sampled_from(("conv2d", "relu", "matmul", "dropout")))
        b.op(
            f"fwd{i}", FORWARD, [*inputs, *([uses_weight] if uses_weight is not None else [])], outputs, kind=kind, seconds=draw(seconds),
            workspace_bytes=draw(st.sampled_from((0, 0, 7))), replayable=kind != "dropout" or draw(st.booleans()),
        )  # fmt: skip
        layers.append((inputs, uses_weight, outputs, kind))
        acts.append(outputs[0])
    grads = {acts[-1]: b.storage("d", 4, Role.ACTIVATION)}
    b.op("loss", BACKWARD, [acts[-1]], [grads[acts[-1]]], kind="loss", seconds=draw(seconds))
    weight_grads: dict[int, int] = {}
    for i, (inputs, uses_weight, outputs, kind) in reversed(list(enumerate(layers))):
        if outputs[0] not in grads:
            continue
        reads = {grads[outputs[0]], *outputs[1:], *(s for s in inputs if draw(st.booleans()))}
        if draw(st.booleans()):
            reads.add(outputs[0])
        writes, mutates = [], []
        for s in inputs:
            if b.storages[s].role is Role.INPUT:
                continue
            if s in grads:
                mutates.append(grads[s])  # a second consumer adds its part
            else:
                grads[s] = b.storage(f"d{b.storages[s].name}_{i}", b.storages[s].nbytes, Role.ACTIVATION)
                writes.append(grads[s])
        if uses_weight is not None:
            reads.add(uses_weight)
            if uses_weight in weight_grads:
                mutates.append(weight_grads[uses_weight])
            else:
                weight_grads[uses_weight] = b.storage(f"g{uses_weight}", b.storages[uses_weight].nbytes, Role.GRAD)
                writes.append(weight_grads[uses_weight])
        b.op(f"bwd{i}", BACKWARD, sorted(reads), writes, mutates=tuple(mutates), kind=f"{kind}_backward", seconds=draw(seconds))
    for w, g in weight_grads.items():
        state = (b.storage(f"s{w}", 2 * b.storages[w].nbytes, Role.OPTIMIZER_STATE),) if draw(st.booleans()) else ()
        b.op(f"step{w}", UPDATE, [g], [], mutates=(w, *state), kind="update", seconds=0.5, cpu_seconds=draw(st.sampled_from((None, 1.0))))
    return b.problem(machine(rate=draw(st.sampled_from((1.0, 10.0, 100.0)))), cyclic=draw(st.booleans()))
