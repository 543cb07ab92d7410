"""Each distinct op of a step timed once on the device, and remembered on disk by op, shapes, types, torch and device.

An op is repeated over several sets of inputs, so that what it reads comes from the device's memory and not from its cache, as in a real step.
It has two times: on the device, with the queue full, and on the host, to be launched. What cannot be run by itself has none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .cache import TimingCache, cache_folder
from .taken import Taken
from .torch_compat import pause_device

ROTATED_BYTES = 1 << 28  # several times the largest cache
MAX_SETS = 8
# A chip that multiplies matrices without pause slows down by a seventh to stay within its power; in a step it has other work in between.
BURST_SECONDS, REST_SECONDS, REPEATS = 2e-3, 4e-3, 5
PAUSE_SECONDS_PER_OP = 4e-5  # long enough to launch an op
Progress = Callable[[str], None]


def op_times(
    recipes: Mapping[int, Any], device: torch.device, *, cache: Path | None = None, progress: Progress = lambda what: None
) -> dict[int, Taken]:
    """Of every op that can be run by itself; `recipes` are those of capture, by op."""
    remembered = TimingCache(cache or cache_folder() / "ops.json")
    where = f"{device_name(device)}, torch {torch.__version__}"
    wanted = {op: f"{recipe.key} on {where}" for op, recipe in recipes.items()}
    missing = {key: op for op, key in wanted.items() if key not in remembered}
    for done, (key, op) in enumerate(missing.items(), start=1):
        progress(f"timing op {done} of {len(missing)}")
        if (taken := op_seconds(recipes[op], device)) is not None:
            remembered[key] = (taken.device_seconds, taken.host_seconds)
    remembered.save()
    return {op: Taken(*remembered[key]) for op, key in wanted.items() if key in remembered}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def op_seconds(recipe: Any, device: torch.device) -> Taken | None:
    """Medians of one call; None if it cannot be called by itself."""
    if "efficient_attention" in str(recipe.op):
        return None  # its backward reads its random state on the host, wherever that lies, and takes the process down
    sets = max(1, min(MAX_SETS, ROTATED_BYTES // max(1, recipe.nbytes)))
    try:
        with torch.no_grad():
            calls = [recipe.prepare(device) for _ in range(sets)]
            burst = _cuda_burst if device.type == "cuda" else _host_burst
            burst(calls, 1)
            once = min(burst(calls, 1).device_seconds for _ in range(2))
            count = max(1, min(64, int(BURST_SECONDS / max(once, 1e-6))))
            taken = [burst(calls, count) for _ in range(REPEATS)]
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    finally:
        if recipe.nbytes > 1 << 30 and device.type == "cuda":
            torch.cuda.empty_cache()
    return Taken(
        statistics.median(one.device_seconds for one in taken) / count,
        statistics.median(one.host_seconds for one in taken) / count,
    )


def _cuda_burst(calls: list[Callable[[], Any]], count: int) -> Taken:
    """Seconds of so many calls on the GPU, behind a pause in which the host gets them all into the queue, and on the host."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    pause_device(PAUSE_SECONDS_PER_OP * max(16, count))
    start.record()
    began = time.perf_counter()
    for place in range(count):
        calls[place % len(calls)]()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return Taken(start.elapsed_time(end) / 1e3, host)


def _host_burst(calls: list[Callable[[], Any]], count: int) -> Taken:
    began = time.perf_counter()
    for place in range(count):
        calls[place % len(calls)]()
    taken = time.perf_counter() - began
    return Taken(taken, taken)


def autograd_host_seconds(device: torch.device, *, nodes: int = 200) -> tuple[float, float]:
    """What the host spends on an op beyond launching it when autograd records it, and on its node in backward."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(nodes):
            y = y.neg()
        return y

    def seconds(work: Callable[[], Any]) -> float:
        taken = []
        for _ in range(7):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken) / nodes

    with torch.no_grad():
        bare = seconds(chain)
    with torch.enable_grad():
        forward = seconds(chain)
        kept = [chain() for _ in range(7)]
        backward = seconds(lambda: torch.autograd.grad(kept.pop(), x, torch.ones_like(x)))
    return max(0.0, forward - bare), max(0.0, backward - bare)
