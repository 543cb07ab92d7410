from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from tierwise.errors import BadFile, BadInput, CorruptBlock, StorageFault, StorageFull, UnknownName
from tierwise.execute import published
from tierwise.execute.host_pool import PAGE_BYTES, HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore

PAGE = PAGE_BYTES


@pytest.fixture
def store(tmp_path):
    device = NullDevice(1 << 20)
    pool = HostPool(1 << 20, device)
    with NvmeStore(tmp_path, PAGE, pool, block_bytes=2 * PAGE, requests=2) as store:
        yield store
    assert pool.free_bytes == pool.nbytes
    pool.close()
    device.close()


def state(value: int) -> dict[str, torch.Tensor]:
    return {"moments": torch.full((5 * PAGE + 3,), value, dtype=torch.uint8), "step": torch.full((8,), value, dtype=torch.uint8)}


def publish(store, value: int) -> None:
    with store.publish("optimizer", 8 * PAGE) as writer:
        for key, view in state(value).items():
            writer.write(key, view)


def published_value(store) -> int:
    """What is published, checked to be whole."""
    with store.open_published("optimizer") as reader:
        assert reader.names() == ["moments", "step"] and reader.nbytes("moments") == 5 * PAGE + 3
        views = {key: torch.zeros(reader.nbytes(key), dtype=torch.uint8) for key in reader.names()}
        for key, view in views.items():
            reader.read(key, view)
    value = int(views["step"][0])
    assert all(torch.equal(views[key], expected) for key, expected in state(value).items())
    return value


def files(store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path != store.path)


def test_a_state_replaces_the_last_one_and_outlives_the_store(store, tmp_path):
    publish(store, 1)
    assert published_value(store) == 1
    publish(store, 2)
    assert published_value(store) == 2
    assert files(store) == ["optimizer-000002.state", "optimizer.manifest"]
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["optimizer-000002.state", "optimizer.manifest"]


def test_an_exception_leaves_the_last_state(store):
    publish(store, 1)
    with pytest.raises(KeyboardInterrupt), store.publish("optimizer", 8 * PAGE) as writer:
        writer.write("moments", state(2)["moments"])
        raise KeyboardInterrupt
    assert files(store) == ["optimizer-000001.state", "optimizer.manifest"]
    assert published_value(store) == 1


def test_a_disk_that_fills_up_leaves_the_last_state(store, monkeypatch):
    publish(store, 1)

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageFull, match="No space left on device"):
        publish(store, 2)
    monkeypatch.undo()
    assert files(store) == ["optimizer-000001.state", "optimizer.manifest"]
    assert published_value(store) == 1


def test_a_crash_at_any_moment_leaves_one_whole_state(store, monkeypatch):
    """Every call that changes the directory is in turn the last one before the power fails."""

    class PowerFailure(BaseException):
        pass

    publish(store, 1)
    for name, moment in (("fsync", 1), ("fsync", 2), ("replace", 1), ("fsync", 3), ("unlink", 1)):
        calls = [0]
        target = os if name == "fsync" else published.Path
        original = getattr(target, name)

        def fail(*arguments, original=original, calls=calls, moment=moment, **more):
            calls[0] += 1
            if calls[0] >= moment:
                raise PowerFailure
            return original(*arguments, **more)

        before = published_value(store)
        writer = store.publish("optimizer", 8 * PAGE)
        for key, view in state(before + 1).items():
            writer.write(key, view).wait()
        monkeypatch.setattr(target, name, fail)
        if name != "unlink":
            monkeypatch.setattr(published.Path, "unlink", fail)  # after a power failure nothing is tidied up
        with pytest.raises(PowerFailure):
            writer.__exit__(None, None, None)
        monkeypatch.undo()
        replaced = (name, moment) in (("fsync", 3), ("unlink", 1))
        assert published_value(store) == before + replaced, (name, moment)
        assert not writer._file._users
    publish(store, 100)
    assert published_value(store) == 100


def test_a_disk_that_fails_after_the_rename_keeps_the_new_state(store, monkeypatch):
    publish(store, 1)

    def failing(directory):
        raise StorageFault("cannot be brought to disk")

    monkeypatch.setattr(published, "sync_directory", failing)
    with pytest.raises(StorageFault):
        publish(store, 2)
    monkeypatch.undo()
    assert published_value(store) == 2
    publish(store, 3)
    assert [name for name in files(store) if name.endswith(".state")] == [json.loads(manifest(store).read_text())["content"]["file"]]


def manifest(store):
    return store.directory / "optimizer.manifest"


def test_damage_is_never_loaded(store):
    publish(store, 1)
    text, data = manifest(store).read_text(), store.directory / "optimizer-000001.state"
    for damaged in (text[:-20], text.replace('"format": 1', '"format": 2'), "", "[]"):
        manifest(store).write_text(damaged)
        with pytest.raises(CorruptBlock, match="is not what was published"):
            store.open_published("optimizer")
    manifest(store).write_text(text)
    content = bytearray(data.read_bytes())
    content[3 * PAGE] ^= 1
    data.write_bytes(content)
    with store.open_published("optimizer") as reader, pytest.raises(CorruptBlock, match="not what was written"):
        reader.read("moments", torch.zeros(5 * PAGE + 3, dtype=torch.uint8)).wait()
    os.truncate(data, 5 * PAGE)
    with pytest.raises(CorruptBlock, match="has 20480 bytes and was published with 32768; it was cut short"):
        store.open_published("optimizer")
    data.unlink()
    with pytest.raises(StorageFault, match="cannot be opened: No such file"):
        store.open_published("optimizer")
    manifest(store).write_text("damaged")
    publish(store, 3)
    assert published_value(store) == 3


def test_mistakes_are_named(store):
    with pytest.raises(BadFile, match=r"there is no state 'optimizer' in .*; publish it first"):
        store.open_published("optimizer")
    with pytest.raises(BadInput, match="cannot name a state"):
        store.publish("../escape", 1)
    with store.publish("small", PAGE) as writer:
        writer.write("a", torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(BadInput, match="'a' was already written"):
            writer.write("a", torch.zeros(10, dtype=torch.uint8))
        with pytest.raises(StorageFull, match=r"'b' does not fit into the 4.00 KiB"):
            writer.write("b", torch.zeros(PAGE, dtype=torch.uint8))
    with store.open_published("small") as reader, pytest.raises(UnknownName, match="unknown key of a published state 'b'"):
        reader.read("b", torch.zeros(1, dtype=torch.uint8))


def test_a_state_of_larger_blocks_says_so(store, tmp_path):
    publish(store, 1)
    device = NullDevice(1 << 20)
    pool = HostPool(1 << 20, device)
    with NvmeStore(tmp_path, PAGE, pool, block_bytes=PAGE) as small, pytest.raises(BadInput, match="blocks of 8192 bytes"):
        small.open_published("optimizer")
    with NvmeStore(tmp_path, PAGE, pool, block_bytes=4 * PAGE) as large:
        assert published_value(large) == 1
    pool.close()
    device.close()


def test_two_states_published_at_once_do_not_disturb_each_other(store):
    with store.publish("optimizer", 8 * PAGE) as first:
        publish(store, 2)
        for key, view in state(3).items():
            first.write(key, view)
    assert published_value(store) == 3
    assert [name for name in files(store) if name.endswith(".state")] == ["optimizer-000001.state"]
