"""vdnn: send each layer's input to host memory after its last forward use, fetch it one layer ahead in backward.

Paper    Rhu, Gimelshein, Clemons, Zulfiqar, Keckler, MICRO 2016, arXiv:1602.08124.
Idea     a feature map is used once in forward and once in backward; in between, the bus can carry it away and back.
Rule     copy x to the host while its last forward consumer runs; the next layer waits until the copy is done (join). At the start of backward layer
         n walk on to the layers after it: fetch the first missing x found and stop; stop also after a CONV. mode: all (every feature layer), conv
         (inputs of CONV layers), dyn. kernels: performance (of each op the fastest), memory (the least workspace). dyn: the first that fits of
         nothing, conv and all, with the fastest kernels; then conv and all, each op with the fastest kernel its place in memory leaves room for;
         then conv and all with the least workspace.
Differs  kernels are the step's variants, and captured steps have none unless they are given: then dyn is nothing, conv, all. Networks without
         convolutions: every layer is a feature layer, and dense layers stop the walk. Of a block that is compiled into one op, what it saves is
         sent when it is done: these are the inputs of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import BadInput, InfeasibleBudget
from ..ir import Graph, Op, Phase, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._gaps import Swap, build, device_bytes
from ._layers import is_conv, is_dense, is_region, saved_for_backward

DECIDES = "swap by layer"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}
LADDER = ("none", "conv", "all")  # of dyn, the fastest first
KERNELS = ("performance", "memory")


def plan(problem: Problem, *, mode: str = "dyn", kernels: str = "performance", tier: str = "dram") -> Schedule:
    """kernels: of the fixed modes; dyn decides itself."""
    return by_layer(problem, "vdnn", mode, kernels, tier)


def by_layer(problem: Problem, policy: str, mode: str, kernels: str, tier: str, sent: Callable[[Swap], Swap] = lambda swap: swap) -> Schedule:
    """The plan of a mode; `sent` says how a policy that builds on vDNN's choice sends each of its swaps."""
    if mode not in (*LADDER, "dyn"):
        raise BadInput(f"mode is {mode!r}; {policy} knows {', '.join(LADDER)} and dyn")
    if kernels not in KERNELS:
        raise BadInput(f"kernels is {kernels!r}; {policy} knows {' and '.join(KERNELS)}")
    if mode != "dyn":
        return build(problem, [sent(swap) for swap in offloads(problem, mode, tier)], variants=_kernels(problem, kernels))
    needed = []
    for schedule in _ladder(problem, tier, sent):
        needed.append(peak_bytes(problem, schedule)[problem.device_tier])
        if needed[-1] <= problem.budget_bytes:
            return schedule
    raise InfeasibleBudget(f"even offloading all, {policy} needs {format_bytes(min(needed))}", least_bytes=min(needed))


def _ladder(problem: Problem, tier: str, sent: Callable[[Swap], Swap]) -> Iterator[Schedule]:
    swaps = {mode: [sent(swap) for swap in offloads(problem, mode, tier)] for mode in LADDER}
    fastest, smallest = _kernels(problem, "performance"), _kernels(problem, "memory")
    for mode in LADDER:
        yield build(problem, swaps[mode], variants=fastest)
    if fastest != smallest:
        for mode in ("conv", "all"):
            yield build(problem, swaps[mode], variants=kernels_with_room(problem, swaps[mode]))
        for mode in ("conv", "all"):
            yield build(problem, swaps[mode], variants=smallest)


def _choices(problem: Problem) -> dict[int, list[tuple[float, int, str]]]:
    """Seconds, workspace and name of each way to run an op that has several; those that read the same plain storages."""
    device = problem.machine.device.name
    found: dict[int, list[tuple[float, int, str]]] = {}
    for variant in problem.costs.variants:
        if device in variant.seconds and not variant.forms and variant.reads in (None, problem.graph.ops[variant.op].reads):
            found.setdefault(variant.op, []).append((variant.seconds[device], variant.workspace_bytes, variant.name))
    for op, ways in found.items():
        if (op, device) in problem.costs.op_seconds:
            ways.append((problem.costs.op_seconds[op, device], problem.graph.ops[op].workspace_bytes, ""))
    return found


def _kernels(problem: Problem, kernels: str) -> dict[int, str]:
    rank = (lambda way: (way[1], way[0], way[2])) if kernels == "memory" else (lambda way: way)
    return {op: name for op, ways in _choices(problem).items() if (name := min(ways, key=rank)[2])}


def kernels_with_room(problem: Problem, swaps: list[Swap]) -> dict[int, str]:
    """For each op the fastest kernel whose workspace fits beside what is there when the op runs."""
    smallest = _kernels(problem, "memory")
    held = device_bytes(problem, build(problem, swaps, variants=smallest))
    found = {}
    for op, ways in _choices(problem).items():
        least = min(workspace for _, workspace, _ in ways)
        room = problem.budget_bytes - held[op] + least
        fits = [way for way in ways if way[1] <= room]
        name = min(fits)[2] if fits else smallest.get(op, "")
        if name:
            found[op] = name
    return found


def offloads(problem: Problem, mode: str, tier: str) -> list[Swap]:
    """What the mode sends to the tier, and when."""
    graph = problem.graph
    last_feature = _last_feature_layer(graph)
    needed_first: dict[int, list[int]] = {}  # backward op -> offloaded storages it is the first to need
    leaves_at: dict[int, int] = {}
    for storage, layer, needed in saved_for_backward(graph):
        wanted = mode == "all" or (mode == "conv" and is_conv(graph.ops[layer]))
        is_input = layer in graph.readers[storage]  # a layer's mask or statistics are not feature maps
        inside = is_region(graph.ops[layer]) and not is_input  # inputs of the layers in a compiled block, there when it is done
        if wanted and (is_input or inside) and layer < last_feature and needed > layer + 1 + inside:
            leaves_at[storage] = layer + inside
            needed_first.setdefault(needed, []).append(storage)
    fetch_at = _prefetch(graph, needed_first)
    return [Swap(storage, tier, out_at=layer, free_at=layer + 1, in_at=fetch_at[storage], join=True) for storage, layer in leaves_at.items()]


def _last_feature_layer(graph: Graph) -> int:
    """The last layer before the classifier: its input is needed again too soon to be worth sending away."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    convs = [op.id for op in forward if is_conv(op)]
    if not convs:
        return forward[-1].id if forward else -1
    last = convs[-1]
    for op in forward:
        if op.id > last:
            if is_dense(op):
                break
            last = op.id
    return last


def _prefetch(graph: Graph, needed_first: dict[int, list[int]]) -> dict[int, int]:
    """For each offloaded storage, the backward op at whose start it is fetched."""
    walk_stops = is_conv if any(map(is_conv, graph.ops)) else is_dense
    fetch_at: dict[int, int] = {}
    backward = [op for op in graph.ops if op.phase is not Phase.FORWARD]
    for place, layer in enumerate(backward):
        for storage in needed_first.get(layer.id, ()):
            fetch_at.setdefault(storage, layer.id)  # nobody came for it in time: fetched on demand
        for storage in _next_missing(backward[place + 1 :], needed_first, fetch_at, walk_stops):
            fetch_at[storage] = layer.id
    return fetch_at


def _next_missing(ahead: list[Op], needed_first: dict[int, list[int]], fetched: dict[int, int], walk_stops) -> list[int]:  # type: ignore[no-untyped-def]
    for layer in ahead:
        missing = [storage for storage in needed_first.get(layer.id, ()) if storage not in fetched]
        if missing or walk_stops(layer):
            return missing
    return []
