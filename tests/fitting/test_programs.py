"""On a GPU a plan is made on estimates, what it chose is measured, and it is made again: here on the toy chain, the measurements made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toy_blocks import CHECKPOINT, KEEP, menu, menu_with_moments

from tierwise.errors import InfeasibleBudget
from tierwise.fitting import programs
from tierwise.fitting.menus import PreparedMenu
from tierwise.ir import Menu

GPU = SimpleNamespace(torch_device=torch.device("cuda"))


def plan(monkeypatch, question, truth):
    """The program, and which choices were measured; `truth` is what measuring finds."""
    asked = []

    def measured(prepared, model, wanted, device, progress):
        (names,) = wanted.values()
        asked.append(sorted(names))
        found = tuple(
            replace(truth.get(choice.name, choice), measured=True) if choice.name in names else choice for choice in prepared.menu.choices[0]
        )
        return replace(prepared, menu=replace(prepared.menu, choices={0: found}))

    monkeypatch.setattr(programs, "measured", measured)
    prepared = PreparedMenu(question, {}, ())
    _, program = programs.program_for(prepared, "auto", (), torch.nn.Identity(), GPU, compile=True, progress=lambda what: None)
    return [program.calls[call].choice for call in sorted(program.calls)], asked


def test_only_what_a_plan_wants_is_measured(monkeypatch):
    assert plan(monkeypatch, menu(4, 1000), {}) == (["keep"] * 4, [["keep"]])


def test_what_was_measured_decides(monkeypatch):
    # Recomputing turns out to be faster than keeping: everybody recomputes, though one call would do.
    faster = replace(CHECKPOINT, forward_seconds=1.0, backward_seconds=0.5)
    chosen, asked = plan(monkeypatch, menu(4, 180), {"checkpoint": faster})
    assert chosen == ["checkpoint"] * 4
    assert asked == [["checkpoint", "keep"]]


def test_where_many_are_wanted_the_most_used_are_measured_first(monkeypatch):
    monkeypatch.setattr(programs, "MANY_COMPILATIONS", 1)
    chosen, asked = plan(monkeypatch, menu(4, 180), {})
    assert sorted(chosen) == ["checkpoint", "keep", "keep", "keep"]
    assert asked == [["keep"], ["checkpoint"]], "without it nothing fits"


def test_estimates_too_careful_are_measured_before_it_is_called_impossible(monkeypatch):
    careful = replace(CHECKPOINT, backward_workspace_bytes=500)
    question = menu(4, 120)
    question = Menu(question.problem, {0: (KEEP, careful)})
    chosen, asked = plan(monkeypatch, question, {"checkpoint": CHECKPOINT})
    assert "checkpoint" in chosen
    assert asked == [["checkpoint"], ["keep"]]


def test_what_is_impossible_says_the_least(monkeypatch):
    with pytest.raises(InfeasibleBudget) as refusal:
        plan(monkeypatch, menu(4, 40), {})
    assert refusal.value.least_bytes > 40


def test_a_further_round_that_takes_long_is_left_out(monkeypatch):
    monkeypatch.setattr(programs, "MANY_COMPILATIONS", 1)
    chosen, asked = plan(monkeypatch, menu(4, 120), {})
    assert set(chosen) == {"checkpoint", "keep"} and asked == [["checkpoint"], ["keep"]]
    monkeypatch.setattr(programs, "MOST_FURTHER_SECONDS", -1.0)
    assert plan(monkeypatch, menu(4, 120), {}) == (["checkpoint"] * 4, [["checkpoint"]])


def test_the_plan_that_runs_has_its_share_of_the_time(monkeypatch):
    """Of ten seconds those that only say what to measure may have taken nine: six are left for the last one, all that is left if that is more."""
    clock = iter([0.0, 9.0, 9.0, 20.0, 20.0, 20.5])
    monkeypatch.setattr(programs.time, "monotonic", lambda: next(clock))
    given = []
    timed = programs._Timed(lambda question, **options: given.append(options["seconds"]), 10.0)
    timed.quickly(menu(1, 1000))
    timed.thoroughly(menu(1, 1000))
    assert given == [0.5, 6.0]
    given.clear()
    timed = programs._Timed(lambda question, **options: given.append(options["seconds"]), 10.0)
    timed.quickly(menu(1, 1000))
    clock = iter([20.5, 20.5])
    timed.thoroughly(menu(1, 1000))
    assert given == [0.5, 9.5]


def test_where_state_moves_what_saves_less_than_most_calls_is_measured_too(monkeypatch):
    """Of 280 bytes 80 are moments: with them elsewhere everybody keeps, and whether that will be so the first plan knows roughly."""
    chosen, asked = plan(monkeypatch, menu_with_moments(4, hbm=220), {})
    assert chosen == ["keep"] * 4 and asked == [["checkpoint", "keep"]]
