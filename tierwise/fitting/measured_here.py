"""What no shipped profile knows: this machine's own links and disk, and how fast its CPU updates. Measured once, and remembered where that holds."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..execute.states.passes import HostRate, best_host
from ..execute.states.torchs import shadow_of
from ..ir import Machine, Menu, Phase
from ..profile.cache import TimingCache, cache_folder
from ..profile.links import Affine, measure_device_link, measure_disk
from ..profile.sustained import sustained
from .homes import MOVABLE

COPIES = tuple(1 << power for power in (20, 23, 26))  # enough for a rate; little memory is locked for it
UPDATED_ELEMENTS = 1 << 24  # half a GB: past every cache of a card
HOST_ELEMENTS = 1 << 26  # a GB: with a quarter of it a host's large caches still helped, and promised 6.1 G a second where steps have 4.4
UPDATE_BYTES = 28  # a parameter's gradient, master, two moments and the parameter itself, as CpuPass reads and writes them
# Parameters a second that plans count on alone. On hosts that have 4.1 to 4.3 G alone the cpu had 0.82 of it in steps, beside state that passes
# through the device; on hosts with 4.4 to 5.6 no more than 3.64, and once 3.0: both share host memory, and 0.82 of this is what it has.
MOST_UPDATED = 4.5e9
OTHER_THREADS = 2  # that have work all the time while a step runs: one launches the model's kernels, one drives state through the device


def with_links(machine: Machine, card: torch.device) -> Machine:
    """The machine with this one's rates between host and card; as it is where there is no memory left to measure them with."""
    remembered = TimingCache(cache_folder() / "here.json")
    key = f"links|{platform.node()}|{torch.cuda.get_device_name(card)}|{card.index}|{torch.__version__}"
    if key not in remembered:
        try:
            with torch.cuda.device(card):
                out, back = measure_device_link(COPIES)
        except RuntimeError:  # of the card or of what may be locked; torch's errors of memory are of this kind
            return machine
        finally:
            torch.cuda.empty_cache()  # what the budget caps has what torch keeps for later in it
        remembered[key] = (out.latency_seconds, out.bytes_per_second, back.latency_seconds, back.bytes_per_second)
        remembered.save()
    numbers = remembered[key]
    return with_rates_of_links(machine, Affine(*numbers[:2]), Affine(*numbers[2:]))


def with_rates_of_links(machine: Machine, out: Affine, back: Affine) -> Machine:
    device = machine.device.tier
    rates: dict[str, float] = {}
    latencies: dict[tuple[str, str], float] = {}
    for way, found in (((device, "dram"), out), (("dram", device), back)):
        latencies[way] = found.latency_seconds
        rates |= dict.fromkeys(machine.link(*way).lanes, found.bytes_per_second)
    links = [replace(link, latency_seconds=latencies.get((link.src, link.dst), link.latency_seconds)) for link in machine.links]
    return replace(machine, links=tuple(links)).with_rates(lambda _, lane, rate: rates.get(lane, rate))


def with_disk(machine: Machine, directory: Path) -> Machine:
    """The machine with the rates of the disk that a directory is on; as it is if nothing can be written there, which whoever opens it says."""
    with contextlib.suppress(OSError):
        rates = measure_disk(directory)
        return replace(machine, links=tuple(map(rates.applied, machine.links)))
    return machine


def host_rate() -> HostRate:
    """With how many threads, and on which processors, updates are fastest."""
    remembered = TimingCache(cache_folder() / "here.json")
    most = len(_processors())
    counts = most // 2, most * 3 // 4, most - OTHER_THREADS
    key = f"updates|{platform.node()}|{sorted(_processors())}|{counts}|{torch.__version__}"
    if key not in remembered:
        found = best_host(counts, elements=HOST_ELEMENTS)
        remembered[key] = (found.threads, found.parameters_per_second, *(found.cpus or ()))
        remembered.save()
    threads, rate, *cpus = remembered[key]
    return HostRate(int(threads), tuple(map(int, cpus)) or None, rate)


def with_card(menu: Menu, optimizer: torch.optim.Optimizer, card: torch.device) -> Menu:
    """The menu with the optimizer's updates on the card as fast as they are there. Torch's kernels are far from what a roofline promises."""
    graph, device, costs = menu.problem.graph, menu.problem.machine.device.name, menu.problem.costs
    elements = Counter[torch.dtype]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            elements[parameter.dtype] += parameter.numel()
    dtype, most = next(iter(elements.most_common(1)), (torch.float32, 0))
    updates = [(op.id, device) for op in graph.ops if op.phase is Phase.UPDATE and (op.id, device) in costs.op_seconds]
    promised = sum(costs.op_seconds[update] for update in updates)
    found = _update_seconds(optimizer, dtype, card) if most and promised and dtype in MOVABLE else None
    if found is None:
        return menu
    factor = found * elements.total() / promised
    seconds = {**costs.op_seconds, **{update: factor * costs.op_seconds[update] for update in updates}}
    return replace(menu, problem=replace(menu.problem, costs=replace(costs, op_seconds=seconds)))


def _update_seconds(optimizer: torch.optim.Optimizer, dtype: torch.dtype, card: torch.device) -> float | None:
    """For each element; None where there is no memory left to measure it with."""
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    remembered = TimingCache(cache_folder() / "here.json")
    how = {name: settings.get(name) for name in ("fused", "foreach", "amsgrad", "momentum")}
    name = torch.cuda.get_device_name(card) if card.type == "cuda" else platform.node()
    key = f"updates|{name}|{type(optimizer).__name__} {how} of {dtype}|{torch.__version__}"
    if key not in remembered:
        try:
            remembered[key] = (_timed_update(optimizer, settings, dtype, card) / UPDATED_ELEMENTS,)
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.cuda.empty_cache()  # what the budget caps has what torch keeps for later in it
        remembered.save()
    return remembered[key][0]


def _timed_update(optimizer: torch.optim.Optimizer, settings: dict[str, Any], dtype: torch.dtype, card: torch.device) -> float:
    piece = torch.empty(UPDATED_ELEMENTS, dtype=dtype, device=card).normal_(std=0.02)
    piece.grad = torch.randn_like(piece)
    shadow = shadow_of(optimizer, [{**settings, "params": [piece]}], defaultdict(dict))
    return sustained((shadow.step,), card, settle=False)[0].device_seconds


def _processors() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def with_host(menu: Menu, found: HostRate) -> Menu:
    """The menu with updates on the CPU as fast as they were found to be."""
    machine, rate = menu.problem.machine, UPDATE_BYTES * min(found.parameters_per_second, MOST_UPDATED)
    cpu = machine.processor_named.get("cpu")
    if cpu is None or not rate or cpu.bytes_per_second == rate:
        return menu
    factor = cpu.bytes_per_second / rate
    processors = tuple(replace(cpu, bytes_per_second=rate) if one is cpu else one for one in machine.processors)
    problem = replace(menu.problem, machine=replace(machine, processors=processors), costs=menu.problem.costs.slowed(factor, "cpu"))
    return replace(menu, problem=problem)
