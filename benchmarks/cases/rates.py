"""What one GPU, its link and its host sustain: the numbers a machine profile is made of."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDS = "cuda"
COLUMNS = ["what", "measured", "unit"]
REPEATS = 20


def run() -> list[list[Any]]:
    import psutil
    import torch

    rows: list[list[Any]] = [
        ["device memory", torch.cuda.get_device_properties(0).total_memory, "bytes"],
        ["host memory", psutil.virtual_memory().total, "bytes"],
        ["disk", shutil.disk_usage(Path.cwd()).total, "bytes"],
    ]
    for name, dtype, tf32 in _precisions(torch):
        rows.append([f"matmul 8192³ {name}, alone", _matmul(dtype, tf32, 1), "flop/s"])
        rows.append([f"matmul 8192³ {name}, ten in a row", _matmul(dtype, tf32, 10), "flop/s"])
    rows.append(["device copy, read + write", _device_copy(), "B/s"])
    rows.append(["one of many small kernels, launched from Python", _small_kernels(graph=False), "s"])
    rows.append(["one of many small kernels, in a CUDA graph", _small_kernels(graph=True), "s"])
    for size in (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 28):
        out, back = _link(size)
        rows.append([f"pinned copy of {size >> 10} KiB to the host", out, "B/s"])
        rows.append([f"pinned copy of {size >> 10} KiB to the device", back, "B/s"])
    rows.append(["op on the host over 1 number", _host_op(1), "s"])
    rows.append(["op on the host over 64 Ki numbers", _host_op(1 << 16), "s"])
    return rows


def _precisions(torch: Any) -> list[tuple[str, Any, bool]]:
    return [("bf16", torch.bfloat16, False), ("fp16", torch.float16, False), ("tf32", torch.float32, True), ("fp32", torch.float32, False)]


def _seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of one call on the device, after three to warm up."""
    import torch

    for _ in range(3):
        work()
    taken = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def _matmul(dtype: Any, tf32: bool, count: int) -> float:
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.manual_seed(0)  # random data: on zeros the chip draws less power and runs faster than it ever does in training
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))

    def products() -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    time.sleep(1)  # let the chip cool from the case before: at its power limit it slows down
    c = torch.empty_like(a)
    return count * 2 * 8192**3 / _seconds(products)


def _device_copy() -> float:
    import torch

    source = torch.empty(1 << 31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _small_kernels(*, graph: bool, count: int = 1000) -> float:
    import torch

    one = torch.ones(1, device="cuda")

    def many() -> None:
        for _ in range(count):
            one.add_(1)

    if not graph:
        return _seconds(many) / count
    many()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        many()
    return _seconds(recorded.replay) / count


def _link(size: int) -> tuple[float, float]:
    """Bytes per second of copies queued one behind the other, each way alone."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    count = max(4, (1 << 28) // size // 4)

    def copies(target: Any, source: Any) -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)

    return count * size / _seconds(lambda: copies(host, device)), count * size / _seconds(lambda: copies(device, host))


def _host_op(count: int) -> float:
    import torch

    numbers = torch.ones(count)
    taken = []
    for _ in range(1000):
        start = time.perf_counter()
        numbers.add_(1)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
