"""Whole numbers of modules to begin with, on the chain of toy_blocks.py."""

from __future__ import annotations

import pytest
from lower.test_bound import with_heavy_state
from toy_blocks import CPU, EVERYWHERE, THROUGH, menu_with_moments

from tierwise.lower.bound import best_lines, with_updates
from tierwise.lower.facts import Facts
from tierwise.lower.seeds import Seeds
from tierwise.lower.splits import Splits
from tierwise.lower.states import state_units


def seeds(question, update="backward"):
    units = state_units(question.problem.graph, question.homes)
    found = Seeds(question, Splits(question, units, {}, update), Facts.of(question), update, 0.0)
    return list(found.within(question.problem.budget_bytes).items())


def test_the_first_is_the_best_in_whole_numbers():
    """Nine updates that take 10 seconds each on the cpu, or 8 for their state on the link. Every number of them on either is asked for; what is left
    stays on the device, which has room for one."""
    question = with_heavy_state(menu_with_moments(9, hbm=1250, cpu_seconds=10.0), 250.0, CPU, THROUGH)
    facts, count = Facts.of(question), 9
    known = {
        (on_cpu, streamed): found.seconds
        for on_cpu in range(count + 1)
        for streamed in range(count + 1 - on_cpu)
        if (found := with_updates(question, "backward", facts, on_cpu / count, streamed / count)) is not None
    }
    best = min(known, key=known.__getitem__)
    split, _ = seeds(question)[0]
    passing = split.streamed * split.state
    assert passing == pytest.approx(round(passing)) and (split.state - round(passing), round(passing)) == best
    assert best_lines(question, "backward", facts)[0] <= known[best] * 1.01


def test_in_less_memory_more_is_elsewhere():
    """A fifth of it is what the state of one block takes."""
    found = [split.state for split, _ in seeds(with_heavy_state(menu_with_moments(8, hbm=10_500, cpu_seconds=10.0), 250.0, *EVERYWHERE))]
    assert found[-1] == found[0] + 1


def test_they_say_whether_anything_is_sent():
    """With a link that takes no time activations leave; over one that carries nothing they do not."""
    assert all(sends for _, sends in seeds(with_heavy_state(menu_with_moments(6, hbm=160, cpu_seconds=1.0), 1e9, CPU)))
    assert not any(sends for _, sends in seeds(with_heavy_state(menu_with_moments(6, hbm=2000, cpu_seconds=1.0), 1e-3, CPU)))


def test_what_lives_on_disk_has_its_own_pace():
    assert [split.streamed for split, _ in seeds(menu_with_moments(6, hbm=160))] == [0.0]


def test_none_where_nothing_fits():
    assert seeds(menu_with_moments(6, hbm=20)) == []
