"""The planner over choices, on the chain of toy_blocks.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_blocks import CHECKPOINT, KEEP, menu

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Choice, SavedValue, check_schedule, peak_bytes
from tierwise.lower import choose, image
from tierwise.lower.bound import least_seconds
from tierwise.lower.choose import _predicted, _Search, hull
from tierwise.lower.holding import Sending
from tierwise.simulate import simulate


def test_nothing_is_done_when_everything_fits():
    chosen = choose(menu(4, 1000))
    assert {plan.choice for plan in chosen.program.calls.values()} == {"keep"}
    assert not any(plan.sent for plan in chosen.program.calls.values())


def test_without_a_link_worth_having_it_recomputes_as_little_as_it_must():
    # Keeping all four takes 20 + 40 + 120 + 10 + 15 = 205; each call that recomputes gives back 30, and its backward takes 30 of it.
    chosen = choose(menu(4, 180, bytes_per_second=0.01))
    assert [plan.choice for plan in chosen.program.calls.values()].count("checkpoint") == 1
    assert chosen.peak_bytes <= 180


def test_what_the_link_carries_for_nothing_is_sent():
    chosen = choose(menu(6, 250, bytes_per_second=1000.0))
    assert any(plan.sent for plan in chosen.program.calls.values())
    assert {plan.choice for plan in chosen.program.calls.values()} == {"keep"}
    assert chosen.seconds == pytest.approx(6 * 2.0 + 1.0 + 6 * 1.0, rel=0.02)


def test_a_budget_below_the_least_names_the_least_and_the_least_works():
    with pytest.raises(InfeasibleBudget) as refusal:
        choose(menu(4, 20))
    least = refusal.value.least_bytes
    assert choose(menu(4, least)).peak_bytes <= least


def test_a_hull_has_only_choices_worth_having():
    def choice(name, nbytes, seconds):
        return Choice(name, (SavedValue("v", nbytes),), True, False, 0.0, seconds)

    keep, slow, cheap, dear = choice("keep", 100, 10.0), choice("slow", 80, 30.0), choice("cheap", 60, 9.0), choice("dear", 0, 20.0)
    assert [found.name for found in hull((keep, slow, cheap, dear))] == ["cheap", "dear"]  # cheap saves less and is faster; slow is never best


@settings(max_examples=40, deadline=None)
@given(length=st.integers(2, 7), budget=st.integers(60, 400), rate=st.sampled_from([0.1, 3.0, 30.0, 300.0]))
def test_what_is_chosen_is_legal_within_the_budget_and_not_below_the_bound(length, budget, rate):
    question = menu(length, budget, bytes_per_second=rate)
    try:
        chosen = choose(question)
    except InfeasibleBudget as refusal:
        assert refusal.least_bytes > budget
        return
    made = image(question, chosen.program)
    check_schedule(made.problem, made.schedule)
    assert chosen.peak_bytes <= budget
    assert chosen.seconds >= least_seconds(question) * (1 - 1e-6)


def test_the_sketch_tells_the_time_of_the_simulator():
    question = menu(6, 1000, bytes_per_second=25.0)
    search = _Search(question, ("dram",), 0)
    for sending in (Sending(), Sending((0, 1, 2), 0, 1.0, 2, 2), Sending((0, 3), 0, 1.0, 1, 1), Sending((1,), 1, 1.0, 4, 2)):
        levels = np.array([sending.level if place in sending.senders else 0 for place in range(len(search.calls))])
        program = search._program(levels, sending)
        made = image(question, program)
        assert search._clock.seconds(levels, sending) == pytest.approx(simulate(made.problem, made.schedule).seconds)
        assert search.holding.peak_bytes(levels, sending) == peak_bytes(made.problem, made.schedule)["hbm"]


def test_where_the_link_is_slow_not_all_of_the_first_calls_send():
    # A block takes 2 s forward and saves 40 bytes: at 12 bytes a second the link is not done with it before the next block is.
    question = menu(12, 500, bytes_per_second=12.0)
    chosen = choose(question)
    senders = [call for call, plan in sorted(chosen.program.calls.items()) if plan.sent]
    assert senders and senders != list(range(len(senders)))
    assert chosen.seconds < min(_first_calls(question))


def _first_calls(question):
    """Seconds of programs in which the first calls send all they save."""
    search = _Search(question, ("dram",), 0)
    return [
        chosen.seconds
        for number in range(len(search.calls) + 1)
        for level in range(2)
        for release, fetch in ((1, 1), (2, 2))
        if (sketch := search.sketch(Sending(tuple(range(number)), level, 1.0, release, fetch))) is not None
        and (program := search._program(sketch.levels, sketch.sending)) is not None
        and (chosen := _predicted(question, program)) is not None
    ]


@pytest.mark.parametrize(("length", "budget", "rate"), [(5, 180, 8.0), (6, 200, 15.0), (6, 160, 40.0), (7, 260, 5.0)])
def test_never_slower_than_the_first_calls_sending_all_they_save(length, budget, rate):
    question = menu(length, budget, bytes_per_second=rate)
    assert choose(question).seconds <= 1.005 * min(_first_calls(question))


def test_an_input_is_not_its_own_where_the_call_before_reads_what_it_returned():
    # As behind a ReLU: whoever recomputes reads its own result in backward, which is the next call's input. Sent by that one alone it would stay.
    question = menu(6, 1000, bytes_per_second=25.0)
    graph = question.problem.graph
    result = {f"block{place}.backward": next(s.id for s in graph.storages if s.name == f"x{place + 1}") for place in range(6)}
    ops = tuple(replace(op, reads=(*op.reads, result[op.name])) if op.name in result else op for op in graph.ops)
    choices = {0: (KEEP, replace(CHECKPOINT, reads_outputs=True))}
    question = replace(question, problem=replace(question.problem, graph=replace(graph, ops=ops)), choices=choices)
    search = _Search(question, ("dram",), 0)
    for sending in (Sending(), Sending((1, 3), 1, 1.0, 1, 1), Sending((0, 1, 2), 1, 1.0, 2, 2)):
        levels = np.ones(6, dtype=np.int64)
        made = image(question, search._program(levels, sending))
        assert search.holding.peak_bytes(levels, sending) == peak_bytes(made.problem, made.schedule)["hbm"]


def test_whoever_finds_the_link_free_sends():
    # A call is done every 2 s; it sends 40 bytes, the first one 30 since the batch is not its own, which at 12 bytes a second take 3.3 and 2.5 s.
    clock = _Search(menu(6, 1000, bytes_per_second=12.0), ("dram",), 0)._clock
    assert list(clock.senders(0, 1.0, patience=0.0, first=0)) == [0, 2, 4], "done at 2, 6 and 10 s; the link is free from 4.5 and 9.3 s on"
    assert list(clock.senders(0, 1.0, patience=0.0, first=1)) == [1, 3, 5]
    assert list(clock.senders(0, 1.0, patience=0.5, first=0)) == [0, 1, 3, 4], "half of 3.3 s is worth waiting: 4.5 s for the one that is done at 4 s"
