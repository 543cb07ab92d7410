"""Random traffic under random delays: nothing is ever wrong, and each safeguard taken away is noticed."""

from __future__ import annotations

import random
import time

import pytest
import torch

from tierwise.execute import homes
from tierwise.execute.copies import Copies
from tierwise.execute.device import CudaDevice, Direction
from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore

KIB = 1 << 10


def wrong_answers(device, pool, copies, *, steps: int, tier: str = "dram") -> int:
    """Tensors that came back different, or that left as something else, over `steps` random moves in memory that is always nearly full."""
    choose, wrong = random.Random(3), 0
    tickets, pendings = {}, {}
    for step in range(steps):
        value = step % 250 + 1
        tensor = device.empty(choose.choice([3 * KIB, 40 * KIB])).fill_(value)
        tickets[value] = copies.send(tensor, to=tier)
        if choose.random() < 0.3:
            copies.release_sent(join=choose.random() < 0.5)
        if choose.random() < 0.3:
            copies.release_sent([tickets[value]])
            tensor.fill_(0)  # after its copy: it must not be seen
        del tensor
        if choose.random() < 0.7:
            value = choose.choice(sorted(tickets))
            pendings[value] = copies.fetch(tickets[value])
        for value in [value for value in pendings if choose.random() < 0.4]:
            back = copies.wait(pendings.pop(value))
            wrong += not bool((back == value).all())
        for value in [value for value in tickets if choose.random() < 0.2]:
            del tickets[value]  # also while it is on its way
    copies.drain()
    return wrong + getattr(device, "lost_copies", 0)


def traffic(device, *, steps: int) -> int:
    pool = HostPool(640 * KIB, device)
    try:
        return wrong_answers(device, pool, Copies(device, pool), steps=steps)
    finally:
        device.close()
        pool.close()


class SlowCuda(CudaDevice):
    """A card whose lanes stand still for up to a millisecond before each copy, one of them longer."""

    def __init__(self, seed: int, slow: Direction | None) -> None:
        super().__init__()
        self._delays, self._slow = random.Random(seed), slow

    def copy(self, direction, destination, source, *, after=()):
        with torch.cuda.stream(self._streams[direction]):
            torch.cuda._sleep(self._delays.randrange(2_000_000) + 6_000_000 * (direction is self._slow))
        return super().copy(direction, destination, source, after=after)


def slow_device(kind: str, *, seed: int = 0, slow: Direction | None = None):
    if kind == "cuda":
        return SlowCuda(seed, slow)
    return NullDevice(4 << 20, max_delay_seconds=0.004, seed=seed, before_copy=lambda direction, _: time.sleep(0.006 * (direction is slow)))


KINDS = pytest.mark.parametrize("kind", ["null", pytest.param("cuda", marks=pytest.mark.gpu)])


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_wrong_under_random_delays(kind, seed):
    assert traffic(slow_device(kind, seed=seed), steps=150) == 0


@pytest.mark.gpu
def test_nothing_is_wrong_at_full_speed():
    assert traffic(CudaDevice(), steps=3000) == 0


def test_nothing_is_wrong_through_the_disk(tmp_path):
    device = NullDevice(4 << 20, max_delay_seconds=0.002, seed=1)
    pool = HostPool(640 * KIB, device)
    with NvmeStore(tmp_path, 1 << 20, pool, block_bytes=16 * KIB, requests=3) as store:
        assert wrong_answers(device, pool, Copies(device, pool, store), steps=80, tier="nvme") == 0
        assert store.bytes_written > 0
    device.close()
    pool.close()


class Forgetful(dict):
    def __setitem__(self, key, value):
        super().__setitem__(key, (value[0], None))


def without_waiting(monkeypatch):
    for device in (NullDevice, CudaDevice):
        monkeypatch.setattr(device, "wait", lambda device, event: None)


def without_holding_what_leaves(monkeypatch):
    original = Copies.__init__

    def init(copies, *args):
        original(copies, *args)
        copies._leaving = Forgetful()

    monkeypatch.setattr(Copies, "__init__", init)


def without_the_order_of_send_and_fetch(monkeypatch):
    original = homes.HostHome.read
    monkeypatch.setattr(homes.HostHome, "read", lambda home, destination, after: original(home, destination, ()))


def without_guarding_what_is_freed(monkeypatch):
    original = HostPool.free
    monkeypatch.setattr(HostPool, "free", lambda pool, block, after=(): original(pool, block))


@KINDS
@pytest.mark.parametrize(
    ("mutilate", "slow"),
    [
        (without_waiting, None),
        (without_holding_what_leaves, None),
        (without_the_order_of_send_and_fetch, Direction.OUT),
        (without_guarding_what_is_freed, Direction.IN),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_every_safeguard_taken_away_is_noticed(mutilate, slow, kind, monkeypatch):
    mutilate(monkeypatch)
    assert traffic(slow_device(kind, slow=slow), steps=150) > 0


def test_a_training_step_with_everything_sent_away_is_bit_for_bit_the_same():
    def step(copies):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32)) for _ in range(4)])
        weights = {weight.data_ptr() for weight in model.parameters()}

        def pack(tensor):
            return tensor if tensor.data_ptr() in weights else copies.send(tensor)

        def unpack(packed):
            return packed if isinstance(packed, torch.Tensor) else copies.wait(copies.fetch(packed))

        for number in range(3):
            batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(number))
            if copies is None:
                model(batch).square().mean().backward()
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    loss = model(batch).square().mean()
                    copies.release_sent(join=False)
                loss.backward()
                copies.release_sent()
        return [weight.grad for weight in model.parameters()]

    device = NullDevice(1 << 20, max_delay_seconds=0.002)
    pool = HostPool(1 << 20, device)
    for expected, gradient in zip(step(None), step(Copies(device, pool)), strict=True):
        assert torch.equal(expected, gradient)
    assert device.lost_copies == 0
    assert pool.free_bytes == pool.nbytes
    pool.close()
    device.close()
