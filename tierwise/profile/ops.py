"""Each distinct op of a step timed once on the GPU, and remembered on disk by op, shapes, types, torch and GPU.

An op is repeated over several sets of inputs, so that what it reads comes from the GPU's memory and not from its cache, as in a real step.
Short ops take as long as Python needs to launch them, as they do in an eager step that has nothing else to hide them under. What cannot be
run by itself (and updates, which are one op a parameter here and one for many in a real optimizer) gets its roofline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..ir import Costs, Graph, Machine, Phase
from .roofline import roofline_costs
from .timing import device_seconds

ROTATED_BYTES = 1 << 28  # several times the largest cache
MAX_SETS = 8
# A chip that multiplies matrices without pause slows down by a seventh to stay within its power; in a step it has other work in between.
BURST_SECONDS, REST_SECONDS = 2e-3, 4e-3
Progress = Callable[[int, int], None]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierwise" / "ops.json"


class TimingCache:
    """Seconds by key; a file that cannot be read is an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.seconds: dict[str, float] = {str(key): float(value) for key, value in found.items()}
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
        seconds = op_seconds(recipes[op])
        if seconds is not None:
            remembered.seconds[key] = seconds
    if missing:
        remembered.save()
    table = dict(roofline_costs(graph, machine).op_seconds)
    for op in graph.ops:
        if op.phase is not Phase.UPDATE and (key := wanted.get(op.id)) in remembered.seconds:
            table[op.id, machine.device.name] = remembered.seconds[key]
    return Costs(table)


def op_seconds(recipe: Any) -> float | None:
    """Median seconds of one call on the GPU; None if it cannot be called by itself."""
    import torch

    if "efficient_attention" in str(recipe.op) and len(recipe.args) > 3 and recipe.args[3 + ("backward" in str(recipe.op))] is not None:
        return None  # with a bias whose layout it does not like, this kernel takes the process down
    device = torch.device("cuda")
    sets = max(1, min(MAX_SETS, ROTATED_BYTES // max(1, recipe.nbytes)))
    try:
        with torch.no_grad():
            calls = [recipe.prepare(device) for _ in range(sets)]

            def burst(count: int) -> None:
                for place in range(count):
                    calls[place % sets]()

            once = device_seconds(lambda: burst(1), repeats=2)
            count = max(1, min(64, int(BURST_SECONDS / max(once, 1e-6))))
            return device_seconds(lambda: burst(count), repeats=5, warm_up=1, rest_seconds=REST_SECONDS) / count
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    finally:
        if recipe.nbytes > 1 << 30:
            torch.cuda.empty_cache()
