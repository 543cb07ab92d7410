from __future__ import annotations

import time

import pytest
import torch

from tierwise.errors import CopyFault, OutOfDeviceMemory
from tierwise.execute.device import CudaDevice, Direction
from tierwise.execute.host_pool import HostPool
from tierwise.execute.lanes import Signal
from tierwise.execute.null_device import NullDevice
from tierwise.execute.torch_compat import let_segments_grow

MIB = 1 << 20
OUT, IN = Direction.OUT, Direction.IN


@pytest.fixture
def null():
    device = NullDevice(1000)
    yield device
    device.close()


def test_bytes_go_out_and_come_back(device, pool):
    there = device.empty(MIB)
    there.copy_(torch.arange(MIB) % 251)
    block = pool.allocate(MIB)
    left = device.copy(OUT, block.bytes, there, after=[device.mark()])
    back = device.empty(MIB)
    arrived = device.copy(IN, back, block.bytes, after=[device.mark(), left])
    device.wait(arrived)
    assert torch.equal(back, there)
    device.synchronize()
    assert left.done() and arrived.done() and not arrived.failed()
    assert device.exposed_seconds() >= 0


def test_memory_is_counted_and_the_cap_enforced(device):
    device.reset_peak()
    before = device.memory()
    tensor = device.empty(8 * MIB)
    assert device.owns(tensor) and not device.owns(torch.empty(3))
    assert device.memory().allocated_bytes == before.allocated_bytes + 8 * MIB
    device.resize(tensor.untyped_storage(), 0)
    assert device.memory().allocated_bytes == before.allocated_bytes
    device.resize(tensor.untyped_storage(), 4 * MIB)
    assert device.memory().allocated_bytes == before.allocated_bytes + 4 * MIB
    del tensor
    assert device.memory().allocated_bytes == before.allocated_bytes
    assert device.memory().peak_allocated_bytes == before.allocated_bytes + 8 * MIB
    if isinstance(device, CudaDevice):
        torch.cuda.empty_cache()
    device.cap(device.memory().reserved_bytes + 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.empty(150 * MIB)
    device.cap(None)
    assert device.empty(150 * MIB).numel() == 150 * MIB


def test_storages_are_counted_once_until_their_last_view_dies(null):
    base = null.empty(400)
    view = base[100:]
    null.adopt(view)
    assert null.memory().allocated_bytes == 400
    del base
    assert null.memory().allocated_bytes == 400
    with pytest.raises(torch.cuda.OutOfMemoryError, match="asked for 601 B with 400 B in use of 1000 B") as caught:
        null.empty(601)
    assert isinstance(caught.value, OutOfDeviceMemory)
    del view
    assert null.memory().allocated_bytes == 0
    assert null.memory().peak_allocated_bytes == 400


def test_what_ops_make_counts_while_observed(null):
    weight = torch.ones(10, requires_grad=True)
    host = torch.zeros(50)
    null.exempt(host)
    with null.observe():
        hidden = weight.exp()  # 40 B, saved for backward
        loss = (hidden * hidden).sum()  # 40 B for an instant, and 4 B
        host[:5] += 1
        assert null.memory().allocated_bytes == 44
        assert null.memory().peak_allocated_bytes == 84
        loss.backward()
        del loss, hidden
        assert null.memory().allocated_bytes == 40  # the gradient
        with pytest.raises(OutOfDeviceMemory):
            torch.empty(300)
    assert null.memory().allocated_bytes == 40
    weight.grad = None
    assert null.memory().allocated_bytes == 0
    assert not null.owns(host) and not null.owns(weight)


def test_fresh_memory_is_poison_until_its_copy_arrives(null):
    gate, host = Signal(), torch.zeros(8, dtype=torch.uint8)
    arriving = null.empty(8)
    event = null.copy(IN, arriving, host, after=[gate])
    assert arriving.view(torch.float32).isnan().all()
    gate.fire()
    null.wait(event)
    assert (arriving == 0).all()


def test_bytes_freed_before_their_copy_ran_are_lost_and_it_shows(null):
    gate, host = Signal(), torch.zeros(8, dtype=torch.uint8)
    leaving = null.empty(8).fill_(1)
    event = null.copy(OUT, host, leaving, after=[gate])
    del leaving
    assert null.memory().allocated_bytes == 0
    gate.fire()
    null.wait(event)
    assert null.lost_copies == 1
    assert host.view(torch.float32).isnan().all()


def test_lanes_run_beside_the_caller_and_beside_each_other(null):
    gate, host = Signal(), torch.zeros(8, dtype=torch.uint8)
    here = null.empty(8)
    held_up = null.copy(OUT, host, here, after=[gate])
    null.wait(null.copy(IN, here, host))
    assert not held_up.done()
    gate.fire()
    null.synchronize()
    assert held_up.done()


def test_delays_are_drawn_from_the_seed_and_waiting_for_them_is_exposed(monkeypatch):
    def delays(seed):
        device = NullDevice(1000, max_delay_seconds=0.5, seed=seed)
        drawn, host, here = [], torch.zeros(8, dtype=torch.uint8), device.empty(8)
        monkeypatch.setattr(time, "sleep", drawn.append)
        for _ in range(3):
            device.copy(OUT, host, here)
        device.synchronize()
        device.close()
        return drawn

    assert delays(1) == delays(1) != delays(2)
    monkeypatch.undo()
    device = NullDevice(1000, before_copy=lambda direction, nbytes: time.sleep(0.02))
    here = device.empty(8)
    device.wait(device.copy(OUT, torch.zeros(8, dtype=torch.uint8), here))
    assert 0.02 <= device.exposed_seconds() < 10
    device.close()


def test_a_failing_copy_is_one_clear_error_and_the_lane_goes_on():
    broken = [True]

    def before_copy(direction, nbytes):
        if broken.pop() if broken else False:
            raise OSError("the link is down")

    device = NullDevice(1000, before_copy=before_copy)
    here, host = device.empty(8), torch.zeros(8, dtype=torch.uint8)
    failing = device.copy(OUT, host, here)
    with pytest.raises(CopyFault, match="a copy of 8 B from device to host failed: the link is down"):
        device.wait(failing)
    device.wait(device.copy(OUT, host, here))
    device.close()


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("", ["expandable_segments:True"]),
        ("max_split_size_mb:64", ["max_split_size_mb:64,expandable_segments:True"]),  # what was said before still holds
        ("expandable_segments:False", []),
        ("backend:cudaMallocAsync", []),
    ],
)
def test_segments_grow_unless_the_user_said_otherwise(said, asked, monkeypatch):
    found = []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", said)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    let_segments_grow()
    assert found == asked


