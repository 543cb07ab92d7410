"""vdnn_plus_plus: vDNN without its waits at the end of layers, every second convolution before all of them, and a smaller share of the host.

Paper    Shriram, Garg, Kulkarni, IPDPS 2019.
Idea     the next layer need not wait for the copy of the last one's input: only whoever needs its bytes must.
Rule     vDNN's copies; x is given back when its copy is over, and an allocation waits for that only if it has no other room. dyn: the first that fits
         of nothing, alternate (inputs of every second CONV layer), conv, all; each op by the fastest kernel its place leaves room for.
         compress: what lies in host memory is compressed there by the cpu, where that is done before it has to go back.
Differs  compression is off unless asked for, and is zero-value compression. The paper's heuristics against fragmentation are left out: its plans
         name no addresses here.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import BadInput, InfeasibleBudget
from ..ir import Compute, Copy, Free, Problem, Schedule, Step
from ..units import format_bytes
from ._codecs import can_code, with_codecs
from ._fit import device_peak
from ._gaps import Swap, build
from ._layers import is_conv
from .vdnn import kernels_with_room, offloads

DECIDES = "swap by layer"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram"}
LADDER = ("none", "alternate", "conv", "all")  # of dyn, the fastest first
CODEC, CODER = "zvc", "cpu"


def prepare(problem: Problem, *, compress: bool = False) -> Problem:
    return with_codecs(problem, [CODEC]) if compress else problem


def plan(problem: Problem, *, mode: str = "dyn", tier: str = "dram", compress: bool = False) -> Schedule:
    if mode not in (*LADDER, "dyn"):
        raise BadInput(f"mode is {mode!r}; vdnn_plus_plus knows {', '.join(LADDER)} and dyn")
    needed = {}
    for rung in LADDER if mode == "dyn" else (mode,):
        swaps = _offloads(problem, rung, tier)
        schedule = build(problem, swaps, variants=kernels_with_room(problem, swaps))
        needed[rung] = device_peak(problem, schedule)
        if mode != "dyn" or needed[rung] <= problem.budget_bytes:
            return _compressed(problem, schedule, swaps) if compress else schedule
    least = min(needed.values())
    raise InfeasibleBudget(f"even offloading all, vdnn_plus_plus needs {format_bytes(least)}", least_bytes=least)


def _offloads(problem: Problem, mode: str, tier: str) -> list[Swap]:
    swaps = [replace(swap, join=False) for swap in offloads(problem, "conv" if mode == "alternate" else mode, tier)]
    if mode != "alternate":
        return swaps
    convs = [op.id for op in problem.graph.ops if is_conv(op)]
    return [swap for swap in swaps if convs.index(swap.out_at) % 2 == 0]


# -- in the host's memory ---------------------------------------------------------------------------------------------------------------


def _compressed(problem: Problem, schedule: Schedule, swaps: list[Swap]) -> Schedule:
    """The same plan, with the cpu compressing what it has time for between its arrival and its way back."""
    again = {swap.storage: at for swap in swaps if (at := _decode_at(problem, swap)) is not None}
    due: dict[int, list[int]] = {}
    for storage, at in again.items():
        due.setdefault(at, []).append(storage)
    packed: set[int] = set()
    steps: list[Step] = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            for storage in due.get(step.op, ()):
                steps += _unpack(storage, swaps[0].tier) if storage in packed else []
                packed.discard(storage)
        elif isinstance(step, Copy) and step.dst == problem.device_tier and step.storage in packed:  # it goes back sooner than expected
            steps += _unpack(step.storage, step.src)
            packed.discard(step.storage)
        steps.append(step)
        if isinstance(step, Copy) and step.src == problem.device_tier and step.storage in again:
            steps += [Copy(step.storage, step.dst, step.dst, dst_form=CODEC), Free(step.storage, step.dst)]
            packed.add(step.storage)
    return replace(schedule, steps=tuple(steps))


def _unpack(storage: int, tier: str) -> list[Step]:
    return [Copy(storage, tier, tier, src_form=CODEC), Free(storage, tier, form=CODEC)]


def _decode_at(problem: Problem, swap: Swap) -> int | None:
    """The op before which the cpu must begin to decode; None where it has not the time for both ways, twice over, for it has others to do."""
    if CODER not in problem.machine.processor_named or not can_code(problem, CODEC, swap.storage, on=CODER):
        return None
    starts = problem.op_starts
    back = problem.coding_seconds(swap.storage, CODEC, "", CODER)
    there = starts[swap.out_at] + problem.machine.copy_seconds(problem.form_bytes(swap.storage), problem.device_tier, swap.tier)
    coded = there + 2 * problem.coding_seconds(swap.storage, "", CODEC, CODER)
    latest = starts[swap.in_at] - 2 * back
    if latest < coded:
        return None
    return max(op for op in range(swap.out_at + 1, swap.in_at + 1) if starts[op] <= latest)
