"""cdma: vDNN's copies, with the zeros left out on the way: the copy engine packs what is not zero behind a mask.

Paper    Rhu, O'Connor, Chatterjee, Pool, Keckler, HPCA 2018, arXiv:1705.01626.
Idea     what ReLUs leave behind is mostly zeros; an engine that skips them carries two to three times as much over the same bus.
Rule     what vDNN offloads goes as zero-value compression: a bit for each word and the words that are not zero, encoded and decoded by the copy
         engine at the rate at which it can read memory. Modes and kernels are vDNN's.
Differs  no GPU has the engine: the machine's links are given one that passes 0.6 of the memory's bandwidth, the share the paper sets aside
         (200 of 336 GB/s, from memory). engine=False packs with kernels of the device instead, where that pays. Densities are those of cDMA's own
         average by kind of layer (policies/_codecs.py) unless the problem brings some.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Problem, Schedule
from ._codecs import can_code, with_codecs
from ._gaps import Swap
from .vdnn import by_layer

DECIDES = "swap by layer, compressed"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it needs a copy engine that compresses, which no GPU has"
REQUIRES = {"dram"}
ENGINE_SHARE = 0.6  # of the memory's bandwidth, for the engine's reads
CODEC = "zvc"


def prepare(problem: Problem, *, engine: bool = True, tier: str = "dram") -> Problem:
    problem = with_codecs(problem, [CODEC])
    rate = problem.machine.device.bytes_per_second * ENGINE_SHARE
    if not engine or not rate:
        return problem
    ends = {problem.device_tier, tier}
    links = tuple(replace(link, codecs={CODEC: rate, **link.codecs}) if {link.src, link.dst} == ends else link for link in problem.machine.links)
    return replace(problem, machine=replace(problem.machine, links=links))


def plan(problem: Problem, *, mode: str = "dyn", kernels: str = "performance", tier: str = "dram", engine: bool = True) -> Schedule:
    """mode, kernels: as in vdnn. engine: of `prepare`."""
    return by_layer(problem, "cdma", mode, kernels, tier, lambda swap: _compressed(problem, swap))


def _compressed(problem: Problem, swap: Swap) -> Swap:
    codec = problem.costs.codec_named.get(CODEC)
    if codec is None or swap.storage not in codec.encoded_bytes:
        return swap
    by_engine = CODEC in problem.machine.link(problem.device_tier, swap.tier).codecs
    if by_engine or (can_code(problem, CODEC, swap.storage) and _pays(problem, swap)):
        return replace(swap, codec=CODEC)
    return swap


def _pays(problem: Problem, swap: Swap) -> bool:
    """Whether packing on the device and sending less takes less time than sending everything."""
    machine, device = problem.machine, problem.device_tier
    plain = machine.copy_seconds(problem.form_bytes(swap.storage), device, swap.tier)
    packed = machine.copy_seconds(problem.form_bytes(swap.storage, CODEC), device, swap.tier)
    return packed + problem.coding_seconds(swap.storage, "", CODEC, machine.device.name) < plain
