from __future__ import annotations

import gc
import logging
import mmap
import weakref

import psutil
import pytest
import torch

from tierwise.errors import OutOfHostMemory
from tierwise.execute import host_pool
from tierwise.execute.device import CudaDevice
from tierwise.execute.host_pool import PAGE_BYTES, HostPool
from tierwise.execute.lanes import Signal
from tierwise.execute.null_device import NullDevice

PAGE = PAGE_BYTES


@pytest.fixture
def null():
    device = NullDevice(1 << 20, pinnable_bytes=6 * PAGE)
    yield device
    device.close()
    assert not device.pinned


def test_the_slab_is_as_large_as_asked_and_blocks_are_views_of_it(null):
    pool = HostPool(5 * PAGE - 100, null)
    assert pool.nbytes == pool.pinned_bytes == sum(null.pinned.values()) == 5 * PAGE
    first, second = pool.allocate(1000), pool.allocate(3)
    assert [first.offset, second.offset] == [0, 1024]
    assert first.bytes.untyped_storage().data_ptr() == second.bytes.untyped_storage().data_ptr()
    assert first.bytes.data_ptr() % PAGE == 0 and first.nbytes == 1000
    assert pool.allocate(1, alignment=PAGE).offset == PAGE
    pool.free(first)
    assert pool.allocate(512).offset == 0
    with pytest.raises(OutOfHostMemory, match=r"no room for 20.0 KiB: .* of 20.0 KiB are free"):
        pool.allocate(5 * PAGE)
    pool.close()
    with pytest.raises(OutOfHostMemory, match="closed"):
        pool.allocate(1)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system takes no pages back")
def test_what_a_pool_that_dissolves_has_freed_is_the_systems_again(null):
    """Pages that were taken back are zero when they are read again. Those of a block are not while somebody has some of it, as of the second."""
    pool = HostPool(6 * PAGE, null)
    blocks = [pool.allocate(2 * PAGE) for _ in range(3)]
    for block in blocks:
        block.bytes.fill_(7)
    kept = blocks[1].lend(blocks[1].bytes[:8])
    pool.free(blocks[2])
    pool.dissolve()
    assert not null.pinned and pool.pinned_bytes == 0
    pool.free(blocks[0])
    pool.free(blocks[1])
    assert [block.bytes.unique().tolist() for block in blocks] == [[0], [7], [7]]  # the third was freed before, for the next one to use
    assert kept.tolist() == [7] * 8 and kept.untyped_storage().nbytes() == 8
    last = pool.allocate(2 * PAGE, alignment=PAGE)
    last.lend(last.bytes.fill_(7))
    pool.free(last)
    assert not last.bytes.any() and pool.free_bytes == pool.nbytes
    pool.close()


def test_the_same_requests_get_the_same_places_whatever_is_in_flight(null):
    pool, copy = HostPool(4 * PAGE, null), Signal()
    block = pool.allocate(PAGE)
    pool.free(block, [copy])
    again = pool.allocate(2 * PAGE)
    assert again.offset == 0
    assert [event.done() for event in again.after] == [False]
    copy.fire()
    assert [event.done() for event in again.after] == [True]
    pool.close()


def test_host_and_pinned_limits_are_separate(null):
    with pytest.raises(OutOfHostMemory, match=r"keeps 16.0 KiB in host memory and host= allows 8192B"):
        HostPool(4 * PAGE, null, host_limit_bytes=2 * PAGE)
    pool = HostPool(4 * PAGE, null, host_limit_bytes=4 * PAGE, pinned_limit_bytes=PAGE + 5)
    assert (pool.nbytes, pool.pinned_bytes) == (4 * PAGE, PAGE)
    blocks = [pool.allocate(PAGE), pool.allocate(2 * PAGE), pool.allocate(PAGE)]
    assert [(block.offset, block.pinned) for block in blocks] == [(0, True), (PAGE, False), (3 * PAGE, False)]
    for block in blocks:
        pool.free(block)
    assert pool.free_bytes == 4 * PAGE
    pool.close()


