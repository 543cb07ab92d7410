"""Other processes that look at placements: they find what one would find alone, and nobody waits for one that is gone."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from toy_blocks import CPU, IN_HOST, menu_with_moments

from tierwise.lower import choose_jointly, jointly
from tierwise.lower.around import Around
from tierwise.lower.choose import Chosen, recompute_everything
from tierwise.lower.clock import Clock
from tierwise.lower.helpers import Helpers, helpers, spare
from tierwise.lower.states import state_units

QUESTION = menu_with_moments(6, hbm=200)


def test_they_find_what_one_finds_alone():
    """Seven placements with all activations made again, of which some do not fit where so many bytes are taken."""
    chosen = Chosen(recompute_everything(QUESTION), 0.0, 0, 0)
    around = Around(QUESTION, state_units(QUESTION.problem.graph, QUESTION.homes), "backward", (), 0, lambda states: (30, 0), Clock(True), 2)
    paths = list(QUESTION.homes)
    states = [dict.fromkeys(paths[first:], place) for first in range(3) for place in (CPU, IN_HOST)] + [dict.fromkeys(paths[-1:], CPU)]
    expected = [around.with_activations_of(one, chosen) for one in states]
    with helpers(2) as others:
        others.learn(QUESTION, "backward", 2)
        assert others.look([(one, 30) for one in states], chosen) == expected
        assert others.look([], chosen) == []
    assert any(one is None for one in expected) and any(one is not None for one in expected)
    assert not others


def test_nobody_waits_for_one_that_is_gone():
    chosen = choose_jointly(QUESTION, update="backward", tries=10)
    others = Helpers(2)
    others.learn(QUESTION, "backward", 2)
    others._workers[1]._process.kill()
    assert others.look([(chosen.program.states, 0)] * 4, chosen) is None
    assert not others and others.look([], chosen) == []


@pytest.mark.parametrize("cores", [0, 2])
def test_a_search_with_and_without_them(monkeypatch, cores):
    """Of ten blocks in 170 bytes a second and a half comes near what forty tries find; and half of one finds something if none of them starts."""
    monkeypatch.setattr(jointly, "spare", lambda: cores)
    monkeypatch.setattr(jointly, "WORTH_HELP", 0.0)
    question = menu_with_moments(10, hbm=170, cpu_seconds=1.5)
    assert choose_jointly(question, update="backward", seconds=1.5).seconds <= 1.05 * choose_jointly(question, update="backward", tries=40).seconds
    if cores:
        monkeypatch.setattr("tierwise.lower.helpers.sys.executable", os.devnull)
        others = Helpers(2)
        others.learn(question, "backward", 2)
        assert not others
        assert choose_jointly(question, update="backward", seconds=0.5).program.states


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(16, "1", 8), (64, "1", 8), (8, "1", 4), (2, "1", 0), (16, "8", 0), (32, "4", 4), (16, "", 8)]
)
def test_there_are_as_many_as_there_are_cores_to_spare(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert spare() == expected


def test_a_search_of_so_many_tries_asks_nobody(monkeypatch):
    monkeypatch.setattr(jointly, "spare", lambda: pytest.fail("somebody was asked"))
    assert choose_jointly(replace(QUESTION), update="backward", tries=5).program.states
