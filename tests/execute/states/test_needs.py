"""What placements take is known before anything is placed."""

from __future__ import annotations

import time

import torch
from execute.states.training import adamw, placed
from torch import nn

from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore
from tierwise.execute.states.needs import SLACK_BYTES
from tierwise.execute.states.placement import ON_DEVICE, Placement
from tierwise.execute.states.states import States


def two_layers() -> nn.Module:
    """Two regions of 1,024 weights and 256 biases, in bf16: 2,560 bytes each, without gaps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 256), nn.Linear(4, 256)).to(torch.bfloat16)


def needs(*placements: Placement, **options):
    model = two_layers()
    device = NullDevice(1 << 20)
    try:
        return States(model, adamw(model), {str(n): p for n, p in enumerate(placements)}, device, masters="fp32", **options).needs()
    finally:
        device.close()


def test_by_hand():
    on_device = Placement()
    assert needs(on_device, on_device).device_bytes == 2 * 1280 * 12  # master and two moments
    cpu = needs(on_device, Placement("host", "cpu", gradients="host"))
    assert cpu.device_bytes == 1280 * 12 and cpu.leaving_bytes == 2560
    # state, gradients, three bounce buffers of a page, two gradients of another batch (the larger parameter's)
    assert cpu.host_bytes == 1280 * 12 + 1280 * 2 + 3 * 4096 + 2 * 2048 + SLACK_BYTES
    streamed = needs(Placement("host", "streamed"), Placement("host", "streamed", "host", "host"), stream_chunk_elements=512)
    assert streamed.device_bytes == 3 * 512 * (12 + 2 + 2)  # three buffers: state, gradient, parameter of a chunk
    assert streamed.parameter_host_bytes == 4096 and streamed.window_bytes == 2560
    assert streamed.leaving_bytes == 2560 + 2560  # one unit's gradients leave, the other's are laid together
    disk = needs(Placement("nvme", "cpu", "nvme", "host"), on_device, stream_chunk_elements=1280)
    assert disk.nvme_bytes == 16384 + 4096 == disk.written_bytes_per_step  # 15,360 and 2,560 bytes in whole pages


def written_so_far(store) -> int:
    if store is None:
        return 0
    store._io._lane.drain()
    return store.bytes_written


def test_a_pool_of_that_size_is_enough_and_not_much_more_than_that(tmp_path):
    for placement in (
        Placement("host", "cpu", "host", "host"),
        Placement("host", "streamed", "device", "host"),
        Placement("nvme", "cpu", "nvme", "host"),
        ON_DEVICE,
    ):
        model = two_layers()
        optimizer = adamw(model)
        device = NullDevice(1 << 20)
        states = States(model, optimizer, {"0": placement, "1": placement}, device, masters="fp32", threads=1)
        wanted = states.needs()
        disk = placement.state == "nvme"
        pool = HostPool(wanted.host_bytes + disk * 2 * 4096, device)
        store = NvmeStore(tmp_path, wanted.nvme_bytes, pool, block_bytes=4096, requests=2) if disk else None
        states.install(pool=pool, store=store)
        assert pool.free_bytes < SLACK_BYTES + 2 * 2560 + 4096
        assert sum(tensor.nbytes for tensor in states.held_on_device()) == wanted.device_bytes
        written = written_so_far(store)
        for part in range(2):
            (model[1](model[0](torch.ones(2, 4, dtype=torch.bfloat16))[:, :4]).sum() / (part + 1)).backward()  # accumulation
        optimizer.step()
        states.flush()
        if store:
            assert written_so_far(store) - written == wanted.written_bytes_per_step
        states.close()
        if store:
            store.close()
        device.close()
        pool.close()


def test_updates_during_backward_share_a_few_blocks_for_gradients():
    """Eight units in host memory, whose updates are slow: three blocks for all of them, and backward waits for one to be free."""
    away = Placement("host", "cpu", gradients="host")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = {"update": "backward", "gradient_blocks": 3, "threads": 1}
    before = [p.detach().clone() for p in model.parameters()]
    with placed(model, optimizer, {str(n): away for n in range(8)}, before_copy=lambda direction, _: time.sleep(0.003), **options) as states:
        assert states.needs().host_bytes < States(model, optimizer, {str(n): away for n in range(8)}, states.device).needs().host_bytes
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            assert len(states._shelf._blocks) == 3 and sum(home.pending is not None for home in states.stored) <= 3
            optimizer.step()
            optimizer.zero_grad()
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    for p, value in zip(plain.parameters(), before, strict=True):
        p.data = value
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(2):
        plain(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
