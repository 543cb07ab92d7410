"""Every mover test that names `device` runs on the null device with random delays and, where there is one, on a CUDA card."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch

from tierwise.execute.copies import Copies
from tierwise.execute.device import CudaDevice
from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice

MIB = 1 << 20


@pytest.fixture(autouse=True)
def needs_a_card(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_stays():
    before = set(threading.enumerate())
    yield
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("tierwise")]
    assert not [name for name in open_files() if ".scratch" in name or ".state" in name]


def open_files() -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            names.append(str(descriptor.readlink()))
    return names


@pytest.fixture(params=["null", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    device = NullDevice(256 * MIB, max_delay_seconds=0.003, seed=7) if request.param == "null" else CudaDevice()
    yield device
    device.close()
    assert getattr(device, "lost_copies", 0) == 0


@pytest.fixture
def pool(device):
    pool = HostPool(64 * MIB, device)
    yield pool
    pool.close()


@pytest.fixture
def copies(device, pool):
    copies = Copies(device, pool)
    yield copies
    copies.drain()


@pytest.fixture
def put(device):
    """Tensors as memory of the device."""

    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(device.torch_device, copy=True)
        if isinstance(device, NullDevice):
            device.adopt(tensor)
        return tensor

    return put