def test_memory_that_may_not_be_pinned_is_pageable_and_that_is_said_once(null, caplog):
    with caplog.at_level(logging.WARNING):
        pool = HostPool(512 * PAGE, null)  # 2 MiB and 1 MiB are refused
    assert pool.pinned_bytes == 0 and not pool.allocate(PAGE).pinned
    pool.close()
    null._pinnable_bytes = 300 * PAGE
    with caplog.at_level(logging.WARNING):
        pool = HostPool(512 * PAGE, null)
    assert pool.pinned_bytes == 256 * PAGE and list(null.pinned.values()) == [256 * PAGE]
    assert [record.getMessage() for record in caplog.records] == [
        "2.00 MiB of host memory stay pageable, copies from there are slower: the null device pins at most 24.0 KiB",
        "1.00 MiB of host memory stay pageable, copies from there are slower: the null device pins at most 1.17 MiB",
    ]
    assert pool.allocate(256 * PAGE).pinned and not pool.allocate(4 * PAGE).pinned
    pool.close()


def test_pages_are_touched_one_by_one_and_locked_by_one_registration(null):
    """A copy that reached from one registration into the next would be refused by a card."""
    seen = []
    pool = HostPool(5 * PAGE, null, touch_bytes=2 * PAGE, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2 * PAGE, 5 * PAGE), (4 * PAGE, 5 * PAGE), (5 * PAGE, 5 * PAGE)]
    assert list(null.pinned.values()) == [5 * PAGE]
    pool.close()


def test_an_exception_while_pinning_leaves_nothing_pinned_or_mapped(null, monkeypatch):
    slabs = watched_slabs(monkeypatch)

    def interrupted(done, total):
        if done == 4 * PAGE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostPool(6 * PAGE, null, touch_bytes=2 * PAGE, progress=interrupted)
    gc.collect()
    assert not null.pinned and slabs[0]() is None


def test_closing_or_forgetting_a_pool_unmaps_it_unless_a_view_lives(null, monkeypatch):
    slabs = watched_slabs(monkeypatch)
    closed = HostPool(PAGE, null)
    closed.close()
    closed.close()
    forgotten = HostPool(PAGE, null)
    del forgotten
    viewed = HostPool(PAGE, null)
    view = viewed.allocate(8).bytes
    viewed.close()
    assert [slab() is None for slab in slabs] == [True, True, False]
    assert not null.pinned
    view.fill_(3)
    del view
    assert slabs[2]() is None


def test_more_than_the_machine_has_is_refused_before_it_is_touched(null, monkeypatch):
    available = psutil.virtual_memory().available
    with pytest.raises(OutOfHostMemory, match="are available; close other programs or lower host="):
        HostPool(available * 2, null)
    monkeypatch.setattr(host_pool, "available_host_bytes", lambda: 1 << 62)
    with pytest.raises(OutOfHostMemory, match="the system refused"):
        HostPool(1 << 60, null)


def test_a_pool_is_host_memory_also_where_ops_are_observed(null):
    pool = HostPool(4 * PAGE, null)
    with null.observe():
        pool.allocate(100).bytes[3:].fill_(1)
    assert null.memory().allocated_bytes == 0
    pool.close()


def watched_slabs(monkeypatch) -> list[weakref.ref]:
    slabs, original = [], mmap.mmap

    def watched(*args, **kwargs):
        pages = original(*args, **kwargs)
        slabs.append(weakref.ref(pages))
        return pages

    monkeypatch.setattr(mmap, "mmap", watched)
    return slabs


@pytest.mark.gpu
def test_a_card_sees_the_slab_as_pinned_and_no_longer_after_closing(caplog):
    device = CudaDevice()
    pinned_by_torch = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    pool = HostPool(64 << 20, device, pinned_limit_bytes=32 << 20)
    pinned, pageable = pool.allocate(20 << 20), pool.allocate(20 << 20)
    assert pinned.pinned and pinned.bytes.is_pinned() and pinned.bytes[17 << 20 :].is_pinned()
    assert not pageable.pinned  # torch is not asked: with some drivers it takes the whole mapping for pinned
    assert torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) == pinned_by_torch
    pool.close()
    assert not pinned.bytes.is_pinned()
    torch.ones(3, device="cuda").sum().item()
    assert not caplog.records
