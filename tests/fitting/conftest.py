"""Nothing of a fitted model outlives its release."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path

import pytest
import torch
from quick_plans import quick_plans as quick_plans


@pytest.fixture(autouse=True)
def needs_a_card(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def one_thread():
    """With several, some of torch's own sums on the CPU differ from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_stays():
    before = set(threading.enumerate())
    yield
    if _ours(before):
        gc.collect()  # what nobody released
    assert not _ours(before)
    assert not [name for name in _open_files() if ".scratch" in name]


def _ours(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("tierwise")]


def _open_files() -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            names.append(str(descriptor.readlink()))
    return names
