"""cswap: swap each layer's input as vDNN does, and compress a tensor before it leaves only where that is predicted to pay.

Paper    Chen, He, Zhang, Hu, Li, Zhang, Zhang, IEEE CLUSTER 2021.
Idea     a tensor with few zeros, or one whose copy is hidden anyway, only loses by being compressed; the others gain.
Rule     for bytes S, encoded bytes E, rates out and in, seconds of coding c and d, and seconds h_f, h_b of compute the copies can hide behind:
         plain  max(0, S/out - h_f) + max(0, S/in - h_b)
         coded  max(0, E/out + c - h_f) + max(0, E/in + d - h_b);  the codec with the least, if that is less than plain.
Differs  the inequality is from memory, and the swaps under it are vDNN's, its kernels too, without the wait at the end of a layer: what the paper
         swaps was not to be had. c and d come from rates, not from a regression. Codecs are ZVC and CSR, not RLE and LZ4. Sparsity is by kind of
         layer unless the problem brings it, and does not change over training. h_f is the layer the copy leaves under, h_b what runs from its fetch
         to its use.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Problem, Schedule
from ._codecs import can_code, with_codecs
from ._gaps import Swap
from .vdnn import by_layer

DECIDES = "swap by layer; codec by tensor"
FIDELITY = "like"
EXECUTABLE = "simulated only: copies of this runtime carry bytes as they are"
REQUIRES = {"dram"}
CODECS = ("zvc", "csr")


def prepare(problem: Problem) -> Problem:
    return with_codecs(problem, CODECS)


def plan(problem: Problem, *, mode: str = "dyn", kernels: str = "performance", tier: str = "dram") -> Schedule:
    """mode, kernels: as in vdnn."""
    return by_layer(problem, "cswap", mode, kernels, tier, lambda swap: replace(swap, join=False, codec=best_codec(problem, swap, CODECS)))


def best_codec(problem: Problem, swap: Swap, names: tuple[str, ...]) -> str:
    """The codec with which the copies of a swap stick out least, or none."""
    known = [name for name in names if can_code(problem, name, swap.storage)]
    return min(["", *known], key=lambda name: exposed_seconds(problem, swap, name))


def exposed_seconds(problem: Problem, swap: Swap, codec: str) -> float:
    """What the copies out and back take beyond the compute they can hide behind, coding included."""
    machine, device, starts = problem.machine, problem.device_tier, problem.op_starts
    uses = problem.graph.uses[swap.storage]
    needed_at = min((use for use in uses if use >= swap.in_at), default=swap.in_at)
    hide_out = starts[min(swap.out_at + 1, len(starts) - 1)] - starts[swap.out_at]
    hide_back = starts[needed_at] - starts[swap.in_at]
    nbytes = problem.form_bytes(swap.storage, codec)
    out, back = machine.copy_seconds(nbytes, device, swap.tier), machine.copy_seconds(nbytes, swap.tier, device)
    if codec:
        out += problem.coding_seconds(swap.storage, "", codec, machine.device.name)
        back += problem.coding_seconds(swap.storage, codec, "", machine.device.name)
    return max(0.0, out - hide_out) + max(0.0, back - hide_back)
