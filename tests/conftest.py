"""What holds for every test."""

from __future__ import annotations

import contextlib
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests run beside one another

import one_arithmetic  # noqa: F401

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: Ctrl-C is tested, too
    with contextlib.suppress(ValueError):  # outside of the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
