"""Things that go wrong below: one clear error each, nothing left behind, and a model that trains on, or is given back as it was."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import threading

import pytest
import torch
from fitting.training import batch, equal, fitting, forced, gradients, three_steps, tower, trained

from tierwise.errors import BadInput, CopyFault, CorruptBlock, OutOfHostMemory, StorageFault, StorageFull
from tierwise.execute import host_pool
from tierwise.execute.files import PageFile
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fit, release


@pytest.fixture
def to_disk(monkeypatch):
    with forced(monkeypatch, "keep", send=True, tier="nvme"):
        yield


def step(model) -> list:
    model(**batch(0)).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def trains_on(model, found, expected) -> None:
    """The next step is right, and then nothing is held anywhere."""
    model.zero_grad()
    assert equal(step(model), expected)
    assert found.below.used_bytes == 0
    assert found.below.copies.in_flight() == 0


def test_a_disk_that_is_full_while_writing(tmp_path, to_disk, monkeypatch):
    model, expected = tower(), step(tower())
    with fitting(model, budget="64MiB", nvme=f"{tmp_path}:8MiB", host="256KiB") as found:
        with monkeypatch.context() as patch:

            def full(file, data, offset):
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(PageFile, "_put", full)
            with pytest.raises(StorageFull, match=r"writing .* failed.*No space left on device"):
                step(model)
        trains_on(model, found, expected)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_start(tmp_path, to_disk):
    model = tower()
    full = pytest.raises(StorageFull, match=r"has .* free and nvme= asks for 1000 TiB; ask for at most")
    with fitting(model, budget="64MiB", nvme=f"{tmp_path}:1000TiB", host="256KiB"), full:
        step(model)
    assert not list(tmp_path.iterdir())
    assert step(model)


@pytest.mark.parametrize("damage", ["a flipped byte", "a short file"])
def test_a_block_that_is_not_what_was_written(damage, tmp_path, to_disk):
    model, expected = tower(), step(tower())
    with fitting(model, budget="64MiB", nvme=f"{tmp_path}:8MiB", host="256KiB") as found:
        loss = model(**batch(0))
        found.below.copies.settle()
        path = found.below.disk_path
        if damage == "a short file":
            os.truncate(path, 4096)
        else:
            with path.open("r+b", buffering=0) as file:
                byte = os.pread(file.fileno(), 1, 5000)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), 5000)
                os.fsync(file.fileno())
        with pytest.raises(CorruptBlock, match=r"cut short" if damage == "a short file" else r"are not what was written there \(checksums differ\)"):
            loss.backward()
        del loss
        if damage == "a short file":
            os.truncate(path, 8 << 20)
        trains_on(model, found, expected)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there_or_may_not_be_written(tmp_path, to_disk, monkeypatch):
    model = tower()
    missing = pytest.raises(StorageFault, match=r"nowhere is not a directory; make it first")
    with fitting(model, budget="64MiB", nvme=f"{tmp_path / 'nowhere'}:8MiB", host="256KiB"), missing:
        step(model)
    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))  # root may write anywhere, so it is refused by hand
        return real(path, flags, *args, **kwargs)

    with fitting(model, budget="64MiB", nvme=f"{tmp_path}:8MiB", host="256KiB"):
        monkeypatch.setattr(os, "open", read_only)
        with pytest.raises(StorageFault, match=r"cannot be opened.*Permission denied"):
            step(model)
        monkeypatch.setattr(os, "open", real)
        assert step(model)  # and once it may be written, it goes on


def test_host_memory_that_is_not_there(monkeypatch):
    model = tower()
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB"):
        with monkeypatch.context() as patch:
            patch.setattr(host_pool, "available_host_bytes", lambda: 50_000)
            with pytest.raises(OutOfHostMemory, match=r"the plan keeps 1\.\d+ MiB in host memory and 48.8 KiB are available"):
                step(model)
        assert step(model)


def test_sizes_that_make_no_sense():
    for options in ({"host": "4G"}, {"pinned": -1}, {"nvme": "/scratch"}, {"budget": "plenty"}):
        with pytest.raises(BadInput):
            fit(tower(), **{"budget": "1GiB", **options})


@pytest.mark.parametrize("direction", ["device to host", "host to device"])
def test_a_copy_that_fails(direction, monkeypatch):
    model, expected = tower(), step(tower())
    failing = threading.Event()

    def before_copy(way, nbytes):
        if failing.is_set() and way.value == direction:
            raise RuntimeError("the link is down")

    device = NullDevice(1 << 30, before_copy=before_copy)
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", device=device) as found:
        failing.set()
        with pytest.raises(CopyFault, match=rf"a copy of .* from {direction} failed: the link is down"):
            step(model)
        failing.clear()
        trains_on(model, found, expected)


@pytest.mark.parametrize("direction", ["device to host", "host to device"])
def test_ctrl_c_in_the_middle_of_a_step(direction, monkeypatch):
    """The signal comes while copies are under way, in forward and in backward."""
    model = tower(dropout=0.1)
    expected = trained(three_steps, copy.deepcopy(model))
    armed = threading.Event()

    def before_copy(way, nbytes):
        if armed.is_set() and way.value == direction:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    device = NullDevice(1 << 30, max_delay_seconds=0.005, before_copy=before_copy)
    with forced(monkeypatch, "keep", send=True, release=2, fetch=2), fitting(model, budget="64MiB", device=device) as found:
        model(**batch(0)).backward()
        model.zero_grad()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                armed.set()  # again if it was lost: Python drops what is raised while something is destroyed
                loss = model(**batch(0))
                loss.backward()
        loss = None
        armed.clear()
        model.zero_grad()
        assert equal(trained(three_steps, model), expected)
        gc.collect()  # frames of the interrupted step may hold one another
        assert found.below.used_bytes == 0


def test_an_interrupted_plan_leaves_the_model_as_it_was(monkeypatch):
    from tierwise.fitting import fitted as module

    model = tower()

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "program_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model, budget="1MiB", compile=False, example=batch(0))
    assert not [name for part in model.modules() for name in ("forward", "__getstate__") if name in part.__dict__]
    fit(model, budget="1MiB", compile=False)
    with pytest.raises(KeyboardInterrupt):
        model(**batch(0))
    monkeypatch.undo()
    assert torch.isfinite(model(**batch(0)))
    release(model)
