"""What this machine is like, read and not judged (doctor.py judges). What cannot be read here is None: no GPU, no Linux, no torch are all fine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUERY = "name,memory.total,memory.used,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
DISPLAY_CLASS = "0x03"  # of PCI devices: GPUs, with or without a screen
VENDORS = {"0x10de": "NVIDIA GPU", "0x1002": "AMD GPU"}
GENERATIONS = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64": 6, "64.0": 6}  # by GT/s of a lane
QUICK_DISK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    driver: str = ""
    link_generation: int | None = None
    link_generation_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    directory: str
    free_bytes: int
    file_system: str = ""
    direct: bool | None = None  # whether files can be opened past the page cache
    write_bytes_per_second: float | None = None  # measured
    read_bytes_per_second: float | None = None
    problem: str = ""  # why it could not be written to or measured


@dataclass(frozen=True, slots=True)
class Surroundings:
    system: str  # sys.platform
    wsl: bool = False
    container: bool = False
    python: str = ""
    torch: str | None = None
    torch_cuda: str | None = None  # the CUDA that torch was built for
    torch_sees_gpu: bool = False
    torch_problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None  # of the control group, where it is less than the machine's
    memory_available_bytes: int = 0
    locked_bytes: int | None = None  # how much memory a process may lock; None: as much as it likes, or not known
    cpus: int = 1
    usable_cpus: int = 1  # by affinity and quota
    torch_threads: int | None = None
    threads_variable: str | None = None  # OMP_NUM_THREADS
    compiler: str | None = None
    triton: bool = False
    disk: Disk | None = None


def look_around(directory: Path, *, measure: bool = True, progress: Callable[[str], None] = lambda what: None) -> Surroundings:
    import psutil

    from .probe import host_memory_bytes

    progress("torch and the GPU")
    torch_facts = _torch()
    memory = psutil.virtual_memory()
    limit = host_memory_bytes()
    progress("the disk")
    return Surroundings(
        system=sys.platform,
        wsl="microsoft" in _read("/proc/version").lower(),
        container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ,
        python=platform.python_version(),
        torch=torch_facts.version,
        torch_cuda=torch_facts.cuda,
        torch_sees_gpu=torch_facts.sees_gpu,
        torch_problem=torch_facts.problem,
        torch_threads=torch_facts.threads,
        gpus=gpus(),
        memory_bytes=int(memory.total),
        memory_limit_bytes=limit if limit < memory.total else None,
        memory_available_bytes=int(memory.available),
        locked_bytes=_locked_bytes(),
        cpus=os.cpu_count() or 1,
        usable_cpus=_usable_cpus(),
        threads_variable=os.environ.get("OMP_NUM_THREADS"),
        compiler=_compiler(),
        triton=_importable("triton"),
        disk=look_at_disk(directory, measure=measure),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# -- GPUs -------------------------------------------------------------------------------------------------------------------------------


def gpus() -> tuple[Gpu, ...]:
    """As nvidia-smi lists them; without it, as the PCI bus does."""
    said = _answer("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    found = tuple(_from_smi(line) for line in said.splitlines() if line.count(",") >= 7)
    return found or _from_pci(Path("/sys/bus/pci/devices"))


def _from_smi(line: str) -> Gpu:
    name, total, used, driver, generation, generation_max, width, width_max = [part.strip() for part in line.rsplit(",", 7)]
    mib = [number << 20 if (number := _whole(text)) is not None else None for text in (total, used)]
    return Gpu(name, mib[0], mib[1], driver, _whole(generation), _whole(generation_max), _whole(width), _whole(width_max))


def _from_pci(devices: Path) -> tuple[Gpu, ...]:
    found = []
    for device in sorted(devices.glob("*")):
        vendor = VENDORS.get(_read(device / "vendor"))
        if vendor and _read(device / "class").startswith(DISPLAY_CLASS):
            speeds = [GENERATIONS.get(_read(device / f"{when}_link_speed").split(" ")[0]) for when in ("current", "max")]
            widths = [_whole(_read(device / f"{when}_link_width")) for when in ("current", "max")]
            found.append(Gpu(f"{vendor} at {device.name}", None, None, "", *speeds, *widths))
    return tuple(found)


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


# -- torch ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Torch:
    version: str | None = None
    cuda: str | None = None
    sees_gpu: bool = False
    threads: int | None = None
    problem: str = ""


def _torch() -> _Torch:
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torch

            sees = torch.cuda.is_available()
        except (ImportError, OSError, RuntimeError) as error:
            return _Torch(problem=str(error).splitlines()[0] if str(error) else type(error).__name__)
    about_cuda = [str(warning.message).splitlines()[0] for warning in said if "cuda" in str(warning.message).lower()]
    return _Torch(str(torch.__version__), torch.version.cuda, sees, torch.get_num_threads(), "" if sees else next(iter(about_cuda), ""))


def _importable(name: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _compiler() -> str | None:
    """The C++ compiler that torch would use, with its version."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl")):
        if shutil.which(name):
            words = _answer(name, "--version").splitlines()
            return words[0].strip() if words else name
    return None


# -- memory and threads -----------------------------------------------------------------------------------------------------------------


def _locked_bytes() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _usable_cpus() -> int:
    """By affinity, and by the quota of the control group: '200000 100000' is two cpus."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


# -- the disk ---------------------------------------------------------------------------------------------------------------------------


def look_at_disk(directory: Path, *, measure: bool) -> Disk:
    from .links import measure_disk

    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Disk(str(directory), 0, problem=error.strerror or str(error))
    kind = _file_system(directory)
    try:
        direct = _opens_directly(directory)
    except OSError as error:
        return Disk(str(directory), free, kind, problem=error.strerror or str(error))
    if not measure or free < 2 * QUICK_DISK_BYTES:
        return Disk(str(directory), free, kind, direct)
    try:
        rates = measure_disk(directory, QUICK_DISK_BYTES)
    except (OSError, AttributeError) as error:  # a system without preadv
        return Disk(str(directory), free, kind, direct, problem=f"not measured: {error}")
    return Disk(str(directory), free, kind, direct, rates.write, rates.read)


def _opens_directly(directory: Path) -> bool | None:
    import tempfile

    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tierwise-probe-") as file:
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return None
        try:
            os.close(os.open(file.name, os.O_RDONLY | flag))
        except OSError:
            return False
        return True


def _file_system(directory: Path) -> str:
    """The type of the file system a directory is on: ext4, tmpfs, overlay."""
    import psutil

    inside = [part for part in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(part.mountpoint)]
    return max(inside, key=lambda part: len(part.mountpoint)).fstype if inside else ""
