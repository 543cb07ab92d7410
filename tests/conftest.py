"""What holds for every test."""

from __future__ import annotations

import contextlib
import signal

import one_arithmetic  # noqa: F401

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: Ctrl-C is tested, too
    with contextlib.suppress(ValueError):  # outside of the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
