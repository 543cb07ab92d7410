"""Machines that hurt, one thing at a time: what is found, how bad it is, and that there is a command against it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tierwise.profile import surroundings
from tierwise.profile.doctor import Level, examine, unusable
from tierwise.profile.surroundings import Disk, Gpu, Surroundings, gpus, look_around, look_at_disk

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", 140 * GIB, 0, "580.95", 5, 5, 16, 16)
WELL = Surroundings(
    system="linux", python="3.12.1", torch="2.11.0+cu130", torch_cuda="13.0", torch_sees_gpu=True, gpus=(H200,), memory_bytes=512 * GIB,
    memory_available_bytes=500 * GIB, cpus=32, usable_cpus=32, torch_threads=16, compiler="g++ 13", triton=True,
    disk=Disk("/scratch", 900 * GIB, "ext4", True, 3e9, 4e9),
)  # fmt: skip


def hurts(**changes):
    """What is not ok on a machine that is well but for these changes."""
    return [finding for finding in examine(replace(WELL, **changes)) if finding.level is not Level.OK]


def test_a_machine_that_is_well():
    assert hurts() == []
    assert [finding.name for finding in examine(WELL)] == [
        "torch",
        "gpu",
        "gpu link",
        "memory",
        "locked memory",
        "threads",
        "compiler",
        "disk",
        "disk speed",
    ]
    assert not unusable(examine(WELL))


SICK = {
    "no torch": ({"torch": None, "torch_problem": "No module named 'torch'"}, "torch", Level.BAD, "cannot be imported", "pip install"),
    "old torch": ({"torch": "2.4.1+cu121"}, "torch", Level.BAD, "2.4.1+cu121; 2.11 or newer", "pip install 'torch>=2.11'"),
    "torch without CUDA": ({"torch_cuda": None, "torch_sees_gpu": False}, "torch", Level.BAD, "built without CUDA", "--index-url"),
    "old driver": (
        {"torch_sees_gpu": False, "torch_problem": "The NVIDIA driver is too old"}, "gpu", Level.BAD, "cannot use it: The NVIDIA driver", "13.0"
    ),
    "no driver": ({"gpus": (Gpu("NVIDIA GPU at 0000:01:00.0"),), "torch_sees_gpu": False}, "gpu", Level.BAD, "no driver answers", "nvidia-smi"),
    "someone else": ({"gpus": (replace(H200, used_bytes=30 * GIB),)}, "gpu", Level.WARN, "30.0 GiB are in use", "nvidia-smi"),
    "no triton": ({"triton": False}, "gpu", Level.WARN, "triton is missing", "pip install triton"),
    "half the lanes": ({"gpus": (replace(H200, link_width=8),)}, "gpu link", Level.WARN, "PCIe 5 x8 of a possible PCIe 5 x16: copies", "slot"),
    "cgroup": ({"memory_limit_bytes": 64 * GIB}, "memory", Level.WARN, "limited to 64.0 GiB, 64.0 GiB free; the machine has 512 GiB", "--memory"),
    "little memory": (
        {"memory_bytes": 64 * GIB, "memory_available_bytes": 60 * GIB}, "memory", Level.WARN, "60.0 GiB free: less than the GPU's 140 GiB", "nvme="
    ),
    "WSL": ({"wsl": True}, "pinned memory", Level.WARN, "often 1 GiB or less", "--pinned 1GiB"),
    "ulimit": ({"locked_bytes": 8 << 20}, "locked memory", Level.WARN, "ulimit -l is 8.00 MiB", "ulimit -l unlimited"),
    "ulimit in a container": ({"locked_bytes": 8 << 20, "container": True}, "locked memory", Level.WARN, "8.00 MiB", "docker run --ulimit memlock"),
    "one thread": ({"torch_threads": 1, "threads_variable": "1"}, "threads", Level.WARN, "because OMP_NUM_THREADS=1", "export OMP_NUM_THREADS=32"),
    "too many threads": ({"usable_cpus": 4, "torch_threads": 32}, "threads", Level.WARN, "4 of 32 cpus may be used", "export OMP_NUM_THREADS=4"),
    "no compiler": ({"compiler": None}, "compiler", Level.WARN, "no C++ compiler", "apt-get install g++"),
    "no compiler on a Mac": ({"compiler": None, "system": "darwin"}, "compiler", Level.WARN, "no C++", "xcode-select --install"),
    "memory as a disk": ({"disk": Disk("/dev/shm", 90 * GIB, "tmpfs", True, 9e9, 9e9)}, "disk", Level.WARN, "memory and no disk", "--disk DIR"),
    "a network": ({"disk": Disk("/home", 900 * GIB, "nfs4")}, "disk", Level.WARN, "across a network", "--disk DIR"),
    "a full disk": ({"disk": Disk("/", 3 * GIB, "ext4")}, "disk", Level.WARN, "3.00 GiB free on ext4: little", "--disk DIR"),
    "a slow disk": ({"disk": Disk("/", 900 * GIB, "ext4", True, 2e8, 4e9)}, "disk speed", Level.WARN, "writes 0.20 GB/s", "--disk DIR"),
    "no folder": ({"disk": Disk("/nope", 0, problem="No such file or directory")}, "disk", Level.WARN, "/nope: No such file", "--disk DIR"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "level", "found", "mend"), SICK.values(), ids=SICK)
def test_one_thing_that_hurts(changes, name, level, found, mend):
    (finding,) = hurts(**changes)
    assert (finding.name, finding.level) == (name, level)
    assert found in finding.found and mend in finding.mend
    assert unusable(examine(replace(WELL, **changes))) is (level is Level.BAD)


def test_a_laptop_without_a_gpu_is_usable():
    laptop = replace(
        WELL, gpus=(), torch="2.13.0+cpu", torch_cuda=None, torch_sees_gpu=False, triton=False, locked_bytes=8 << 20, memory_bytes=16 * GIB
    )
    assert all(finding.level is Level.OK for finding in examine(laptop))


def test_a_link_at_rest_is_not_called_slow():
    (link,) = [finding for finding in examine(replace(WELL, gpus=(replace(H200, link_generation=1),))) if finding.name == "gpu link"]
    assert link.level is Level.OK and "at rest" in link.found


def test_a_disk_through_the_page_cache_says_so():
    speed = examine(replace(WELL, disk=Disk("/", 900 * GIB, "overlay", False, 3e9, 9e9)))[-1]
    assert speed.level is Level.OK and "knows no O_DIRECT" in speed.found


# -- reading ----------------------------------------------------------------------------------------------------------------------------


def test_what_nvidia_smi_says(monkeypatch):
    said = "NVIDIA H200, 143771, 4, 580.95.05, 1, 5, 16, 16\nNVIDIA GB10, [N/A], [N/A], 580.95.05, [N/A], [N/A], [N/A], [N/A]\n"
    monkeypatch.setattr(surroundings, "_answer", lambda *command: said)
    assert gpus() == (Gpu("NVIDIA H200", 143771 << 20, 4 << 20, "580.95.05", 1, 5, 16, 16), Gpu("NVIDIA GB10", driver="580.95.05"))


def test_what_the_pci_bus_says_without_a_driver(tmp_path):
    files = {
        "vendor": "0x10de",
        "class": "0x030000",
        "current_link_speed": "8.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "8",
        "max_link_width": "16",
    }
    for device, vendor in (("0000:01:00.0", "0x10de"), ("0000:02:00.0", "0x8086")):
        (tmp_path / device).mkdir()
        for name, text in (files | {"vendor": vendor}).items():
            (tmp_path / device / name).write_text(text + "\n")
    assert surroundings._from_pci(tmp_path) == (Gpu("NVIDIA GPU at 0000:01:00.0", None, None, "", 3, 4, 8, 16),)


def test_here(tmp_path: Path):
    here = look_around(tmp_path, measure=False)
    assert here.system == sys.platform and here.memory_bytes > 0 and 1 <= here.usable_cpus <= here.cpus
    assert here.disk.directory == str(tmp_path) and here.disk.free_bytes > 0 and here.disk.write_bytes_per_second is None
    assert examine(here)
    assert list(tmp_path.iterdir()) == []


def test_a_quota_is_a_limit_on_cpus(monkeypatch):
    monkeypatch.setattr(surroundings, "_read", lambda path: "150000 100000" if "cpu.max" in str(path) else "")
    assert surroundings._usable_cpus() == 1


def test_the_disk_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(surroundings, "QUICK_DISK_BYTES", 32 << 20)
    disk = look_at_disk(tmp_path, measure=True)
    assert disk.problem == "" and disk.write_bytes_per_second > 0 and disk.read_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
    assert look_at_disk(tmp_path / "none", measure=True).problem == "No such file or directory"
