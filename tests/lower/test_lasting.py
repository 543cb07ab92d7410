"""Where policies keep lasting state, as homes of blocks: the chain of toy_blocks.py with its weights named after their blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import machine
from toy_blocks import EVERYWHERE, IN_HOST, ON_DISK, THROUGH, chain, menu_with_moments, with_compute_share

from tierwise import policies
from tierwise.errors import NotExecutable
from tierwise.ir import ON_DEVICE, PASSING, Copy, Costs, Phase, Placement, Problem, check_schedule
from tierwise.lower import image, keep_everything
from tierwise.lower.lasting import homes_in
from tierwise.lower.states import shared
from tierwise.simulate import simulate

ON_CPU = Placement("host", "cpu", gradients="host")
OFFERED = dict.fromkeys(("block0", "block1"), (ON_DEVICE, ON_CPU, Placement("host", "cpu", "host", "host")))


def problem(updated_on_cpu: tuple[str, ...] = ("w0", "w1")) -> Problem:
    """Two blocks; `updated_on_cpu`: whose updates the cpu can do, too."""
    graph = chain(2)
    storages = tuple(replace(s, name=f"block{s.name[1:]}.weight") if s.lasting else s for s in graph.storages)
    seconds = {(op.id, "gpu"): 1.0 for op in graph.ops}
    for op in graph.ops:
        if op.phase is Phase.UPDATE and graph.storages[op.mutates[0]].name in updated_on_cpu:
            seconds[op.id, "cpu"] = 1.0
    return Problem(replace(graph, storages=storages), machine(), Costs(seconds))


def test_nothing_leaves_where_everything_is_kept():
    assert homes_in(problem(), policies.plan(problem(), "keep_all"), OFFERED, "after") == {}


def test_zero_offload_updates_every_block_on_the_cpu():
    assert homes_in(problem(), policies.plan(problem(), "zero_offload"), OFFERED, "after") == {"block0": ON_CPU, "block1": ON_CPU}


def test_what_the_cpu_cannot_update_stays():
    question = problem(("w1",))
    assert homes_in(question, policies.plan(question, "zero_offload"), OFFERED, "after") == {"block1": ON_CPU}


def test_what_is_not_offered_is_refused():
    schedule = policies.plan(problem(), "zero_offload")
    with pytest.raises(NotExecutable, match=r"the state of block0 is to live on 'host' and be updated on 'cpu', which this optimizer"):
        homes_in(problem(), schedule, dict.fromkeys(OFFERED, (ON_DEVICE, ON_DISK)), "after")
    with pytest.raises(NotExecutable, match=r"w0\.update runs on cpu, and of this model's updates nothing is known; give fit an optimizer"):
        homes_in(problem(), schedule, {}, "after")


def test_shared_parameters_stay_where_the_state_leaves():
    question = problem()
    schedule = policies.plan(question, "zero_offload")
    away = {storage: ("dram",) for storage in schedule.home if question.graph.storages[storage].lasting}
    only_state = dict.fromkeys(OFFERED, (ON_DEVICE, ON_CPU))
    assert homes_in(question, replace(schedule, home={**schedule.home, **away}), only_state, "after") == {"block0": ON_CPU, "block1": ON_CPU}


@pytest.mark.parametrize(
    ("busy", "update", "cpu_share", "out", "into"),
    [
        ((1, 0), "backward", 0.86, 0.8, 0.7),
        ((0, 1), "backward", 1.0, 0.85, 0.85),
        ((8.0, 6.4), "backward", 0.8, 0.64, 0.64),
        ((32.0, 6.4), "backward", 0.83, 0.76, 0.685),
        ((8.0, 25.6), "backward", 0.8, 0.7975, 0.7975),
        ((6.6, 6.2), "after", 0.66, 0.62, 0.62),
        ((26.4, 6.2), "after", 0.765, 0.755, 0.68),
        ((0, 0), "after", 1, 1, 1),
    ],
)
def test_host_memory_is_shared(busy, update, cpu_share, out, into):
    """Beside copies the cpu updates at 0.86 of its rate, beside streamed state in backward at 0.8, and then the link has 0.64: what takes 8 and
    6.4 seconds alone takes 10 each. The cpu that is busy for a quarter of the link's time is in its way for a quarter of it; the other way round a
    quarter does half of the harm in backward."""
    before = problem()
    after = shared(before, *busy, update=update)
    assert [cost for (_, on), cost in after.costs.op_seconds.items() if on == "cpu"] == pytest.approx([1 / cpu_share] * 2)
    for src, dst, share in (("hbm", "dram", out), ("dram", "hbm", into), ("dram", "nvme", 1.0)):
        assert after.machine.link(src, dst).bytes_per_second == pytest.approx(share * before.machine.link(src, dst).bytes_per_second)


def test_updates_beside_backward_take_their_time_from_it():
    """A second each: block 1, whose update passes through the device, goes back in two seconds, block 0 in one; after backward both take one."""
    question = menu_with_moments(2)
    states = {"block1": Placement("host", "streamed", "device", "device")}
    question = replace(question, homes={path: (ON_DEVICE, home) for path, home in states.items()})
    for when, expected in (("backward", [2.0, 1.0]), ("after", [1.0, 1.0])):
        problem = image(question, replace(keep_everything(question), states=states, update=when)).problem
        assert [problem.device_seconds[op.id] for op in problem.graph.ops if op.name in ("block1.backward", "block0.backward")] == expected


@pytest.mark.parametrize(("rate", "expected"), [(5.0, 13 + 11 / 4), (1.0, 13.0)])
def test_copies_take_their_part_of_what_compute_draws(rate, expected):
    """Thirteen seconds of compute, and eleven copies of 5 bytes: four gradients leave, four weights come for forward, and all but the last, which
    stays, again for backward. A quarter of what these take alone, a second each. At a byte a second compute waits longer than that for the link."""
    question = with_compute_share(menu_with_moments(4, cpu_seconds=0.1), 0.25)
    machine = question.problem.machine.with_rates(lambda link, lane, other: rate)
    question = replace(question, problem=replace(question.problem, machine=machine), homes=dict.fromkeys(question.homes, (ON_DEVICE, IN_HOST)))
    states = dict.fromkeys(question.homes, IN_HOST)
    for when, compute in (("backward", expected), ("after", 13.0)):  # after backward there is no compute beside most of them
        problem = image(question, replace(keep_everything(question), states=states, update=when)).problem
        of_compute = [problem.device_seconds[op.id] for op in problem.graph.ops if op.phase is not Phase.UPDATE]
        assert sum(of_compute) == pytest.approx(compute)


def streamed(length, **renamed):
    """Everybody's state passes through the device, the parameters live in host memory."""
    question = menu_with_moments(length)
    home = Placement("host", "streamed", "host", "device")
    storages = tuple(replace(s, name=s.name.replace(".moments", renamed.get("moments", ".moments"))) for s in question.problem.graph.storages)
    question = replace(question, problem=replace(question.problem, graph=replace(question.problem.graph, storages=storages)))
    question = replace(question, homes={f"block{n}": (ON_DEVICE, home) for n in range(length)})
    states = {f"block{n}": home for n in range(length)}
    return image(question, replace(keep_everything(question), states=states, update="backward"))


