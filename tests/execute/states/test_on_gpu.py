"""On a card: twenty steps with state at any home give the losses and parameters, to the bit, of the same arithmetic with all of it on the device."""

from __future__ import annotations

import pytest
import torch
from execute.states.test_placements import legal

from tierwise.execute.device import CudaDevice
from tierwise.execute.host_pool import HostPool
from tierwise.execute.nvme import NvmeStore
from tierwise.execute.states.placement import ON_DEVICE
from tierwise.execute.states.states import States

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_card")]
STEPS = 20
WITH_DISK_STEPS = 4  # a disk is slow, and what it does in a step it does in every one
MIB = 1 << 20


def llama(device: torch.device):
    from tierwise.zoo.llama import Llama

    torch.manual_seed(0)
    with device:
        return Llama(vocab=1024, layers=4, hidden=256, intermediate=704, heads=4).to(torch.bfloat16).train()


def trained(placements, update, steps, tmp_path, others=()):
    """Losses, and parameters in the end. After every fourth step homes are the next of the others."""
    device = CudaDevice()
    model = llama(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = {"stream_chunk_elements": 1 << 16, "cpu_chunk_elements": 1 << 16}
    made = lambda places: States(model, optimizer, places, device, regions=regions([ON_DEVICE]), update=update, masters="fp32", **sizes)  # noqa: E731
    states = made(placements)
    needs = states.needs()
    pool = HostPool(needs.host_bytes + 16 * MIB, device)
    store = NvmeStore(tmp_path, needs.nvme_bytes, pool, block_bytes=MIB, requests=2) if needs.nvme_bytes else None
    try:
        states.install(pool=pool, store=store)
        losses = []
        for step in range(steps):
            if others and step and step % 4 == 0:
                with pool.growing(16 * MIB):
                    before, states = states, made(others[step // 4 % len(others)])
                    states.install(pool=pool, before=before)
            tokens = torch.randint(1024, (4, 128), generator=torch.Generator().manual_seed(step)).to(device.torch_device)
            loss = model(input_ids=tokens, labels=tokens.roll(-1, 1))
            loss.backward()
            if update == "after":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        states.flush()
        found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        states.close()
    finally:
        if store is not None:
            store.close()
        pool.close()
    return losses, found


def regions(placements):
    """For each of the model's parts one of these, in turn."""
    parts = ["embedding", *(f"blocks.{layer}" for layer in range(4)), "norm", "head"]
    return {part: placements[number % len(placements)] for number, part in enumerate(parts)}


_references: dict[tuple[str, int], object] = {}


def check(placements, update, tmp_path, others=()):
    steps = WITH_DISK_STEPS if any("nvme" in (place.state, place.parameters) for place in placements.values()) else STEPS
    if (update, steps) not in _references:
        _references[update, steps] = trained(regions([ON_DEVICE]), update, steps, tmp_path)
    losses, parameters = _references[update, steps]
    seen, found = trained(placements, update, steps, tmp_path, others)
    assert seen == losses
    assert all(torch.equal(parameters[name], value) for name, value in found.items())


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("placement", legal(), ids=lambda p: f"{p.state}-{p.update}-{p.parameters}-{p.gradients}")
def test_every_home(placement, update, tmp_path):
    check(regions([placement]), update, tmp_path)


@pytest.mark.parametrize("update", ["after", "backward"])
def test_many_homes_in_one_step(update, tmp_path):
    in_memory = [place for place in legal() if "nvme" not in (place.state, place.parameters)]
    for first in range(0, len(in_memory), 6):
        check(regions(in_memory[first : first + 6]), update, tmp_path)


@pytest.mark.parametrize("update", ["after", "backward"])
def test_parts_of_a_block_in_many_homes(update, tmp_path):
    """They come, go and are updated by themselves, and are needed when the block runs."""
    in_memory = [place for place in legal() if "nvme" not in (place.state, place.parameters)]
    parts = [f"blocks.{layer}.{part}" for layer in range(4) for part in ("attention", "feed_forward.up", "feed_forward.down")]
    for first in range(0, len(in_memory), 4):
        some = in_memory[first : first + 4]
        check(regions(some) | {part: some[(number // 2) % len(some)] for number, part in enumerate(parts)}, update, tmp_path)


@pytest.mark.parametrize("update", ["after", "backward"])
def test_homes_that_change_in_the_midst_of_a_training(update, tmp_path):
    in_memory = [place for place in legal() if "nvme" not in (place.state, place.parameters)]
    others = [regions(in_memory[first:] + in_memory[:first]) for first in range(0, len(in_memory), 3)]
    check(others[-1], update, tmp_path, others)
