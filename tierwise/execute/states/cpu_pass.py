"""The formulas as one pass over host memory, in C++ compiled on this machine; None where there is no compiler.

Not through Inductor: its compiled functions keep Python's lock while they run, and then nothing is launched on the card beside an update. A
library called through ctypes gives the lock away. It is compiled once for each processor and compiler (about a second) and kept in the cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from .rules import Rule

SOURCE = Path(__file__).with_name("cpu_pass.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NATIVE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
RULES = {"adam": 0, "momentum": 1, "plain": 2}
TYPES = {torch.float32: 0, torch.bfloat16: 1}
NO_OUT = 2

_log = logging.getLogger(__name__)


class CpuPass:
    """The compiled pass and the threads it runs on. Several callers take turns, and one that starts the next before it waits for the last has them
    busy all the time, however long it takes to have Python for itself again."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        self._pool = library.pool_open(threads)
        self._end = weakref.finalize(self, _close_pool, library, self._pool, os.getpid())

    def __call__(self, *args: Any, **options: Any) -> None:
        """What `start` does, and over when this returns."""
        self.start(*args, **options)()

    def start(
        self,
        rule: Rule,
        numbers: Sequence[float],
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Callable[[], None]:
        """As rules.apply_rule, beside the caller, who calls what comes back, once, to wait for it; tensors are contiguous, in host memory, the
        gradient and `out` of fp32 or bf16."""
        addresses = [state.data_ptr() for state in states] + [None] * (2 - len(states))
        started = self._library.start_pass(
            self._pool, RULES[rule.name], weights.data_ptr(), gradient.data_ptr(), TYPES[gradient.dtype], *addresses,
            None if out is None else out.data_ptr(), NO_OUT if out is None else TYPES[out.dtype], scale,
            (ctypes.c_float * len(numbers))(*numbers), len(numbers), weights.numel(),
        )  # fmt: skip
        return partial(self._finish, started, (weights, gradient, states, out))

    def _finish(self, started: int, used: object) -> None:
        """`used`: what must be there until then."""
        self._library.finish_pass(self._pool, started)

    def close(self) -> None:
        self._end()


def can_run(gradient: torch.Tensor, out: torch.Tensor | None) -> bool:
    return gradient.dtype in TYPES and (out is None or out.dtype in TYPES)


def open_cpu_pass(threads: int) -> CpuPass | None:
    """The pass with so many threads, or None if it cannot be compiled here."""
    library = _library()
    return None if library is None else CpuPass(library, max(1, threads))


def _close_pool(library: ctypes.CDLL, pool: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has none of the threads
        library.pool_close(pool)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = next((found for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name and (found := shutil.which(name))), None)
    if compiler is None:
        _log.warning("no C++ compiler here (g++ or clang++): updates on the CPU run op by op and are several times slower")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.decode(errors="replace")[-500:] if isinstance(error, subprocess.CalledProcessError) and error.stderr else error
        _log.warning("%s cannot compile the update pass, so updates on the CPU run op by op and are several times slower: %s", compiler, detail)
        return None
    pointer, integer, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    library.pool_open.argtypes, library.pool_open.restype = [integer], pointer
    library.pool_close.argtypes, library.pool_close.restype = [pointer], None
    library.start_pass.argtypes = [pointer, integer, pointer, pointer, integer, pointer, pointer, pointer, integer, real, pointer, long, long]
    library.start_pass.restype = pointer
    library.finish_pass.argtypes, library.finish_pass.restype = [pointer, pointer], None
    return library


def _compiled(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, repr((FLAGS, NATIVE)).encode(), _processor().encode()])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierwise"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="tierwise-"))
    path = folder / f"cpu_pass-{key}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # another process may be compiling the same
        made = Path(scratch) / path.name
        for native in NATIVE:
            result = subprocess.run([compiler, *FLAGS, *native, str(SOURCE), "-o", str(made)], capture_output=True)
            if result.returncode == 0:
                break
        result.check_returncode()
        made.replace(path)
    return path


def _processor() -> str:
    """What `native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}))