@pytest.mark.parametrize(("moments", "comes"), [(".moments", ["weight", "moments"]), (".master", ["master"])])
def test_a_parameter_that_is_made_from_its_master_does_not_come_for_its_update(moments, comes):
    made = streamed(1, moments=moments)
    check_schedule(made.problem, made.schedule)
    copies = [step for step in made.schedule.steps if isinstance(step, Copy)]
    name = {storage.id: storage.name.rpartition(".")[2] for storage in made.problem.graph.storages}
    assert sorted(name[step.storage] for step in copies if step.dst == PASSING and step.src == "dram") == sorted(comes)
    left = {name[step.storage] for step in copies if step.src == PASSING and step.dst == "dram"}
    assert left == {"weight", moments[1:]}, "what the update makes goes home either way"


def test_parameters_go_home_before_state():
    """Which passes in chunks, so that they are not behind all of it: the next forward waits for them."""
    made = streamed(3, moments=".master")
    name = {storage.id: storage.name for storage in made.problem.graph.storages}
    left = [name[step.storage] for step in made.schedule.steps if isinstance(step, Copy) and (step.src, step.dst) == (PASSING, "dram")]
    assert left == [f"block{n}.weight{of}" for n in (2, 1, 0) for of in ("", ".master")]


def test_what_is_made_first_comes_first():
    """Three blocks' weights are on their way as the step begins: two that are updated by then, and the first one's, which is updated last."""
    question = menu_with_moments(4, cpu_seconds=0.1)
    question = replace(question, homes=dict.fromkeys(question.homes, EVERYWHERE))
    program = replace(keep_everything(question), states=dict.fromkeys(question.homes, IN_HOST), update="backward", ahead=2)
    made = image(question, program)
    name = {storage.id: storage.name for storage in made.problem.graph.storages}
    coming = [name[step.storage] for step in made.schedule.steps if isinstance(step, Copy) and (step.src, step.dst) == ("dram", "hbm")]
    assert coming[:4] == [f"block{n}.weight" for n in (1, 2, 0, 3)]


def test_state_is_on_its_way_through_the_device_by_bytes_not_by_updates():
    """Six updates of 20 bytes: all that comes at once is less than a few chunks, so nobody's state waits until another's has left."""
    made = streamed(6)
    moments = {storage.id for storage in made.problem.graph.storages if storage.name.endswith(".moments")}
    ways = [(step.src, step.dst) for step in made.schedule.steps if isinstance(step, Copy) and step.storage in moments]
    assert ways.index((PASSING, "dram")) >= 3, ways


@pytest.mark.parametrize("few", [1, 2, 3])
def test_backward_waits_until_few_enough_gradients_are_left_on_the_device(few):
    """Over two bytes a second each of six updates takes longer than all of backward: by the end of it that of the first block has made its gradient,
    and so many wait for their updates."""
    question = menu_with_moments(6, hbm=1000)
    machine = question.problem.machine.with_rates(lambda link, lane, other: 2.0)
    question = replace(question, problem=replace(question.problem, machine=machine), homes=dict.fromkeys(question.homes, EVERYWHERE))
    program = replace(keep_everything(question), states=dict.fromkeys(question.homes, THROUGH), update="backward")
    made = image(question, replace(program, in_flight=few))
    check_schedule(made.problem, made.schedule)
    waiting = simulate(made.problem, made.schedule).memory[PASSING]["grad"]
    assert (waiting.nbytes[-1], max(waiting.nbytes)) == (few * 5, few * 5 + 5)


def test_after_backward_other_copies_are_faster_than_state():
    """Half of them move in backward, when no update runs: 0.85 of ten bytes a second, where state comes at less."""
    question = menu_with_moments(2)
    homes = {"block0": IN_HOST, "block1": Placement("host", "streamed", "device", "device")}
    question = replace(question, homes={path: (ON_DEVICE, home) for path, home in homes.items()})
    after, backward = (
        image(question, replace(keep_everything(question), states=homes, update=when)).problem.machine for when in ("after", "backward")
    )
    assert after.link("dram", "hbm").bytes_per_second == 8.5 > after.link("dram", PASSING).bytes_per_second
    assert backward.link("dram", "hbm").bytes_per_second == backward.link("dram", PASSING).bytes_per_second
