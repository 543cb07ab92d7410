"""tierwise.watch: numbers of the steps, to a terminal, or to whoever asks."""

from __future__ import annotations

import io
import sys

import pytest
from fitting.training import batch, tower

import tierwise
from tierwise.errors import BadInput
from tierwise.integrations.watching import status

NUMBERS = {
    "step": 7, "seconds": 0.291, "peak_reserved_bytes": 23 << 30, "sent_bytes": 3 << 30, "fetched_bytes": 0, "exposed_seconds": 0.004,
    "disk_written_bytes": 0, "retries": 0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError("gone")


def train(steps: int, **options) -> None:
    model = tower()
    tierwise.fit(model, budget="1MiB", progress=lambda what: None)
    try:
        tierwise.watch(model, **options)
        for number in range(steps):
            model(**batch(number)).backward()
            model.zero_grad()
    finally:
        tierwise.release(model)


def test_a_line_says_what_the_numbers_are():
    assert status(NUMBERS) == "tierwise: step 7   291 ms   peak 23.0 GiB   out 3.00 GiB   in 0 B   waited 4.00 ms"
    more = {"predicted_seconds": 0.28, "budget_bytes": 24 << 30, "retries": 2, "disk_written_bytes": 1 << 20}
    line = status({**NUMBERS, **more})
    assert "291 ms (planned 280 ms)   peak 23.0 GiB of 24.0 GiB" in line
    assert line.endswith("to disk 1.00 MiB   2 calls ran twice for lack of memory")


def test_a_terminal_sees_one_line_written_over_itself(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(4, every=0.0)
    seen = sys.stderr.getvalue()
    lines = seen.split("\r\x1b[K")
    assert [line.split("   ")[0] for line in lines[1:]] == ["tierwise: step 1", "tierwise: step 2", "tierwise: step 3"]
    assert " of 1.00 MiB" in lines[1] and seen.endswith("\n") and seen.count("\n") == 1


def test_what_the_script_prints_finds_an_empty_line(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    model = tower()
    tierwise.fit(model, budget="1MiB", progress=lambda what: None)
    tierwise.watch(model, every=0.0)
    for number in range(3):
        model(**batch(number)).backward()
        print("loss")
    assert vars(screen).get("write") is None
    tierwise.release(model)
    assert [line.rpartition("\r\x1b[K")[2] for line in screen.getvalue().split("\n")] == ["loss"] * 3 + [""]


def test_a_pipe_sees_nothing_unless_it_is_asked_for(capsys):
    train(2, every=0.0)
    assert capsys.readouterr().err == ""
    train(3, every=0.0, show=True)
    assert [line.split("   ")[0] for line in capsys.readouterr().err.splitlines()] == ["tierwise: step 1", "tierwise: step 2"]


def test_at_most_one_line_in_so_many_seconds(capsys):
    train(4, every=1000.0, show=True)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_terminal_that_has_gone_away_does_not_end_a_training(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Gone())
    train(3, every=0.0)


def test_it_can_be_stopped(capsys):
    model = tower()
    tierwise.fit(model, budget="1MiB")
    with tierwise.watch(model, every=0.0, show=True):
        for number in range(2):
            model(**batch(number)).backward()
    model(**batch(2)).backward()
    tierwise.release(model)
    assert capsys.readouterr().err.count("tierwise: step") == 1
    with pytest.raises(BadInput, match="not under"):
        tierwise.watch(model)
