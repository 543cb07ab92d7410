"""The machine this runs on, measured: `tierwise machine --probe`. With a GPU or without one.

Without a GPU the cpu is the device and dram its tier: plans for such a machine move between memory and disk.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..ir import Link, Machine, Processor, Tier
from .links import DISK_REQUEST_BYTES, DISK_REQUESTS_IN_FLIGHT, measure_device_link, measure_disk
from .timing import device_seconds, host_seconds

MATMUL_SIZE = 8192  # on the device; the host's is a sixteenth of it
UPDATE_PARAMETERS = 1 << 24
UPDATE_BYTES = 28  # an fp32 AdamW update reads and writes parameter and two moments and reads the gradient
ASSUMED_DISK_LATENCY_SECONDS = 1e-4
ASSUMED_FAULT_SECONDS, ASSUMED_FAULT_BYTES = 45e-6, 50 * 4096  # as the G10 artifact has them for an A100
BOUNCE_BYTES = DISK_REQUEST_BYTES * DISK_REQUESTS_IN_FLIGHT
Progress = Callable[[str], None]


def probe(directory: Path, progress: Progress = lambda what: None) -> Machine:
    """Measure tiers, links and processors; the disk is the one `directory` is on. Takes some ten seconds."""
    import torch

    progress("disk")
    disk_rates = measure_disk(directory)
    progress("updates on the cpu")
    cpu = Processor("cpu", "dram", bytes_per_second=_update_rate(), launch_seconds=_host_op_seconds())
    disk = Tier("nvme", shutil.disk_usage(directory).free)
    dram = Tier("dram", host_memory_bytes())
    to_disk, from_disk = Link("dram", "nvme", {}, ASSUMED_DISK_LATENCY_SECONDS), Link("nvme", "dram", {}, ASSUMED_DISK_LATENCY_SECONDS)
    if not torch.cuda.is_available():
        progress("matrix products on the cpu")
        rates = {"fp32": _product_rate("cpu", torch.float32), "bf16": _product_rate("cpu", torch.bfloat16)}
        cpu = Processor("cpu", "dram", rates, cpu.bytes_per_second, cpu.launch_seconds)
        links = tuple(map(disk_rates.applied, (to_disk, from_disk)))
        return Machine(platform.node() or "here", (dram, disk), links, (cpu,), _source(f"{os.cpu_count()} cores, no GPU"))
    progress("copies between host and device")
    out, back = measure_device_link()
    hbm = Tier("hbm", torch.cuda.get_device_properties(0).total_memory)
    ways = (
        Link("hbm", "dram", {"out": out.bytes_per_second}, out.latency_seconds),
        Link(
            "dram", "hbm", {"in": back.bytes_per_second}, back.latency_seconds, fault_seconds=ASSUMED_FAULT_SECONDS, fault_bytes=ASSUMED_FAULT_BYTES
        ),
        Link("hbm", "nvme", {"out": out.bytes_per_second}, ASSUMED_DISK_LATENCY_SECONDS, "dram", BOUNCE_BYTES),
        Link(
            "nvme",
            "hbm",
            {"in": back.bytes_per_second},
            ASSUMED_DISK_LATENCY_SECONDS,
            "dram",
            BOUNCE_BYTES,
            fault_seconds=ASSUMED_FAULT_SECONDS,
            fault_bytes=ASSUMED_FAULT_BYTES,
        ),
        to_disk,
        from_disk,
    )
    progress("matrix products and memory on the device")
    gpu = Processor("gpu", "hbm", _device_rates(), _device_copy_rate(), _kernel_seconds())
    name = torch.cuda.get_device_name(0)
    return Machine(name, (hbm, dram, disk), tuple(map(disk_rates.applied, ways)), (gpu, cpu), _source(f"{name}, {os.cpu_count()} cores"))


def _source(what: str) -> str:
    import torch

    return (
        f"measured {time.strftime('%Y-%m-%d')} with torch {torch.__version__} on {what}; disk with {DISK_REQUESTS_IN_FLIGHT} requests of "
        f"{DISK_REQUEST_BYTES >> 20} MiB in flight, its latency and page faults assumed; "
        "cpu bandwidth from a fused fp32 AdamW update"
    )


def host_memory_bytes() -> int:
    """What this process may use: the machine's RAM, or the limit of its control group."""
    import psutil

    found = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return found


def _product_rate(device: str, dtype: Any) -> float:
    import torch

    size = MATMUL_SIZE if device == "cuda" else MATMUL_SIZE // 16
    torch.manual_seed(0)  # random data: on zeros a chip draws less power and runs faster than it ever does in training
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    measure = device_seconds if device == "cuda" else host_seconds
    return 2 * size**3 / measure(lambda: torch.mm(a, b, out=c), repeats=5)


def _device_rates() -> dict[str, float]:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        rates = {"bf16": _product_rate("cuda", torch.bfloat16), "fp16": _product_rate("cuda", torch.float16)}
        torch.set_float32_matmul_precision("high")
        rates["tf32"] = _product_rate("cuda", torch.float32)
        torch.set_float32_matmul_precision("highest")
        rates["fp32"] = _product_rate("cuda", torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


def _device_copy_rate() -> float:
    """Bytes a second read and written by a device copy."""
    import torch

    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def _kernel_seconds(count: int = 1000) -> float:
    """What one more small kernel costs on the device when the host keeps up."""
    import torch

    one = torch.ones(1, device="cuda")

    def many() -> None:
        for _ in range(count):
            one.add_(1)

    many()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        many()
    return device_seconds(recorded.replay) / count


def _update_rate() -> float:
    """Bytes a second of a fused AdamW update in host memory."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(UPDATE_PARAMETERS))
    parameter.grad = torch.ones(UPDATE_PARAMETERS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return UPDATE_BYTES * UPDATE_PARAMETERS / host_seconds(optimizer.step)


def _host_op_seconds() -> float:
    import torch

    numbers = torch.ones(1)

    def many() -> None:
        for _ in range(1000):
            numbers.add_(1)

    return host_seconds(many) / 1000
