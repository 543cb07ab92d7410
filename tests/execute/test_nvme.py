from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tierwise.errors import CorruptBlock, StorageFault, StorageFull
from tierwise.execute import files
from tierwise.execute.copies import Copies
from tierwise.execute.host_pool import PAGE_BYTES, HostPool
from tierwise.execute.lanes import Signal
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore

PAGE = PAGE_BYTES
KIB = 1 << 10


@pytest.fixture
def pool():
    device = NullDevice(1 << 20)
    pool = HostPool(1 << 20, device)
    yield pool
    assert pool.free_bytes == pool.nbytes, "bounce buffers were not returned"
    pool.close()
    device.close()


@pytest.fixture
def store(tmp_path, pool):
    with NvmeStore(tmp_path, 64 * PAGE, pool, block_bytes=4 * PAGE, requests=3) as store:
        yield store
    assert not list(tmp_path.iterdir())


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 4 * PAGE, 4 * PAGE + 1, 11 * PAGE])
def test_bytes_come_back(store, nbytes):
    extent, data = store.reserve(nbytes), numbers(nbytes)
    store.write_async(extent, data)
    back = torch.zeros_like(data)
    store.read_async(extent, back).wait()  # after the write, without being told
    assert torch.equal(back, data)
    store.free(extent)
    assert store.bytes_written == store.bytes_read == -(-nbytes // PAGE) * PAGE


def test_views_on_pages_need_no_bounce_buffer(store, pool, monkeypatch):
    block = pool.allocate(8 * PAGE, alignment=PAGE)
    block.bytes.copy_(numbers(8 * PAGE))
    extent = store.reserve(8 * PAGE)
    monkeypatch.setattr(store._io, "_bounces", None)
    store.write_async(extent, block.bytes).wait()
    expected = block.bytes.clone()
    block.bytes.zero_()
    store.read_async(extent, block.bytes).wait()
    assert torch.equal(block.bytes, expected)
    monkeypatch.undo()
    pool.free(block)


def test_several_requests_are_in_flight_and_the_link_works_meanwhile(store):
    """Three blocks are being filled at once, as from a device, before any of them is let go."""
    together, data = threading.Barrier(3, timeout=10), numbers(12 * PAGE)

    def fill(buffer, part):
        together.wait()
        buffer.copy_(data[part])

    extent, taken = store.reserve(12 * PAGE), torch.zeros_like(data)
    store.write_from(extent, fill)
    store.read_into(extent, lambda buffer, part: taken[part].copy_(buffer)).wait()
    assert torch.equal(taken, data)


def test_places_are_reused_after_what_still_uses_them(store):
    whole = store.reserve(64 * PAGE)
    with pytest.raises(StorageFull, match=r"no room for 1 B: 0 B of 256 KiB are free; allow more with nvme="):
        store.reserve(1)
    gate, old, new = Signal(), numbers(64 * PAGE, 1), numbers(64 * PAGE, 2)
    store.write_async(whole, old).wait()
    back = torch.zeros_like(old)

    def take(buffer, part):
        gate.wait()
        back[part] = buffer

    reading = store.read_into(whole, take)
    store.free(whole)
    again = store.reserve(64 * PAGE)
    assert again.offset == 0
    writing = store.write_async(again, new)
    assert not writing.done()
    gate.fire()
    reading.wait()
    writing.wait()
    assert torch.equal(back, old)


def test_device_tensors_go_to_disk_and_back(tmp_path, device, pool, put):
    pool = HostPool(1 << 20, device)
    with NvmeStore(tmp_path, 4 << 20, pool, block_bytes=64 * KIB) as store:
        copies = Copies(device, pool, store)
        tensor = put(torch.randn(1000, 300)).t()
        small = [put(torch.full((n,), float(n))) for n in range(1, 20)]
        expected = tensor.cpu().clone()
        tickets = copies.send_all([tensor, *small], to="nvme")
        assert copies.counts().sent_copies == 2
        before = device.memory().allocated_bytes
        del tensor, small
        copies.release_sent()
        assert device.memory().allocated_bytes < before
        assert torch.equal(copies.wait(copies.fetch(tickets[0])).cpu(), expected)
        for n, ticket in enumerate(tickets[1:], 1):
            assert copies.wait(copies.fetch(ticket)).tolist() == [float(n)] * n
        del tickets, ticket
        assert store.reserve(4 << 20).offset == 0
    pool.close()


def test_a_flipped_byte_is_found(store):
    extent, data = store.reserve(10 * PAGE), numbers(10 * PAGE)
    store.write_async(extent, data).wait()
    with store.path.open("r+b") as file:
        file.seek(extent.offset + 5 * PAGE + 17)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptBlock, match=rf"16384 bytes at byte {extent.offset + 4 * PAGE} of .* are not what was written there"):
        store.read_async(extent, torch.zeros_like(data)).wait()
    fresh = store.reserve(10 * PAGE)
    store.write_async(fresh, data).wait()
    store.read_async(fresh, torch.zeros_like(data)).wait()