@pytest.mark.gpu
def test_compute_waits_for_a_copy_and_the_host_does_not():
    device = CudaDevice()
    pool = HostPool(32 * MIB, device)
    host, there = pool.allocate(32 * MIB).bytes.fill_(1), device.empty(32 * MIB)
    there.sum(dtype=torch.int64).item()  # to load a kernel, the first time, waits for all that runs
    with torch.cuda.stream(device._streams[IN]):
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
    event = device.copy(IN, there, host, after=[device.mark()])
    device.wait(event)
    total = there.sum(dtype=torch.int64)
    assert not event.done()
    assert total.item() == 32 * MIB and event.done()
    assert device.exposed_seconds() > 0.01
    pool.close()


@pytest.mark.gpu
def test_a_copy_leaves_after_the_compute_that_makes_its_bytes():
    device = CudaDevice()
    pool = HostPool(MIB, device)
    host, there = pool.allocate(MIB).bytes, device.empty(MIB)
    torch.cuda._sleep(100_000_000)
    there.fill_(3)
    device.copy(OUT, host, there, after=[device.mark()]).wait()
    assert (host == 3).all()
    pool.close()


@pytest.mark.gpu
def test_a_turn_given_to_others_leaves_alone_what_compute_has_still_to_read():
    CudaDevice().let_others(IN)  # to load a kernel, the first time, waits for all that runs
    device = CudaDevice()
    numbers = [torch.zeros(1, device="cuda") for _ in range(8192)]  # every hole of their size is theirs
    torch.cat(numbers)
    torch.cuda._sleep(500_000_000)
    read = torch.cat(numbers)
    del numbers[::2]
    device.let_others(IN)
    assert not read.any()


@pytest.mark.gpu
def test_a_refused_pin_leaves_no_error_behind():
    device = CudaDevice()
    assert "cudaHostRegister" in device.pin(0, 4096)
    torch.ones(5, device="cuda").add_(1).sum().item()
