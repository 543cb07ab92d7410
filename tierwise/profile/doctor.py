"""What on this machine will hurt, and the command that mends it: `tierwise doctor`. A pure function of what surroundings.py read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from ..units import format_bytes
from .surroundings import Disk, Gpu, Surroundings

LEAST_TORCH = (2, 11)  # pyproject.toml
FAR_BELOW_LINK = 2  # a link of half its lanes copies at half its speed
SLOW_DISK = 1e9  # bytes a second: below it even a slow PCIe link is ten times faster
LITTLE_DISK_BYTES = 50 << 30
IN_USE_BYTES = 1 << 30  # on the GPU before anything of ours runs: a desktop takes less
LOCKED_BYTES = 1 << 30  # as little as this is a default nobody chose
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smbfs", "lustre", "9p", "fuse.sshfs")


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # it will be slower, or smaller, than it could be
    BAD = "bad"  # it will not work


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    found: str
    mend: str = ""  # a command to type, or what to do where there is no command


def examine(here: Surroundings) -> tuple[Finding, ...]:
    return (
        *_torch(here),
        *_gpus(here),
        *_memory(here),
        *_locked(here),
        *_threads(here),
        *_compiler(here),
        *(_disk(here.disk) if here.disk else ()),
    )


def unusable(findings: tuple[Finding, ...]) -> bool:
    return any(finding.level is Level.BAD for finding in findings)


def _torch(here: Surroundings) -> Iterator[Finding]:
    wanted = ".".join(map(str, LEAST_TORCH))
    if here.torch is None:
        yield Finding("torch", Level.BAD, f"cannot be imported: {here.torch_problem}", f"pip install 'torch>={wanted}'")
        return
    version = tuple(int(part) for part in re.findall(r"\d+", here.torch)[:2])
    built = f"for CUDA {here.torch_cuda}" if here.torch_cuda else "without CUDA"
    if version < LEAST_TORCH:
        yield Finding("torch", Level.BAD, f"{here.torch}; {wanted} or newer is needed", f"pip install 'torch>={wanted}'")
    elif here.gpus and not here.torch_cuda:
        mend = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("torch", Level.BAD, f"{here.torch}, built without CUDA, and there is a GPU", mend)
    else:
        yield Finding("torch", Level.OK, f"{here.torch} {built}, Python {here.python}")


def _gpus(here: Surroundings) -> Iterator[Finding]:
    if not here.gpus:
        if here.torch_sees_gpu:
            yield Finding("gpu", Level.OK, "torch sees one; nvidia-smi is not here to say more")
        else:
            yield Finding("gpu", Level.OK, "none: planning and estimates need none")
        return
    for place, gpu in enumerate(here.gpus):
        name = "gpu" if len(here.gpus) == 1 else f"gpu {place}"
        yield _gpu(name, gpu, here)
        yield from _link(name, gpu)


def _gpu(name: str, gpu: Gpu, here: Surroundings) -> Finding:
    memory = f", {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else ""
    driver = f", driver {gpu.driver}" if gpu.driver else ""
    found = f"{gpu.name}{memory}{driver}"
    if not gpu.driver and not here.torch_sees_gpu:
        return Finding(name, Level.BAD, f"{found}: no driver answers", "install the driver, then check with: nvidia-smi")
    if here.torch_cuda and not here.torch_sees_gpu:
        why = f": {here.torch_problem}" if here.torch_problem else ""
        mend = f"update the driver to one for CUDA {here.torch_cuda}, or install a torch for the driver you have; check with: nvidia-smi"
        return Finding(name, Level.BAD, f"{found}; torch cannot use it{why}", mend)
    if gpu.used_bytes and gpu.used_bytes > IN_USE_BYTES:
        return Finding(name, Level.WARN, f"{found}; {format_bytes(gpu.used_bytes)} are in use already", "nvidia-smi   # names who holds them")
    if not here.triton and here.torch_sees_gpu:
        return Finding(name, Level.WARN, f"{found}; triton is missing, so nothing is compiled for it", "pip install triton")
    return Finding(name, Level.OK, found)


def _link(name: str, gpu: Gpu) -> Iterator[Finding]:
    width, width_max, generation, generation_max = gpu.link_width, gpu.link_width_max, gpu.link_generation, gpu.link_generation_max
    if width is None or width_max is None:
        return
    speed = f"PCIe {generation or '?'} x{width}"
    possible = f"PCIe {generation_max or '?'} x{width_max}"
    if width * FAR_BELOW_LINK <= width_max:
        mend = "move the card to a slot with all its lanes, or change how the BIOS splits them; then measure: tierwise machine --probe"
        yield Finding(f"{name} link", Level.WARN, f"{speed} of a possible {possible}: copies run at {width / width_max:.0%}", mend)
    elif generation and generation_max and generation < generation_max:
        # A card at rest lowers its link to save power and raises it when something is copied; only a measurement tells.
        yield Finding(
            f"{name} link", Level.OK, f"{speed} of a possible {possible}, which may be the card at rest: tierwise machine --probe measures it"
        )
    else:
        yield Finding(f"{name} link", Level.OK, speed)


def _memory(here: Surroundings) -> Iterator[Finding]:
    usable = here.memory_limit_bytes or here.memory_bytes
    found = f"{format_bytes(usable)}, {format_bytes(min(usable, here.memory_available_bytes))} free"
    largest = max((gpu.memory_bytes or 0 for gpu in here.gpus), default=0)
    if here.memory_limit_bytes is not None:
        found = f"limited to {found}; the machine has {format_bytes(here.memory_bytes)}"
        yield Finding("memory", Level.WARN, found, "start the container or job with more: docker run --memory=..., srun --mem=...")
    elif usable < largest:
        yield Finding("memory", Level.WARN, f"{found}: less than the GPU's {format_bytes(largest)}", "plan with a disk as well: nvme='DIR:200GiB'")
    else:
        yield Finding("memory", Level.OK, found)


def _locked(here: Surroundings) -> Iterator[Finding]:
    if here.wsl:
        # No number is promised, and users report 0.5 to 2 GB on machines of any size. What is refused stays pageable, one refusal at a time.
        found = "WSL lets CUDA pin little, often 1 GiB or less whatever ulimit says; the rest is copied at the speed of pageable memory"
        yield Finding("pinned memory", Level.WARN, found, "tierwise run --pinned 1GiB ...   # or train on Linux itself")
    if here.locked_bytes is not None and here.locked_bytes < LOCKED_BYTES:
        found = f"ulimit -l is {format_bytes(here.locked_bytes)}"
        if not here.gpus and not here.torch_sees_gpu:
            yield Finding("locked memory", Level.OK, f"{found}, which matters only with a GPU")
        else:
            mend = "docker run --ulimit memlock=-1 ..." if here.container else "ulimit -l unlimited   # for good: /etc/security/limits.conf"
            yield Finding("locked memory", Level.WARN, f"{found}: pinned buffers may be refused", mend)
    elif here.system.startswith("linux"):
        limit = "unlimited" if here.locked_bytes is None else format_bytes(here.locked_bytes)
        yield Finding("locked memory", Level.OK, f"ulimit -l is {limit}")


def _threads(here: Surroundings) -> Iterator[Finding]:
    of = f"{here.usable_cpus} of {here.cpus} cpus may be used" if here.usable_cpus < here.cpus else f"{here.cpus} cpus"
    if here.torch_threads is None:
        yield Finding("threads", Level.OK, of)
    elif here.torch_threads * 2 < here.usable_cpus:  # half is one thread a core where each core counts twice, and torch's own choice
        why = f" because OMP_NUM_THREADS={here.threads_variable}" if here.threads_variable else ""
        yield Finding("threads", Level.WARN, f"{of}, torch uses {here.torch_threads}{why}", f"export OMP_NUM_THREADS={here.usable_cpus}")
    elif here.torch_threads > here.usable_cpus:
        found = f"{of}, torch starts {here.torch_threads} threads, which take turns"
        yield Finding("threads", Level.WARN, found, f"export OMP_NUM_THREADS={here.usable_cpus}")
    else:
        yield Finding("threads", Level.OK, f"{of}, torch uses {here.torch_threads}")


def _compiler(here: Surroundings) -> Iterator[Finding]:
    if here.compiler is not None:
        yield Finding("compiler", Level.OK, here.compiler)
        return
    mend = {"darwin": "xcode-select --install", "win32": "winget install Microsoft.VisualStudio.2022.BuildTools"}.get(
        here.system, "apt-get install g++   # or: dnf install gcc-c++"
    )
    yield Finding("compiler", Level.WARN, "no C++ compiler: updates on the CPU are not compiled and run slower", mend)


def _disk(disk: Disk) -> Iterator[Finding]:
    space = f"{disk.directory}: {format_bytes(disk.free_bytes)} free{f' on {disk.file_system}' if disk.file_system else ''}"
    elsewhere = "tierwise doctor --disk DIR   # with a folder on a local NVMe disk"
    if disk.problem and disk.write_bytes_per_second is None and not disk.problem.startswith("not measured"):
        yield Finding("disk", Level.WARN, f"{disk.directory}: {disk.problem}", elsewhere)
        return
    if disk.file_system in MEMORY_FILE_SYSTEMS:
        yield Finding("disk", Level.WARN, f"{space}, which is memory and no disk", elsewhere)
        return
    if disk.file_system in NETWORK_FILE_SYSTEMS:
        yield Finding("disk", Level.WARN, f"{space}, which is across a network", elsewhere)
    elif disk.free_bytes < LITTLE_DISK_BYTES:
        yield Finding("disk", Level.WARN, f"{space}: little for a disk tier", elsewhere)
    else:
        yield Finding("disk", Level.OK, space)
    if disk.write_bytes_per_second and disk.read_bytes_per_second:
        through = "" if disk.direct else ", through the page cache: this file system knows no O_DIRECT"
        speed = f"writes {disk.write_bytes_per_second / 1e9:.2f} GB/s, reads {disk.read_bytes_per_second / 1e9:.2f} GB/s{through}"
        slow = min(disk.write_bytes_per_second, disk.read_bytes_per_second) < SLOW_DISK
        yield Finding("disk speed", Level.WARN if slow else Level.OK, f"{speed}{': slow for a tier' if slow else ''}", elsewhere if slow else "")
    elif disk.problem:
        yield Finding("disk speed", Level.OK, disk.problem)