def test_a_short_file_is_found(store):
    extent, data = store.reserve(10 * PAGE), numbers(10 * PAGE)
    store.write_async(extent, data).wait()
    os.truncate(store.path, 6 * PAGE)
    with pytest.raises(CorruptBlock, match=rf"ends at byte {6 * PAGE} and should go on to byte {8 * PAGE}; it was cut short"):
        store.read_async(extent, torch.zeros_like(data)).wait()


def test_reading_what_was_never_written_is_refused(store):
    with pytest.raises(StorageFault, match="never written"):
        store.read_async(store.reserve(10), torch.zeros(10, dtype=torch.uint8)).wait()


def test_a_disk_that_fills_up_or_breaks_while_writing(store, monkeypatch):
    original = os.pwritev
    for code, kind, words in ((errno.ENOSPC, StorageFull, "free space on the disk"), (errno.EIO, StorageFault, "check the disk")):

        def pwritev(fd, buffers, offset, code=code):
            if offset >= 8 * PAGE:
                raise OSError(code, os.strerror(code))
            return original(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", pwritev)
        extent, data = store.reserve(16 * PAGE), numbers(16 * PAGE)
        with pytest.raises(kind, match=rf"writing 16.0 KiB to .*{os.strerror(code)}; {words}"):
            store.write_async(extent, data).wait()
        with pytest.raises(kind):
            store.read_async(extent, torch.zeros_like(data)).wait()
        store.free(extent)
    monkeypatch.undo()
    extent = store.reserve(16 * PAGE)
    store.write_async(extent, data).wait()


def test_system_calls_that_do_less_than_asked_are_repeated(store, monkeypatch):
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][: PAGE + 5 if not store._file.direct else PAGE]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:PAGE]], offset))
    extent, data = store.reserve(7 * PAGE), numbers(7 * PAGE)
    back = torch.zeros_like(data)
    store.write_async(extent, data).wait()
    store.read_async(extent, back).wait()
    assert torch.equal(back, data)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StorageFault, match=r"took 0 B of 16.0 KiB and no more"):
        store.write_async(extent, data).wait()


def test_a_directory_that_is_missing_read_only_or_too_small(tmp_path, pool, monkeypatch):
    with pytest.raises(StorageFault, match=r"/nowhere is not a directory; make it first, or name another with nvme="):
        NvmeStore("/nowhere", PAGE, pool, block_bytes=PAGE)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(StorageFull, match=r"free and nvme= asks for .*; ask for at most [0-9]+MiB or free some space"):
        NvmeStore(tmp_path, free * 2, pool, block_bytes=PAGE)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: no_space())
    with pytest.raises(StorageFull, match=r"cannot get the 4.00 KiB it was asked to hold: No space left on device"):
        NvmeStore(tmp_path, PAGE, pool, block_bytes=PAGE)
    monkeypatch.undo()
    original = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageFault, match=r"cannot be opened: Read-only file system; check the disk and the directory's permissions"):
        NvmeStore(tmp_path, PAGE, pool, block_bytes=PAGE)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_there_is_no_direct_access_the_page_cache_serves(tmp_path, pool, monkeypatch, caplog):
    original = fcntl.fcntl

    def refuse(fd, command, *arguments):
        if command == fcntl.F_SETFL and arguments[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return original(fd, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING), NvmeStore(tmp_path, 8 * PAGE, pool, block_bytes=PAGE) as store:
        assert not store._file.direct
        check_round_trip(store)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "no direct access here, reads and writes go through the page cache and are slower"
    ]


