"""Changes that are drawn, on blocks of toy_blocks.py: what was found before is never lost, and what no rule names is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_blocks import CPU, EVERYWHERE, IN_HOST, KEEP, THROUGH, menu_with_moments

from tierwise.ir import ON_DEVICE, Compute, Menu, Placement, When, check_schedule, peak_bytes
from tierwise.lower import Chosen, image, keep_everything, with_budget
from tierwise.lower.chance import Chance, _Best
from tierwise.lower.choose import predicted, recompute_everything
from tierwise.lower.clock import Clock
from tierwise.lower.detail import Detail, Looked
from tierwise.lower.helpers import Helpers, Lesson, helpers


def given_plan(program_of, states, cpu_seconds: float = 1.0, homes=EVERYWHERE) -> tuple[Menu, Chosen]:
    """Four blocks in as much memory as it takes with state in these places."""
    question = menu_with_moments(4, cpu_seconds=cpu_seconds)
    question = replace(question, homes=dict.fromkeys(question.homes, homes))
    made = image(question, replace(program_of(question), states=states, update="backward"))
    return with_budget(question, peak_bytes(made.problem, made.schedule)["hbm"]), predicted(made)


def better(question: Menu, given: Chosen, tries: int = 300) -> Chosen:
    clock = Clock(counts=True)
    found = Chance(question, Detail(question, lambda states: (0, 0), clock), clock, Helpers(0)).better(given, until=tries)
    made = image(question, found.program)
    check_schedule(made.problem, made.schedule)
    assert found is given or found == predicted(made)
    return found


FIRST_THREE, LAST_THREE = ("block0", "block1", "block2"), ("block1", "block2", "block3")


def test_the_state_that_had_better_stay_is_found_by_an_exchange():
    """There is room for one block's moments, the last one's. The next step begins with the first block, whose gradient comes last: nothing is beside
    its update on the cpu, and its way there and back."""
    question, given = given_plan(keep_everything, dict.fromkeys(FIRST_THREE, CPU))
    found = better(question, given)
    assert found.program.states.get("block0") is None and found.seconds <= given.seconds - 1


def test_two_searches_of_so_many_tries_are_equal_and_more_are_no_worse():
    question, given = given_plan(recompute_everything, {"block0": THROUGH, "block1": CPU, "block2": IN_HOST, "block3": CPU}, cpu_seconds=2.0)
    few, again, many = (better(question, given, tries) for tries in (40, 40, 120))
    assert few == again and many.seconds <= few.seconds <= given.seconds


def test_when_time_is_over_nothing_is_looked_at(monkeypatch):
    question, given = given_plan(recompute_everything, {"block0": THROUGH, "block1": CPU})
    monkeypatch.setattr(Detail, "looked", lambda detail, program: pytest.fail("it was looked at"))
    assert better(question, given, tries=0) is given


def test_room_that_calls_do_not_need_is_for_state():
    """A cpu that takes two hundred seconds for each of three updates has a step last so long that making everything again costs next to nothing:
    that leaves room for the moments of two more blocks."""
    question, given = given_plan(keep_everything, dict.fromkeys(LAST_THREE, CPU), cpu_seconds=200.0, homes=(ON_DEVICE, CPU))
    assert given.seconds > 600
    assert better(question, given, tries=60).seconds < 300


def test_where_nothing_else_can_be_changed_more_gradients_wait():
    """Everybody's state passes through the device over twenty bytes a second, which is as fast as backward all in all, and not each time."""
    question = menu_with_moments(12, hbm=10_000)
    machine = question.problem.machine.with_rates(lambda link, lane, rate: 20.0)
    question = replace(
        question, problem=replace(question.problem, machine=machine), choices={0: (KEEP,)}, homes=dict.fromkeys(question.homes, (THROUGH,))
    )
    program = replace(keep_everything(question), states=dict.fromkeys(question.homes, THROUGH), update="backward", in_flight=1)
    given = predicted(image(question, program))
    found = better(question, given)
    assert found.program == replace(given.program, in_flight=found.program.in_flight)
    assert found.seconds < given.seconds - 0.1


