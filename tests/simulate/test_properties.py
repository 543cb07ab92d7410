"""What must hold for any schedule the judge accepts, tried on random steps, random plans and random damage to them."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from graphs import training_steps
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from interpreter import run_program, run_schedule
from problems import with_codecs, with_engines

from tierwise.errors import InvalidSchedule
from tierwise.ir import Compute, Copy, Free, Problem, Schedule, Timeline, check_schedule, peak_bytes
from tierwise.ir.schedule import held_as
from tierwise.policies._gaps import Drop, Swap, build, can_recompute, gaps
from tierwise.simulate import lower_bound_seconds, simulate, step_seconds

relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@st.composite
def planned_steps(draw) -> tuple[Problem, Schedule]:
    """A step and a random legal choice for its gaps, at the smallest budget that choice needs or some bytes more."""
    problem = with_codecs(draw(training_steps()), rate=draw(st.sampled_from((5.0, 100.0))))
    if draw(st.booleans()):
        problem = dataclasses.replace(problem, machine=with_engines(problem.machine))
    swaps, drops = [], []
    for gap in gaps(problem):
        choice = draw(st.sampled_from(("keep", "swap", "swap encoded", "encode", "drop")))
        codes = gap.storage in problem.costs.codec_named["half"].encoded_bytes and not gap.wraps
        if choice in ("swap encoded", "encode") and codes:
            out = draw(st.integers(gap.start + 1, gap.end - 1))
            free = draw(st.integers(out, gap.end - 1))
            tier = "hbm" if choice == "encode" else draw(st.sampled_from(("dram", "nvme")))
            swaps.append(Swap(gap.storage, tier, out, free, draw(st.integers(free + 1, gap.end)), join=draw(st.booleans()), codec="half"))
        elif choice == "swap":
            count = len(problem.graph.ops)
            out = draw(st.integers(gap.start + 1, min(gap.end - 1, count) if gap.wraps else gap.end - 1))
            back = draw(st.integers(0, gap.end - count)) if gap.wraps else draw(st.integers(out + 1, gap.end))
            tier = draw(st.sampled_from(("dram", "nvme")))
            swaps.append(Swap(gap.storage, tier, out, out, back, join=draw(st.booleans()), wraps=gap.wraps))
        elif choice == "drop" and not gap.wraps and can_recompute(problem, gap.storage) and problem.graph.ops[gap.end].phase != "update":
            drops.append(Drop(gap.storage, gap.start + 1))
    schedule = build(problem, swaps, drops, keep_recomputed=draw(st.booleans()))
    needed = peak_bytes(problem, schedule)["hbm"]
    return problem.with_budget(needed + draw(st.sampled_from((0, 0, 5, 1000)))), schedule


@relaxed
@given(planned_steps())
def test_any_choice_for_the_gaps_builds_a_legal_schedule(planned):
    problem, schedule = planned
    check_schedule(problem, schedule)
    periods = 3 if problem.cyclic else 1
    assert run_schedule(problem, schedule, periods) == run_program(problem.graph, periods)


@relaxed
@given(planned_steps())
def test_time_respects_memory_lanes_and_data(planned):
    problem, schedule = planned
    timeline = simulate(problem, schedule)
    assert step_seconds(problem, schedule) == timeline.seconds
    assert timeline.seconds >= lower_bound_seconds(problem) * (1 - 1e-9)
    for tier in problem.machine.tiers:
        assert timeline.peak_bytes[tier.name] <= tier.capacity_bytes
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for span in timeline.spans:
        by_lane.setdefault(span.lane, []).append((span.start, span.end))
    for spans in by_lane.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans)), "a lane does two things at once"
    if not problem.cyclic:
        check_data_flow(problem, schedule, timeline)


def check_data_flow(problem: Problem, schedule: Schedule, timeline: Timeline) -> None:
    """Nothing is read before it is there, and nothing is overwritten or given back while it is read. Worked out from the spans alone."""
    start, end = {}, {}
    for span in timeline.spans:
        start[span.step] = min(span.start, start.get(span.step, span.start))
        end[span.step] = max(span.end, end.get(span.step, span.end))
    there: dict[tuple[int, str], float] = {}
    last_read: dict[tuple[int, str], float] = {}
    for step, what in enumerate(schedule.steps):
        if isinstance(what, Compute):
            op = problem.graph.ops[what.op]
            for storage in op.reads + op.mutates:
                assert start[step] >= there.get((storage, "hbm"), 0.0) - 1e-9
            for storage in op.mutates:
                assert start[step] >= last_read.get((storage, "hbm"), 0.0) - 1e-9
            for storage in op.reads + op.mutates:
                last_read[storage, "hbm"] = max(end[step], last_read.get((storage, "hbm"), 0.0))
            for storage in op.writes + op.mutates:
                there[storage, "hbm"] = end[step]
        elif isinstance(what, Copy):
            source = (what.storage, held_as(what.src, what.src_form))
            assert start[step] >= there.get(source, 0.0) - 1e-9
            last_read[source] = max(end[step], last_read.get(source, 0.0))
            there[what.storage, held_as(what.dst, what.dst_form)] = end[step]
        else:
            there.pop((what.storage, held_as(what.tier, what.form)), None)
            last_read.pop((what.storage, held_as(what.tier, what.form)), None)


@relaxed
@given(planned_steps(), st.data())
def test_damage_is_refused_or_harmless(planned, data):
    """Take a step out, put one twice, or swap two: what the judge still accepts computes the same values and can be simulated."""
    problem, schedule = planned
    steps = list(schedule.steps)
    assume(len(steps) > 1)
    at = data.draw(st.integers(0, len(steps) - 2))
    kind = data.draw(st.sampled_from(("remove", "repeat", "swap")))
    if kind == "remove":
        del steps[at]
    elif kind == "repeat":
        steps.insert(data.draw(st.integers(0, len(steps))), steps[at])
    else:
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    damaged = dataclasses.replace(schedule, steps=tuple(steps))
    try:
        check_schedule(problem, damaged)
    except InvalidSchedule:
        return
    periods = 3 if problem.cyclic else 1
    assert run_schedule(problem, damaged, periods) == run_program(problem.graph, periods)
    timeline = simulate(problem, damaged)
    assert timeline.peak_bytes["hbm"] <= problem.budget_bytes


@relaxed
@given(planned_steps(), st.integers(0, 500))
def test_more_memory_never_makes_a_schedule_slower(planned, more):
    problem, schedule = planned
    assert simulate(problem.with_budget(problem.budget_bytes + more), schedule).seconds <= simulate(problem, schedule).seconds + 1e-9


@relaxed
@given(planned_steps())
def test_frees_are_never_late(planned):
    """The last step that touches a storage is its Free, unless it is lasting."""
    problem, schedule = planned
    last = {}
    for step in schedule.steps:
        if isinstance(step, Compute):
            for storage in problem.graph.ops[step.op].reads + problem.graph.ops[step.op].writes:
                last[storage] = step
        else:
            last[step.storage] = step
    for storage, step in last.items():
        if not problem.graph.storages[storage].lasting and storage not in problem.graph.consumed_by:
            assert isinstance(step, Free)
