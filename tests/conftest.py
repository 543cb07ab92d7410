"""What holds for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run beside one another

import one_arithmetic  # noqa: F401
import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: Ctrl-C is tested, too
    with contextlib.suppress(ValueError):  # outside of the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def deterministic_card():
    """The same bits twice; afterwards all of its memory is there again."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()
