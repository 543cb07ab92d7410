"""Seconds of each op counted from its flops and bytes, for machines that are not here.

    seconds = max(flops / rate of its precision, bytes / bandwidth) + launch

Bytes are those of the distinct storages it touches: read once, written once, and what it mutates both. An op that reads a part of a storage
(an embedding, a slice) is charged for all of it, and pointwise ops that a compiler would fuse are charged each, so the sum errs on the slow side.
Every op has a cost on the device; updates also on every other processor that says its bandwidth.
"""

from __future__ import annotations

from ..errors import BadInput
from ..ir import Costs, Graph, Machine, Op, Phase, Processor


def roofline_costs(graph: Graph, machine: Machine) -> Costs:
    for_updates = [processor for processor in machine.processors[1:] if processor.bytes_per_second]
    seconds = {}
    for op in graph.ops:
        nbytes = touched_bytes(graph, op)
        for processor in [machine.device, *(for_updates if op.phase is Phase.UPDATE else ())]:
            seconds[op.id, processor.name] = _seconds(op, nbytes, processor, machine)
    return Costs(seconds)


def touched_bytes(graph: Graph, op: Op) -> int:
    """Bytes an op moves to and from its processor's memory."""
    return sum(graph.storages[s].nbytes for touched in (op.reads + op.mutates, op.writes + op.mutates) for s in set(touched))


def _seconds(op: Op, nbytes: int, processor: Processor, machine: Machine) -> float:
    if not processor.bytes_per_second:
        raise BadInput(f"machine {machine.name} does not say the memory bandwidth of its {processor.name}; add bytes_per_second to its file")
    moving = nbytes / processor.bytes_per_second
    rates = processor.flops_per_second
    if not op.flops or not rates:  # a processor that says no rates works at the speed of its memory, as a cpu's update does
        return moving + processor.launch_seconds
    if op.precision not in rates:
        raise BadInput(f"machine {machine.name} does not say the {op.precision} rate of its {processor.name}, which {op.name} needs; "
                       f"it says {', '.join(rates)}: add it to its file")  # fmt: skip
    return max(op.flops / rates[op.precision], moving) + processor.launch_seconds
