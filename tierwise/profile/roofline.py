"""Seconds of each op counted from its flops and bytes, for machines that are not here.

    seconds = max(flops / rate of its precision, bytes / bandwidth) / share of that its kind of kernel reaches + launch

Bytes are those of the distinct storages it touches: read once, written once, and what it mutates both. An op that reads a part of a storage
(an embedding, a slice) is charged for all of it. Every op has a cost on the device; updates also on every other processor that says its bandwidth.

`fused_costs` counts the same step with its regions compiled: within a region, a run of ops that are passes over data is one kernel, which
moves only what enters and leaves the run.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import BadInput
from ..ir import Costs, Graph, Machine, Op, Phase, Processor

# What kernels of a kind reach of their roofline on an H200: medians over the ops of gpt2-medium, llama-1.4b, bert-large, vit-large-16, resnet-152
# and vgg-16, each op timed alone (benchmarks/cases/accuracy.py). A kind that is not here moves bytes as fast as a copy does.
REACHED = {
    "matmul": 0.90, "matmul_backward": 0.88,
    "attention": 0.29, "attention_backward": 0.21,
    "conv2d": 0.45, "conv2d_backward": 0.38, "conv_transpose2d": 0.2, "conv_transpose2d_backward": 0.2,
    "batch_norm": 0.4, "batch_norm_backward": 0.4,
    "layer_norm": 0.39, "layer_norm_backward": 0.21, "rms_norm": 0.5, "rms_norm_backward": 0.32,
    "log_softmax": 0.51, "log_softmax_backward": 0.7, "softmax": 0.5, "softmax_backward": 0.7,
    "max_pool2d": 0.5, "max_pool2d_backward": 0.25, "avg_pool2d": 0.15, "avg_pool2d_backward": 0.1,
    "sum": 0.44, "sum_backward": 0.44, "cast": 0.5, "dropout": 0.65, "gelu": 0.74, "gelu_backward": 0.82, "silu": 0.82, "silu_backward": 0.9,
    "add": 0.8, "mul": 0.6, "mul_backward": 0.7, "cat": 0.9,
}  # fmt: skip
FUSED_REACHED = 0.75  # of the bandwidth, by a kernel the compiler makes of several such ops
SMALL_SHARE = 0.04  # of a step: a region class with less is timed without waiting for the clocks to settle
NOTHING = "release"  # the kind of an op that only says until when something is held
WORK = ("matmul", "attention", "conv", "rnn")  # kinds that are kernels of their own, compiled or not


def roofline_costs(graph: Graph, machine: Machine) -> Costs:
    """Each op a kernel of its own: an eager step."""
    seconds = {}
    for op in graph.ops:
        nbytes = touched_bytes(graph, op)
        for processor in _processors(machine, op):
            reached = REACHED.get(op.kind, 1.0) if processor is machine.device else 1.0
            seconds[op.id, processor.name] = _seconds(op, nbytes, processor, machine, reached)
    return Costs(seconds)


def fused_costs(graph: Graph, machine: Machine) -> Costs:
    """Regions compiled: the ops of a run of passes over data share the cost of one. None takes no time: what it holds would not be seen."""
    seconds = dict(roofline_costs(graph, machine).op_seconds)
    device = machine.device
    for run in _runs(graph):
        nbytes = _bytes_across(graph, run)
        cost = nbytes / device.bytes_per_second / FUSED_REACHED + device.launch_seconds
        seconds.update({(op.id, device.name): cost / len(run) for op in run})
    return Costs(seconds)


def region_shares(graph: Graph, machine: Machine) -> dict[int, float]:
    """Of the step's roofline, by region class."""
    seconds = roofline_costs(graph, machine).op_seconds
    found = dict.fromkeys((region.id for region in graph.regions), 0.0)
    for op in graph.ops:
        if op.region >= 0:
            found[graph.calls[op.region].region] += seconds[op.id, machine.device.name]
    whole = sum(seconds[op.id, machine.device.name] for op in graph.ops)
    return {region: share / whole for region, share in found.items()}


def touched_bytes(graph: Graph, op: Op) -> int:
    """Bytes an op moves to and from its processor's memory."""
    return sum(graph.storages[s].nbytes for touched in (op.reads + op.mutates, op.writes + op.mutates) for s in set(touched))


def _runs(graph: Graph) -> Iterator[list[Op]]:
    """Neighbouring ops of one region call and phase, none of them work."""
    run: list[Op] = []
    for op in graph.ops:
        if op.kind == NOTHING:
            continue
        fuses = op.region >= 0 and not op.kind.startswith(WORK)
        if run and (not fuses or (op.region, op.phase) != (run[0].region, run[0].phase)):
            yield run
            run = []
        if fuses:
            run.append(op)
    if run:
        yield run


def _bytes_across(graph: Graph, run: list[Op]) -> int:
    """Bytes that enter or leave a run; what it makes and uses up itself stays in registers."""
    inside = {op.id for op in run}
    made = {s for op in run for s in op.writes}
    reads = {s for op in run for s in op.reads + op.mutates} - made
    left = {s for s in made if any(use not in inside for use in graph.uses[s])} | {s for op in run for s in op.mutates}
    return sum(graph.storages[s].nbytes for s in [*reads, *left])


def _processors(machine: Machine, op: Op) -> list[Processor]:
    others = machine.processors[1:] if op.phase is Phase.UPDATE else ()
    return [machine.device, *(processor for processor in others if processor.bytes_per_second)]


def _seconds(op: Op, nbytes: int, processor: Processor, machine: Machine, reached: float) -> float:
    if op.kind == NOTHING:
        return 0.0
    if not processor.bytes_per_second:
        raise BadInput(f"machine {machine.name} does not say the memory bandwidth of its {processor.name}; add bytes_per_second to its file")
    moving = nbytes / processor.bytes_per_second
    rates = processor.flops_per_second
    if not op.flops or not rates:  # a processor that says no rates works at the speed of its memory, as a cpu's update does
        return moving / reached + processor.launch_seconds
    if op.precision not in rates:
        raise BadInput(f"machine {machine.name} does not say the {op.precision} rate of its {processor.name}, which {op.name} needs; "
                       f"it says {', '.join(rates)}: add it to its file")  # fmt: skip
    return max(op.flops / rates[op.precision], moving) / reached + processor.launch_seconds
