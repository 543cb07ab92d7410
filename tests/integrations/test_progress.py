"""What fit says while it works: to a terminal, and to nobody else."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest
import torch
from fitting.training import batch, tower

import tierwise
from tierwise.integrations.progress import Teller, share_in


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def watched(monkeypatch):
    """Called within a test: from then on stderr is a terminal, which is returned."""

    def begin() -> Terminal:
        seen = Terminal()
        monkeypatch.setattr(sys, "stderr", seen)
        monkeypatch.setenv("TERM", "xterm")
        return seen

    return begin


def comes_back_to(threads: int) -> bool:
    """The bar's thread is told to stop, and ends when it next wakes."""
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() == threads


def test_shares_are_read_from_sentences():
    assert share_in("locking host memory, 1.00 GiB of 4.00 GiB") == (1 << 30, 4 << 30)
    assert share_in("timing op 3 of 12") == (3, 12)
    assert share_in("Block: what it can save of it") is None


def test_a_terminal_sees_the_work_and_keeps_the_outcome(watched):
    terminal = watched()
    before = threading.active_count()
    tell = Teller()
    tell("tracing one step")
    tell("locking host memory, 1.00 MiB of 4.00 MiB")
    tell.over("planned: 9 MiB")
    assert "tracing one step" in terminal.getvalue() or "locking host memory" in terminal.getvalue()
    assert terminal.getvalue().endswith("tierwise: planned: 9 MiB\n")
    assert comes_back_to(before)
    tell.over()
    assert terminal.getvalue().endswith("tierwise: planned: 9 MiB\n")


def test_a_pipe_hears_nothing(capsys):
    tell = Teller()
    tell("tracing one step")
    tell.over("planned: 9 MiB")
    assert capsys.readouterr().err == ""


def test_fit_says_once_what_came_of_it(watched):
    terminal = watched()
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tierwise.fit(model, optimizer, budget="1.5MiB")
    try:
        for number in range(2):
            model(**batch(number)).backward()
            optimizer.zero_grad()
        outcome = tierwise.plan_of(model).words()[0]
        assert terminal.getvalue().count(f"tierwise: {outcome}\n") == 1
    finally:
        tierwise.release(model)


def test_a_budget_that_is_too_small_leaves_no_bar_behind(watched):
    watched()
    before = threading.active_count()
    model = tower()
    with pytest.raises(tierwise.TierwiseError, match="too small"):
        tierwise.fit(model, budget="10KiB", example=batch(0))
    assert comes_back_to(before)
    assert "forward" not in model.__dict__
