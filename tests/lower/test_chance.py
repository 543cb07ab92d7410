"""Changes that are drawn, on blocks of toy_blocks.py: what was found before is never lost, and what no rule names is found."""

from __future__ import annotations

from dataclasses import replace

from toy_blocks import CPU, EVERYWHERE, IN_HOST, KEEP, THROUGH, menu_with_moments

from tierwise.ir import ON_DEVICE, Menu, When, check_schedule, peak_bytes
from tierwise.lower import Chosen, image, keep_everything, with_budget
from tierwise.lower.chance import Chance
from tierwise.lower.choose import predicted, recompute_everything
from tierwise.lower.clock import Clock
from tierwise.lower.detail import Detail
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
    assert better(question, given, tries=0) is given
    few, again, many = (better(question, given, tries) for tries in (40, 40, 120))
    assert few == again and many.seconds <= few.seconds <= given.seconds


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