def test_all_parts_of_a_region_move_at_once():
    """Two regions of two parts each, updated here and there: all of a region go to one home, and each gets the other's homes."""
    question = menu_with_moments(4)
    graph = question.problem.graph
    parts = {"block0": "pair0.one", "block1": "pair0.other", "block2": "pair1.one", "block3": "pair1.other"}
    calls = tuple(replace(call, module=parts[call.module].partition(".")[0]) for call in graph.calls)
    heads = [storage.name.partition(".") for storage in graph.storages]
    storages = tuple(replace(s, name=parts.get(head, head) + dot + rest) for s, (head, dot, rest) in zip(graph.storages, heads, strict=True))
    graph = replace(graph, calls=calls, storages=storages)
    question = replace(question, problem=replace(question.problem, graph=graph), homes=dict.fromkeys(parts.values(), EVERYWHERE))
    states = dict(zip(parts.values(), (CPU, THROUGH, IN_HOST, CPU), strict=True))
    program = replace(keep_everything(question), states=states, update="backward")
    drawn: list[dict[str, Placement]] = []

    class Looking(Detail):
        def better(self, program, than):
            drawn.append({path: program.states.get(path, ON_DEVICE) for path in parts.values()})

    clock = Clock(counts=True)
    chance = Chance(question, Looking(question, lambda states: (0, 0), clock), clock, Helpers(0))
    chance.better(predicted(image(question, program)), until=300)
    assert any(places["pair0.one"] == places["pair0.other"] == IN_HOST and places["pair1.one"] == IN_HOST for places in drawn)
    assert {"pair0.one": IN_HOST, "pair0.other": CPU, "pair1.one": CPU, "pair1.other": THROUGH} in drawn


def test_a_part_stays_on_the_device_when_the_rest_of_its_region_leaves():
    """Block1's state is a part of block0's region, as its name says."""
    question = menu_with_moments(2)
    graph = question.problem.graph
    storages = tuple(replace(s, name=s.name.replace("block1", "block0.part")) for s in graph.storages)
    question = replace(
        question,
        problem=replace(question.problem, graph=replace(graph, storages=storages)),
        homes=dict.fromkeys(("block0", "block0.part"), EVERYWHERE),
    )
    program = replace(keep_everything(question), states={"block0.part": CPU}, update="backward")
    drawn: list[dict[str, Placement]] = []

    class Looking(Detail):
        def better(self, program, than):
            drawn.append(program.states)

    clock = Clock(counts=True)
    chance = Chance(question, Looking(question, lambda states: (0, 0), clock), clock, Helpers(0))
    chance.better(predicted(image(question, program)), until=200)
    both = [states for states in drawn if states.keys() == {"block0", "block0.part"}]
    assert all(states.get("block0") != ON_DEVICE for states in drawn)
    assert {states["block0.part"] for states in both} > {ON_DEVICE, CPU}
    made = image(question, replace(program, states={"block0": CPU, "block0.part": ON_DEVICE}))
    on_cpu = [made.problem.graph.ops[step.op].name for step in made.schedule.steps if isinstance(step, Compute) and step.on == "cpu"]
    assert on_cpu == ["w0.update"]


def test_what_is_better_than_the_one_before_comes_on_top_of_the_best():
    """Two are drawn from the same program and both are better: one with another home for a module's state, one with another choice for a call."""
    _, given = given_plan(keep_everything, dict.fromkeys(LAST_THREE, CPU))
    program = given.program
    moved = replace(program, states={**program.states, "block3": IN_HOST})
    lighter = replace(program, calls={**program.calls, 0: replace(program.calls[0], choice="checkpoint")}, in_flight=5)
    best = _Best(program, Looked(3.0), LAST_THREE)
    best.heard(moved, Looked(3.0), Looked(2.0))
    best.heard(lighter, Looked(3.0), Looked(2.5))
    best.heard(program, Looked(3.0), None)
    assert (best.program, best.looked) == (moved, Looked(2.0))
    assert [*best.again] == [replace(moved, calls=lighter.calls, in_flight=5)]


def test_nothing_is_drawn_for_a_plan_that_moves_nothing():
    question, given = given_plan(keep_everything, {})
    assert better(question, given) is given


def test_others_look_at_several_at_a_time():
    question, given = given_plan(keep_everything, dict.fromkeys(FIRST_THREE, CPU))
    clock = Clock(counts=False)
    with helpers(2) as others:
        others.learn(Lesson(question, question, When("backward"), ("dram",), 0))
        found = Chance(question, Detail(question, lambda states: (0, 0), clock), clock, others).better(given, until=clock.now() + 3)
        assert others
    assert found.seconds < given.seconds


def test_others_are_not_believed_that_something_fits_of_which_updates_take_more_than_they_were_told():
    """What passes through the device takes all of it."""
    question, given = given_plan(keep_everything, dict.fromkeys(FIRST_THREE, CPU), cpu_seconds=10.0, homes=(ON_DEVICE, CPU, THROUGH))

    def takes(states):
        return (10_000 * any(place.update == "streamed" for place in states.values()), 0)

    clock = Clock(counts=False)
    with helpers(2) as others:
        others.learn(Lesson(question, question, When("backward"), ("dram",), 0))
        found = Chance(question, Detail(question, takes, clock), clock, others).better(given, until=clock.now() + 3)
    assert {place.update for place in found.program.states.values()} == {"cpu"}
