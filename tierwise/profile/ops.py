"""Each distinct op of a step timed once on the GPU, and remembered on disk by op, shapes, types, torch and GPU.

An op is repeated over several sets of inputs, so that what it reads comes from the GPU's memory and not from its cache, as in a real step.
It has two times: on the GPU, with the queue full, and on the host, to be launched. A step takes the longer of the two sums, for the host runs
ahead of the GPU where it can. What cannot be run by itself (and updates, which are one op a parameter here and one for many in a real optimizer)
gets its roofline.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..ir import Costs, Graph, Machine, Phase
from .roofline import roofline_costs
from .timing import device_seconds

ROTATED_BYTES = 1 << 28  # several times the largest cache
MAX_SETS = 8
# A chip that multiplies matrices without pause slows down by a seventh to stay within its power; in a step it has other work in between.
BURST_SECONDS, REST_SECONDS, REPEATS = 2e-3, 4e-3, 5
PAUSE_CYCLES = 1_000_000  # about half a millisecond: long enough to launch sixteen ops behind it
Progress = Callable[[int, int], None]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierwise" / "ops.json"


class TimingCache:
    """Seconds by key; a file that cannot be read is an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.seconds: dict[str, tuple[float, float]] = {str(key): (float(device), float(host)) for key, (device, host) in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            self.seconds = {}

    def save(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.path.with_suffix(f".{os.getpid()}.part")
            scratch.write_text(json.dumps(self.seconds), encoding="utf-8")
            scratch.replace(self.path)
        except OSError:
            pass  # a cache that cannot be written costs time, nothing else


def measured_costs(
    graph: Graph, recipes: Mapping[int, Any], machine: Machine, *, cache: Path | None = None, progress: Progress = lambda done, total: None
) -> Costs:
    """Seconds of every op on this machine's GPU; `recipes` are those of capture, by op."""
    import torch

    remembered = TimingCache(cache or default_cache())
    where = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    wanted = {op: f"{recipe.key} on {where}" for op, recipe in recipes.items()}
    missing = {key: op for op, key in wanted.items() if key not in remembered.seconds}
    for done, (key, op) in enumerate(missing.items()):
        progress(done, len(missing))
        if (seconds := op_seconds(recipes[op])) is not None:
            remembered.seconds[key] = seconds
    if missing:
        remembered.save()
    table = dict(roofline_costs(graph, machine).op_seconds)
    timed = {
        op.id: remembered.seconds[wanted[op.id]]
        for op in graph.ops
        if op.phase is not Phase.UPDATE and op.id in wanted and wanted[op.id] in remembered.seconds
    }
    by_host = sum(host for _, host in timed.values()) > sum(device for device, _ in timed.values())
    table.update({(op, machine.device.name): host if by_host else device for op, (device, host) in timed.items()})
    return Costs(table)


def op_seconds(recipe: Any) -> tuple[float, float] | None:
    """Median seconds of one call on the GPU and on the host; None if it cannot be called by itself."""
    import torch

    if "efficient_attention" in str(recipe.op):
        return None  # its backward reads its random state on the host, wherever that lies, and takes the process down
    device = torch.device("cuda")
    sets = max(1, min(MAX_SETS, ROTATED_BYTES // max(1, recipe.nbytes)))
    try:
        with torch.no_grad():
            calls = [recipe.prepare(device) for _ in range(sets)]
            once = device_seconds(calls[0], repeats=2)
            count = max(1, min(64, int(BURST_SECONDS / max(once, 1e-6))))
            taken = [_burst(calls, count) for _ in range(REPEATS)]
            return tuple(statistics.median(times) / count for times in zip(*taken, strict=True))  # type: ignore[return-value]
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    finally:
        if recipe.nbytes > 1 << 30:
            torch.cuda.empty_cache()


def _burst(calls: list[Callable[[], Any]], count: int) -> tuple[float, float]:
    """Seconds of so many calls on the GPU, behind a pause in which the host gets them all into the queue, and on the host."""
    import torch

    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(PAUSE_CYCLES * max(1, count / 16)))  # type: ignore[no-untyped-call]
    start.record()
    began = time.perf_counter()
    for place in range(count):
        calls[place % len(calls)]()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, host
