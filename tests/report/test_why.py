"""Sentences about plans of chain(4), whose numbers are worked by hand: every op takes a second, a copy of 10 bytes too."""

from __future__ import annotations

from dataclasses import replace

from problems import chain, machine

from tierwise.ir.timeline import Span
from tierwise.policies import plan
from tierwise.policies._gaps import Drop, Swap, build
from tierwise.report.waits import waits_of
from tierwise.report.why import change_bytes, decisions, limit, with_less, with_more
from tierwise.simulate import simulate


def test_each_class_of_tensor_has_its_sentence():
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=2)
    kept = decisions(problem, build(problem))
    assert kept == [
        "activations: of 50 B that wait for backward, 50 B kept",
        "gradients: 20 B, on the device until their update",
        "parameters: 20 B at home in hbm",
        "optimizer state: 40 B at home in hbm",
    ]
    offloaded = decisions(problem, plan(problem, "zero_offload"))
    assert "gradients: 20 B, 20 B go to dram as they come" in offloaded
    assert "optimizer state: 40 B at home in dram" in offloaded
    assert "updates: 4 on the cpu under the next step's forward" in offloaded


def test_what_is_sent_and_what_is_recomputed_is_told_with_its_price():
    problem = chain(4, on=machine(rate=1 << 30))
    a0, a1 = (next(s.id for s in problem.graph.storages if s.name == name) for name in ("a0", "a1"))
    schedule = build(problem, [Swap(a0, "dram", 2, 3, 6)], [Drop(a1, 3)])
    [line] = decisions(problem, schedule)
    assert line.startswith("activations: of 50 B that wait for backward, 30 B kept, 10 B copied away and back and 10 B recomputed in 1.00 s; ")
    assert line.endswith("copying a GiB back from dram takes the link 1.00 s")


def test_the_device_limits_what_it_works_at_all_the_time():
    problem = chain(4)
    schedule = build(problem, drops=[Drop(2, 3)])
    assert limit(problem, schedule, simulate(problem, schedule)) == "compute: the gpu works 100% of the step, 10% of it on what was computed before"


def test_a_link_limits_what_waits_for_it():
    problem = chain(4, on=machine(rate=2.0))  # 10 bytes take 5 s
    schedule = build(problem, [Swap(1, "dram", 2, 3, 6)])
    words = limit(problem, schedule, simulate(problem, schedule))
    assert words.startswith("the link to the device: the gpu works ") and words.endswith(" while in is busy")


def test_what_a_step_waits_for_may_have_begun_in_the_one_before():
    """Of ten seconds the gpu works the last four; the cpu's update from 7 to 14 is 4 s of the next step, and a copy takes 2 s of this one."""
    problem = chain(4)
    schedule = build(problem)
    spans = (Span(0, "gpu", 6.0, 10.0), Span(1, "cpu", 7.0, 14.0), Span(2, "in", 4.0, 6.0))
    timeline = replace(simulate(problem, schedule), seconds=10.0, spans=spans)
    assert waits_of(timeline, "gpu") == (6.0, {"cpu": 4.0, "in": 2.0})
    assert limit(problem, schedule, timeline) == "the cpu: the gpu works 40% of the step, and waits for 4.00 s while cpu is busy"


def test_more_and_less_are_said_in_seconds():
    assert change_bytes(80) == 10 and change_bytes(64 << 30) == 1 << 30
    assert with_more(10, 8.0, 10.0) == "10 B more would buy 2.00 s a step (20.0%)"
    assert with_more(10, 10.0, 10.0) == "10 B more would buy nothing"
    assert with_less(10, 11.0, 10.0) == "10 B less would cost 1.00 s a step (10.0%)"
    assert with_less(10, None, 10.0) == "10 B less is too little for any plan"
