from __future__ import annotations

import gc

import pytest
import torch

from tierwise.errors import CopyFault, MissingTier, OutOfHostMemory
from tierwise.execute import copies as copies_module
from tierwise.execute.copies import Copies
from tierwise.execute.device import Direction
from tierwise.execute.host_pool import HostPool
from tierwise.execute.lanes import Signal
from tierwise.execute.null_device import NullDevice

MIB = 1 << 20


def tensors():
    """Shapes that have broken other people's offloading."""
    torch.manual_seed(0)
    base = torch.randn(64, 48)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).repeat(100)
    complexes = torch.randn(10, 6, dtype=torch.complex64)
    return {
        "contiguous": base.clone(),
        "large": torch.randn(3 * MIB // 4),
        "transposed": base.clone().t(),
        "sliced": base.clone()[3:40:2, 5:],
        "expanded": torch.randn(1, 7).expand(5, 7),
        "overlapping": torch.randn(110).as_strided((10, 20), (5, 3)),
        "0-dim": torch.tensor(5, dtype=torch.int64),
        "0-dim in a storage": torch.arange(9)[4],
        "empty": torch.empty(0),
        "empty with shape": torch.empty(3, 0, 2).transpose(0, 2),
        "empty view": torch.randn(6)[2:2],
        "bf16": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "bool": base > 0,
        "int8": torch.arange(-100, 100, dtype=torch.int8),
        "uint16": torch.arange(7, dtype=torch.int32).to(torch.uint16),
        "complex": complexes.clone(),
        "conjugate": complexes.clone().conj(),
        "odd bits": special,
        "parameter": torch.nn.Parameter(base.clone()),
    }


def bits(tensor):
    """The elements' bytes, in order."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.flatten().view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("name", tensors())
def test_every_kind_of_tensor_comes_back_as_it_was(name, put, copies):
    kind = tensors()[name]
    storage = put(torch.empty(0, dtype=kind.dtype).set_(kind.untyped_storage()).detach())
    tensor = torch.empty(0, dtype=kind.dtype, device=storage.device).set_(storage.untyped_storage(), kind.storage_offset(), kind.shape, kind.stride())
    tensor = tensor.conj() if kind.is_conj() else tensor
    expected = bits(tensor)
    ticket = copies.send(tensor)
    del tensor, storage
    copies.release_sent([ticket])
    back = copies.wait(copies.fetch(ticket))
    assert (back.dtype, back.shape, back.stride(), back.is_conj()) == (kind.dtype, kind.shape, kind.stride(), kind.is_conj())
    assert bits(back) == expected


def test_a_negated_view_comes_back_with_its_values(put, copies):
    tensor = put(torch.randn(10, 6, dtype=torch.complex64)).conj().imag
    assert tensor.is_neg()
    assert bits(copies.wait(copies.fetch(copies.send(tensor)))) == bits(tensor)


@pytest.mark.parametrize("together", [True, False])
def test_views_of_one_storage_travel_once_and_come_back_as_views_of_one_storage(together, put, copies):
    base = put(torch.arange(600_000.0))
    views = [base[:100], base[50:200].view(10, 15).t(), base]
    expected = [bits(view) for view in views]
    tickets = copies.send_all(views) if together else [copies.send(view) for view in views]
    del base, views
    copies.release_sent()
    backs = [copies.wait(copies.fetch(ticket)) for ticket in tickets]
    assert [bits(back) for back in backs] == expected
    assert len({back.untyped_storage().data_ptr() for back in backs}) == 1
    counts = copies.counts()
    assert (counts.sent_copies, counts.sent_bytes, counts.fetched_copies, counts.fetched_bytes) == (1, 2_400_000, 1, 2_400_000)


def test_a_storage_written_to_since_is_sent_again(put, copies):
    tensor = put(torch.zeros(1000))
    before = copies.send(tensor)
    copies.release_sent(join=True)  # or the write below would overtake the copy
    tensor.add_(1)
    after = copies.send(tensor)
    assert bits(copies.wait(copies.fetch(before))) == bits(torch.zeros(1000))
    assert bits(copies.wait(copies.fetch(after))) == bits(torch.ones(1000))


def test_inference_tensors_have_no_versions_and_are_sent_anew(put, copies):
    with torch.inference_mode():
        tensor = put(torch.zeros(10))
        first = copies.send(tensor)
        copies.release_sent()
        tensor.add_(1)
        second = copies.send(tensor)
        assert copies.wait(copies.fetch(first)).sum() == 0
        assert copies.wait(copies.fetch(second)).sum() == 10


def test_small_storages_travel_in_one_copy(put, copies, pool):
    kinds = [torch.full((n + 1,), n, dtype=torch.float64) for n in range(40)] + [torch.tensor(7), torch.randn(MIB // 2)]
    there = [put(kind) for kind in kinds]
    tickets = copies.send_all(there)
    del there
    assert copies.counts().sent_copies == 2  # the pack, and the 2 MiB that go alone
    assert len({id(ticket.parcel) for ticket in tickets}) == 2
    copies.release_sent()
    backs = [copies.wait(copies.fetch(ticket)) for ticket in tickets]
    assert all(torch.equal(back.cpu(), kind) for back, kind in zip(backs, kinds, strict=True))
    assert all((back.data_ptr() - back.untyped_storage().data_ptr()) % 512 == 0 for back in backs)
    assert copies.counts().fetched_copies == 2
    del backs
    pendings = copies.fetch_all(tickets)
    for kind in kinds:
        assert torch.equal(copies.wait(pendings.pop(0)).cpu(), kind)  # each dropped at once: the pack still came once
    assert copies.counts().fetched_copies == 4


def test_packs_are_bounded_and_fall_apart_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr(copies_module, "PACK_BYTES", 2048)
    device = NullDevice(6000)
    pool, there = HostPool(MIB, device), [device.empty(600).fill_(n) for n in range(5)]
    copies = Copies(device, pool)
    copies.send_all(there)  # of 6000 bytes 3000 are in use: a pack of 2048 and 512 of padding fits, a second does not
    assert copies.counts().sent_copies == 1 + 2 + 1
    copies.drain()
    tickets = copies.send_all([tensor.add_(1) for tensor in there])
    copies.release_sent()
    del there
    assert [copies.wait(copies.fetch(ticket)).tolist() for ticket in tickets] == [[n + 1] * 600 for n in range(5)]
    pool.close()
    device.close()


def test_device_bytes_are_held_until_released_and_host_bytes_until_the_ticket_dies(put, copies, device, pool):
    before, free = device.memory().allocated_bytes, pool.free_bytes
    tensor = put(torch.randn(MIB))
    ticket = copies.send(tensor)
    del tensor
    assert device.memory().allocated_bytes == before + 4 * MIB
    copies.release_sent([ticket], join=True)
    assert device.memory().allocated_bytes == before
    for _ in range(2):  # as often as retain_graph wants
        pending = copies.fetch(ticket)
        assert device.memory().allocated_bytes == before + 4 * MIB
        back = copies.wait(pending)
        del pending, back
        assert device.memory().allocated_bytes == before
    assert pool.free_bytes == free - 4 * MIB
    del ticket
    assert pool.free_bytes == free


def test_release_without_join_never_waits_and_leaves_the_rest_for_later():
    device = NullDevice(10 * MIB, before_copy=lambda direction, nbytes: gate.wait())
    gate, pool = Signal(), HostPool(10 * MIB, device)
    copies = Copies(device, pool)
    ticket = copies.send(device.empty(MIB))
    copies.release_sent(join=False)
    assert device.memory().allocated_bytes == MIB
    gate.fire()
    device.synchronize()
    copies.release_sent([ticket], join=False)
    assert device.memory().allocated_bytes == 0 and device.lost_copies == 0
    pool.close()
    device.close()


def test_a_fetch_that_nobody_waits_for_harms_nobody(put, copies, device):
    before = device.memory().allocated_bytes
    ticket = copies.send(put(torch.randn(MIB)))
    copies.fetch(ticket)
    del ticket
    copies.drain()
    assert device.memory().allocated_bytes == before


def test_tickets_dropped_with_the_graph_give_their_host_bytes_back(put, copies, pool):
    free = pool.free_bytes
    weight = put(torch.randn(50_000)).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(copies.send, lambda ticket: copies.wait(copies.fetch(ticket)))
    with hooks:
        loss = (weight.sin().exp() * 2).sum()
    assert pool.free_bytes < free
    loss.backward()
    reference = weight.detach().clone().requires_grad_()
    (reference.sin().exp() * 2).sum().backward()
    assert torch.equal(weight.grad, reference.grad)
    with pytest.raises(RuntimeError, match="must match"), hooks:
        weight.sin().exp() + torch.ones(3, device=weight.device)
    del loss
    gc.collect()
    copies.drain()
    assert pool.free_bytes == free


def test_a_full_host_is_one_error_and_nothing_is_lost(put, copies, pool):
    held = pool.allocate(63 * MIB)
    free = pool.free_bytes
    with pytest.raises(OutOfHostMemory, match="allow more with host="):
        copies.send_all([put(torch.zeros(MIB // 8, dtype=torch.float64)), put(torch.zeros(MIB))])
    gc.collect()
    assert pool.free_bytes == free
    pool.free(held)
    assert copies.wait(copies.fetch(copies.send(put(torch.ones(MIB))))).sum() == MIB


def test_what_cannot_travel_is_refused(copies, put):
    with pytest.raises(CopyFault, match="is more than bytes and cannot be sent; keep it"):
        copies.send(torch.eye(3).to_sparse())
    with pytest.raises(CopyFault, match="cannot be sent from"):
        copies.send(torch.ones(3, device="cpu" if put(torch.ones(1)).is_cuda else "meta"))
    with pytest.raises(MissingTier, match="there is no tier 'nvme' to send to; there is dram"):
        copies.send(put(torch.ones(3)), to="nvme")


@pytest.mark.parametrize("direction", Direction)
def test_a_failed_copy_is_raised_at_the_next_wait_once_and_the_rest_goes_on(direction):
    failing = {direction}

    def before_copy(way, nbytes):
        if way in failing and nbytes == 1024:
            raise OSError("bit rot")

    device = NullDevice(MIB, before_copy=before_copy)
    pool = HostPool(MIB, device)
    copies, good, bad = Copies(device, pool), device.empty(2048).fill_(1), device.empty(1024).fill_(2)
    sound, broken = copies.send(good), copies.send(bad)
    device.synchronize()
    pending = copies.fetch(broken)
    with pytest.raises(CopyFault, match=r"a copy of 1.00 KiB .* failed: bit rot"):
        copies.wait(copies.fetch(sound))
        copies.wait(pending)
    assert torch.equal(copies.wait(copies.fetch(sound)), good)
    failing.clear()
    del pending
    if direction is Direction.OUT:
        with pytest.raises(CopyFault):  # what never left can never come back
            copies.wait(copies.fetch(broken))
    else:
        assert torch.equal(copies.wait(copies.fetch(broken)), bad)
    assert torch.equal(copies.wait(copies.fetch(copies.send(bad))), bad)  # sent again, if it never arrived
    del good, bad, sound, broken
    copies.release_sent()
    copies.drain()
    assert device.memory().allocated_bytes == 0 and pool.free_bytes == MIB
    pool.close()
    device.close()
