"""Files of fixed length, read and written in whole pages past the page cache where the filesystem allows; locks that die with their process.

Everything of POSIX is looked up when it is needed: where it is missing (Windows), files are plain and buffered, and an open file is its own lock.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import CorruptBlock, StorageFault, StorageFull
from ..units import format_bytes
from .host_pool import PAGE_BYTES

_log = logging.getLogger(__name__)
_NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


class PageFile:
    """An open file. Offsets and lengths are multiples of PAGE_BYTES and buffers lie on pages. Several threads may read and write at once."""

    def __init__(self, path: Path, *, nbytes: int | None = None) -> None:
        """Open a file for reading, or create one and claim `nbytes` of disk for it: a full disk is found now and not in the middle of a step."""
        self.path = path
        self.direct = False
        flags = os.O_RDONLY if nbytes is None else os.O_RDWR | os.O_CREAT | os.O_EXCL
        with _faults(f"{path} cannot be opened"):
            self._fd = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        try:
            if nbytes is not None:
                with _faults(f"{path} cannot get the {format_bytes(nbytes)} it was asked to hold"):
                    self._claim(nbytes)
            self.nbytes = os.fstat(self._fd).st_size
            self._go_direct()
        except BaseException:
            os.close(self._fd)
            if nbytes is not None:
                path.unlink()
            raise
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def lock(self) -> bool:
        """Lock the file until it is closed or the process dies; False if another process has it."""
        return _try_lock(self._fd)

    def write(self, data: memoryview, offset: int) -> None:
        with self._in_use(), _faults(f"writing {format_bytes(len(data))} to {self.path} failed"):
            done = self._all(self._put, data, offset)
            if done < len(data):
                raise StorageFault(f"{self.path} took {format_bytes(done)} of {format_bytes(len(data))} and no more; check the disk")
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.fdatasync(self._fd)  # only what is on disk can leave the page cache
                os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)

    def read(self, into: memoryview, offset: int) -> None:
        with self._in_use(), _faults(f"reading {format_bytes(len(into))} from {self.path} failed"):
            done = self._all(self._get, into, offset)
            if done < len(into):
                raise CorruptBlock(f"{self.path} ends at byte {offset + done} and should go on to byte {offset + len(into)}; it was cut short")
            if not self.direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        with self._in_use(), _faults(f"{self.path} cannot be brought to disk"):
            os.fsync(self._fd)

    def close(self, *, remove: bool = False) -> None:
        """Close, once no other thread reads or writes: a number closed too early may by then stand for another file."""
        try:
            if remove and os.name != "nt":  # unlink while the lock is held
                self.path.unlink(missing_ok=True)
        finally:
            with self._lock:
                close_now = self._users == 0 and not self._closing
                self._closing = True
            if close_now:
                os.close(self._fd)
        if remove and os.name == "nt":
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock:
            if self._closing:
                raise StorageFault(f"{self.path} is closed and cannot be read or written any more")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                close_now = self._users == 0 and self._closing
            if close_now:
                os.close(self._fd)

    def _claim(self, nbytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, nbytes)
                return
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        _log.warning("%s: this filesystem claims no space in advance; it may run full later", self.path)
        os.truncate(self._fd, nbytes)

    def _go_direct(self) -> None:
        """Bypass the page cache if a page can be read that way."""
        try:
            fcntl = importlib.import_module("fcntl")
            status = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, status | os.O_DIRECT)
        except (ImportError, AttributeError, OSError):
            self._say_buffered()
            return
        try:
            self.direct = True
            if self.nbytes >= PAGE_BYTES:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    os.preadv(self._fd, [page], 0)
        except OSError:
            self.direct = False
            fcntl.fcntl(self._fd, fcntl.F_SETFL, status)
            self._say_buffered()

    def _say_buffered(self) -> None:
        _log.warning("%s: no direct access here, reads and writes go through the page cache and are slower", self.path)

    def _all(self, step: Callable[[memoryview, int], int], data: memoryview, offset: int) -> int:
        """Repeat a system call that may do less than it was asked, until it does nothing. Direct access goes on from a whole page."""
        done = 0
        while done < len(data):
            count = step(data[done:], offset + done)
            if self.direct and done + count < len(data):
                count -= count % PAGE_BYTES
            if count == 0:
                break
            done += count
        return done

    def _put(self, data: memoryview, offset: int) -> int:
        if hasattr(os, "pwritev"):
            return os.pwritev(self._fd, [data], offset)
        with self._one_at_a_time:
            os.lseek(self._fd, offset, os.SEEK_SET)
            return os.write(self._fd, data)

    def _get(self, into: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [into], offset)
        with self._one_at_a_time:
            os.lseek(self._fd, offset, os.SEEK_SET)
            data = os.read(self._fd, len(into))
        into[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One process at a time creates, publishes and removes files of a directory."""
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:
        yield
        return
    with _faults(f"{directory} cannot be opened"):
        fd = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks; then nothing is swept either
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def remove_if_abandoned(path: Path) -> bool:
    """Remove a file that no living process has locked."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        abandoned = _try_lock(fd)
        if abandoned and os.name != "nt":
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    if os.name == "nt":
        with contextlib.suppress(PermissionError):  # open elsewhere
            path.unlink(missing_ok=True)
        return not path.exists()
    return abandoned


def replace_whole(path: Path, text: str) -> None:
    """Put a small file in the place of another, so that after a crash there is the one or the other, whole."""
    part = path.with_name(path.name + ".part")
    with _faults(f"{path} cannot be written"):
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def sync_directory(directory: Path) -> None:
    """Bring renames in a directory to disk."""
    if os.name == "nt":  # directories cannot be opened there
        return
    with _faults(f"{directory} cannot be brought to disk"):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    """False if somebody else has the lock, or if there are no locks here: then nothing may be taken for abandoned."""
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """An OSError becomes one clear error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise StorageFull(f"{what}: {error.strerror}; free space on the disk or name another directory") from error
        raise StorageFault(f"{what}: {error.strerror or error}; check the disk and the directory's permissions") from error
