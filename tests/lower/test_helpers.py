"""Other processes that look at placements: they find what one would find alone, and nobody waits for one that is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from toy_blocks import CPU, IN_HOST, menu_with_moments

from tierwise.ir import When
from tierwise.lower import choose_jointly, jointly
from tierwise.lower.around import Around
from tierwise.lower.choose import Chosen, recompute_everything
from tierwise.lower.clock import Clock
from tierwise.lower.descent import Descent
from tierwise.lower.detail import Detail
from tierwise.lower.helpers import Helpers, Lesson, helpers, spare
from tierwise.lower.looks import Looks
from tierwise.lower.senders import Senders
from tierwise.lower.splits import Split, Splits
from tierwise.lower.states import state_units
from tierwise.lower.tries import Tries

QUESTION = menu_with_moments(6, hbm=200)
UNITS = state_units(QUESTION.problem.graph, QUESTION.homes)
WHEN = When("backward", 2)
LESSON = Lesson(QUESTION, QUESTION, WHEN, ("dram",), 0)
TAKEN = (30, 0)


def alone(taken=TAKEN) -> Tries:
    """Who looks for himself."""
    around = Around(QUESTION, UNITS, WHEN, ("dram",), 0, lambda states: taken, Clock(True))
    return Tries(QUESTION, UNITS, around, Splits(QUESTION, UNITS, {}, "backward"), ("dram",), lambda states: taken, Clock(True), 1000)


@contextlib.contextmanager
def started() -> Iterator[Helpers]:
    """Two that know the question, however long a busy machine takes to start them."""
    with helpers(2) as others:
        others.learn(LESSON)
        assert others.have_started(60.0)
        yield others


def test_they_find_what_one_finds_alone():
    """Seven placements with all activations made again, of which some do not fit where so many bytes are taken."""
    chosen = Chosen(recompute_everything(QUESTION), 0.0, 0, 0)
    around = alone().around
    paths = list(QUESTION.homes)
    states = [dict.fromkeys(paths[first:], place) for first in range(3) for place in (CPU, IN_HOST)] + [dict.fromkeys(paths[-1:], CPU)]
    expected = [around.with_activations_of(one, chosen) for one in states]
    with started() as others:
        assert others.look([(one, TAKEN) for one in states], chosen) == expected
        assert others.look([], chosen) == []
    assert any(one is None for one in expected) and any(one is not None for one in expected)
    assert not others


def test_what_else_they_are_asked():
    """Splits by a glance, splits with their own activations, programs update by update; and one to send from, while the others answer."""
    splits = [Split(6, number, 0.5) for number in range(0, 7, 2)]
    tries = alone()
    looks = Looks(QUESTION, UNITS, tries.splits, WHEN, lambda states: TAKEN)
    glances = [None if (found := looks.at(split)) is None else (found, looks.seconds[found]) for split in splits]
    planned = [tries.at(split, (sends,)) for split in splits for sends in (False, True)]
    programs = [chosen.program for chosen in planned if chosen is not None]
    detail = Detail(QUESTION, lambda states: TAKEN, Clock(True))
    with started() as others:
        others.begin_to_send([(splits[-1], TAKEN)])
        assert others.glance((split, TAKEN) for split in splits) == glances
        assert others.plan((split, sends, TAKEN) for split in splits for sends in (False, True)) == planned
        assert others.seconds((program, TAKEN) for program in programs) == [detail.seconds(program) for program in programs]
        mine = alone()
        assert others.sent(60.0) == [Senders(mine, Descent(mine, Helpers(0))).near(splits[-1])]
        assert others.sent(60.0) == []
    assert any(one is None for one in planned) and len(programs) > 2 and any(glances)


@pytest.mark.parametrize(("taken", "fits"), [(30, True), (150, False)])
def test_a_search_learns_what_they_find(taken, fits):
    """As if it had looked itself, also that there is no room."""
    wanted = [(Split(6, number, 0.5), sends) for number in range(2, 7, 2) for sends in (False, True)]
    expected, found = alone((taken, 0)), alone((taken, 0))
    mine, theirs = (Looks(QUESTION, UNITS, found.splits, WHEN, found.takes) for _ in range(2))
    with started() as others:
        found.at_all(wanted, others)
        theirs.at_all((split for split, _ in wanted), others)
    for split, sends in wanted:
        expected.at(split, (sends,))
        mine.at(split)
    assert found.tried == {one: expected.tried[one] for one in wanted}
    assert theirs.seconds == mine.seconds and all(theirs.at(split) == mine.at(split) for split, _ in wanted)
    assert fits == any(found.tried.values()) == any(mine.seconds)


def test_nobody_waits_for_one_that_is_gone():
    chosen = choose_jointly(QUESTION, update="backward", tries=10)
    others = Helpers(2)
    others.learn(LESSON)
    assert others.have_started(60.0)
    others.begin_to_send([(Split(6, 6, 0.5), TAKEN)])
    for worker in others._workers:
        worker._process.kill()
    assert others.sent(60.0) == []
    assert others.look([(chosen.program.states, TAKEN)] * 4, chosen) is None
    assert not others and others.look([], chosen) is None


@pytest.mark.parametrize("cores", [0, 2])
def test_a_search_with_and_without_them(monkeypatch, cores):
    """Of ten blocks in 170 bytes four seconds come near what forty tries find; and half of one finds something if nobody else starts."""
    if cores:
        with started():  # so that what they are made of has been read
            pass
    monkeypatch.setattr(jointly, "spare", lambda: cores)
    monkeypatch.setattr(jointly, "WORTH_HELP", 0.0)
    question = menu_with_moments(10, hbm=170, cpu_seconds=1.5)
    assert choose_jointly(question, update="backward", seconds=4.0).seconds <= 1.05 * choose_jointly(question, update="backward", tries=40).seconds
    if cores:
        monkeypatch.setattr("tierwise.lower.helpers.sys.executable", os.devnull)
        others = Helpers(2)
        others.learn(replace(LESSON, menu=question, whole=question))
        assert not others
        assert choose_jointly(question, update="backward", seconds=0.5).program.states


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(16, "1", 12), (64, "1", 12), (8, "1", 6), (2, "1", 0), (16, "8", 0), (32, "4", 6), (16, "", 12)]
)
def test_there_are_as_many_as_there_are_cores_to_spare(monkeypatch, cores, ranks, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert spare() == expected


def test_one_that_starts_too_slowly_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("tierwise.lower.helpers.PATIENCE_SECONDS", 0.0)
    with helpers(2) as others:
        others.learn(LESSON)
        assert others.glance([(Split(6, 6, 0.5), TAKEN)]) is None
        assert not others


def test_a_search_of_so_many_tries_asks_nobody(monkeypatch):
    monkeypatch.setattr(jointly, "spare", lambda: pytest.fail("somebody was asked"))
    assert choose_jointly(replace(QUESTION), update="backward", tries=5).program.states