def test_where_there_is_no_posix_files_are_plain(tmp_path, pool, monkeypatch):
    for name in ("pwritev", "preadv", "posix_fallocate", "posix_fadvise", "O_DIRECT"):
        monkeypatch.delattr(os, name)
    original = files.importlib.import_module
    monkeypatch.setattr(files.importlib, "import_module", lambda name: missing(name) if name == "fcntl" else original(name))
    with NvmeStore(tmp_path, 8 * PAGE, pool, block_bytes=PAGE) as store:
        check_round_trip(store)


def missing(name):
    raise ModuleNotFoundError(name)


def check_round_trip(store):
    extent, data = store.reserve(5 * PAGE + 3), numbers(5 * PAGE + 3)
    store.write_async(extent, data).wait()
    back = torch.zeros_like(data)
    store.read_async(extent, back).wait()
    assert torch.equal(back, data)


def test_the_space_is_claimed_at_the_start_and_given_back_at_the_end(tmp_path, pool):
    store = NvmeStore(tmp_path, 100 * PAGE, pool, block_bytes=PAGE)
    assert store.path.stat().st_size == 100 * PAGE
    assert store.path.stat().st_blocks * 512 >= 100 * PAGE
    second = NvmeStore(tmp_path, PAGE, pool, block_bytes=PAGE)
    assert len(list(tmp_path.glob("*.scratch"))) == 2  # a live store is left alone
    second.close()
    second.close()
    del store  # forgotten is as good as closed
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_closing_in_the_middle_of_a_write_leaves_nothing(tmp_path, pool):
    store, gate = NvmeStore(tmp_path, 64 * PAGE, pool, block_bytes=PAGE, requests=2), Signal()
    event = store.write_from(store.reserve(64 * PAGE), lambda buffer, part: gate.wait())
    closer = threading.Thread(target=store.close)
    closer.start()
    while not store._io._lane._closing.is_set():
        pass
    gate.fire()
    closer.join()
    assert event.failed() and not list(tmp_path.iterdir())


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore

def write(directory, say):
    global store, pool, device
    device = NullDevice(1 << 20)
    pool = HostPool(1 << 20, device)
    store = NvmeStore(directory, 32 << 12, pool, block_bytes=1 << 12, requests=2)
    event = store.write_from(store.reserve(32 << 12), lambda buffer, part: time.sleep(0.02))
    os.write(say, b"writing")
    event.wait()

for how in ("exit", "fork", "interrupt", "kill"):
    directory = Path(sys.argv[1], how)
    directory.mkdir()
    hear, say = os.pipe()
    if not (child := os.fork()):
        write(directory, say)
        if how == "fork" and not os.fork():
            sys.exit()  # a data loader's worker ends: the file is not its own
        if how == "fork":
            os.wait()
            assert store.path.exists()
        break  # to the end of the script, as any program
    assert os.read(hear, 7) == b"writing"
    if how in ("interrupt", "kill"):
        os.kill(child, signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *(path.suffix for path in directory.iterdir()), flush=True)
"""


def test_files_of_a_process_that_ends(tmp_path, pool):
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, env=environment, timeout=400)
    assert ended.stdout.splitlines() == ["exit 0", "fork 0", f"interrupt {-signal.SIGINT}", f"kill {-signal.SIGKILL} .scratch"], ended.stderr
    assert ended.stderr.strip().endswith("KeyboardInterrupt")
    with NvmeStore(tmp_path / "kill", PAGE, pool, block_bytes=PAGE) as store:
        assert list((tmp_path / "kill").iterdir()) == [store.path]
    assert not list((tmp_path / "kill").iterdir())
