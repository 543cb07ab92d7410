"""The only file of profile that touches private names of torch; all of them are in 2.11 and in 2.13."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _unsafe_preserve_version_counter as version_kept  # type: ignore[attr-defined]

_PAUSE_CYCLES_PER_SECOND = 2e9  # no clock is faster

_TUNING = {"memory_warmup_iters": 10, "max_benchmark_duration": 5}  # milliseconds a variant, instead of 100 and 25

__all__ = ["has_data", "host_allocations", "pause_device", "quickly_tuned", "version_kept"]


def has_data(tensor: torch.Tensor) -> bool:
    """Neither fake nor meta."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def pause_device(seconds: float) -> None:
    """Keep the current CUDA stream busy with nothing, for at least so long."""
    torch.cuda._sleep(int(seconds * _PAUSE_CYCLES_PER_SECOND))


@contextlib.contextmanager
def quickly_tuned() -> Iterator[None]:
    """Compiled kernels choose among their variants in a fifth of the time: the least of a few runs is as good as that of many."""
    measure = InductorBenchmarker.benchmark_gpu

    def measured(self: InductorBenchmarker, work: Callable[[], Any], *args: Any, **settings: Any) -> Any:
        return measure(self, work, *args, **{**_TUNING, **settings})

    InductorBenchmarker.benchmark_gpu = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        InductorBenchmarker.benchmark_gpu = measure  # type: ignore[method-assign]


def host_allocations(work: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation (freed: less than nothing) of torch's CPU allocator while the work runs, compiled code included, in order."""
    level = "KINETO_LOG_LEVEL"
    before = os.environ.get(level)
    os.environ.setdefault(level, "99")  # read when the first profile starts; otherwise it writes to stderr that it does
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            work()
    finally:
        if before is None:
            del os.environ[level]
    seen = sorted(_all(profile.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
    return [event.extra_fields.alloc_size for event in seen if event.tag == torch._C._profiler._EventType.Allocation]


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)
