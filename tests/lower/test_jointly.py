"""Activations and lasting state in one budget: the chain of toy_blocks.py, with 20 bytes of moments for each weight of 5."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_blocks import EVERYWHERE, menu_with_moments

from tierwise.errors import InvalidSchedule
from tierwise.ir import check_schedule
from tierwise.lower import choose_jointly, image, with_budget
from tierwise.lower.clock import Clock
from tierwise.simulate import simulate


def test_two_searches_of_so_many_tries_are_equal_however_long_they_take(monkeypatch):
    """Ten blocks with 250 bytes that last, in 200 bytes; no clock is looked at, and with more tries nothing slower is found."""
    monkeypatch.setattr("tierwise.lower.clock.time.monotonic", lambda: pytest.fail("somebody looked at the clock"))
    few, many, again = (choose_jointly(menu_with_moments(10, hbm=200), update="backward", tries=tries) for tries in (4, 40, 40))
    assert many == again
    assert many.program.states and many.seconds <= few.seconds


def seconds_of(question, program) -> float:
    made = image(question, program)
    try:
        check_schedule(made.problem, made.schedule)
    except InvalidSchedule:
        return float("inf")
    return simulate(made.problem, made.schedule).seconds


@pytest.mark.parametrize("hbm", [110, 130])
def test_a_search_without_time_is_over_with_the_first_plan(monkeypatch, hbm):
    """Of sixteen blocks with 400 bytes that last, in memory in which activations have to leave; it took about twenty looks once. With more time a
    better one is found."""
    looks = []
    monkeypatch.setattr(Clock, "tick", lambda clock, tick=Clock.tick: (looks.append(1), tick(clock)))
    question = menu_with_moments(16, hbm=hbm)
    question = replace(question, homes=dict.fromkeys(question.homes, EVERYWHERE))
    first = choose_jointly(question, update="backward", tries=1)
    assert first.program.sends and len(looks) <= 8
    assert choose_jointly(question, update="backward", tries=20).seconds < 0.95 * first.seconds


def test_activations_may_count_on_less_of_the_link_than_updates_leave_of_it(monkeypatch):
    """Or on more: eight blocks in 220 bytes have a second to gain, of 32."""
    question = menu_with_moments(8, hbm=220, cpu_seconds=1.0)
    assert choose_jointly(question, update="backward", tries=60).seconds == pytest.approx(31)
    monkeypatch.setattr("tierwise.lower.search.OTHER_PARTS", ())
    assert choose_jointly(question, update="backward", tries=60).seconds == pytest.approx(32)


@pytest.mark.parametrize(("blocks", "hbm", "cpu_seconds"), [(10, 170, 2.3), (10, 170, 1.5), (16, 200, 1.5)])
def test_sixty_tries_come_near_what_many_find(blocks, hbm, cpu_seconds):
    """They begin where the linear program would have it. Of what is found the last choice is by a slower host's seconds, too."""
    question = menu_with_moments(blocks, hbm=hbm, cpu_seconds=cpu_seconds)
    few, many = (choose_jointly(question, update="backward", tries=tries).seconds for tries in (60, 120))
    assert many / 1.015 <= few <= 1.03 * many


def test_time_that_is_left_is_for_what_is_far_from_that():
    """Where updates may pass through the device the linear program has some of them there; without, sixteen blocks in 180 bytes are faster by a
    twentieth."""
    question = menu_with_moments(16, hbm=180, cpu_seconds=2.0)
    question = replace(question, homes=dict.fromkeys(question.homes, EVERYWHERE))
    few, many = (choose_jointly(question, update="backward", tries=tries) for tries in (30, 240))
    assert many.seconds < 0.95 * few.seconds
    assert {place.update for place in many.program.states.values()} == {"cpu"}


def test_room_that_is_kept_free_is_there_while_a_plan_runs():
    """It has to fit without these twenty bytes. Nobody waits for what would be in them for a moment."""
    question = menu_with_moments(8, hbm=160)
    chosen = choose_jointly(question, update="backward", tries=40, takes=lambda states: (20, 0) if states else (0, 0))
    tight = with_budget(question, 140)
    assert chosen.seconds == pytest.approx(seconds_of(question, chosen.program))
    assert chosen.seconds < seconds_of(tight, chosen.program) < float("inf")


@pytest.mark.parametrize(("hbm", "cpu_seconds", "tries", "ahead"), [(140, 1.0, 160, 1), (150, 2.0, 80, 1), (170, 2.3, 60, 2), (170, 1.5, 60, 3)])
def test_parameters_come_as_early_as_is_fastest(hbm, cpu_seconds, tries, ahead):
    """Nine of ten weights live elsewhere. In 140 bytes there is no room to have them earlier; a cpu that takes two seconds for each would keep the
    link waiting; else two or three regions ahead nobody waits for them. No other distance that fits is faster."""
    question = menu_with_moments(10, hbm=hbm, cpu_seconds=cpu_seconds)
    program = choose_jointly(question, update="backward", tries=tries).program
    assert sum(place.parameters != "device" for place in program.states.values()) == 9
    others = [seconds_of(question, replace(program, ahead=other)) for other in {1, 2, 3} - {ahead}]
    assert program.ahead == ahead and seconds_of(question, program) < min(others)


def test_what_is_known_is_beaten_or_kept():
    """What sixty tries find is kept by a search that has one, and fits into what it has; with less memory it does not, and another is found."""
    question = menu_with_moments(10, hbm=170, cpu_seconds=2.3)
    good = choose_jointly(question, update="backward", tries=60)
    few, again = (choose_jointly(question, update="backward", tries=1, known=known) for known in (None, good.program))
    assert (again.seconds, again.program.states) == (good.seconds, good.program.states) and again.seconds < few.seconds
    tight = replace(question, problem=question.problem.with_budget(good.peak_bytes - 10))
    assert choose_jointly(tight, update="backward", tries=20, known=good.program).peak_bytes < good.peak_bytes
