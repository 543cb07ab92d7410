"""State on disk, which passes through host memory in a few buffers: the chain of toy_blocks.py, with 20 bytes of moments for each weight of 5."""

from __future__ import annotations

from dataclasses import replace

from toy_blocks import IN_HOST, ON_DISK
from toy_blocks import menu_with_moments as menu

from tierwise.ir import PASSING_HOST, Copy, Menu, Role, check_schedule, peak_bytes
from tierwise.lower import choose_jointly, image, keep_everything
from tierwise.lower.tries import above_disk


def on_disk(question: Menu):
    return image(question, replace(keep_everything(question), states=dict.fromkeys(question.homes, ON_DISK), update="backward"))


def test_state_from_disk_takes_nothing_of_host_memory():
    """There are the parameters, 5 bytes of each block, and gradients that wait; the 40 bytes of moments are in buffers, counted elsewhere."""
    made = on_disk(menu(2))
    check_schedule(made.problem, made.schedule)
    graph = made.problem.graph
    ways = {(s.src, s.dst) for s in made.schedule.steps if isinstance(s, Copy) and graph.storages[s.storage].role is Role.OPTIMIZER_STATE}
    assert ways == {("nvme", PASSING_HOST), (PASSING_HOST, "nvme")}
    assert 10 < peak_bytes(made.problem, made.schedule)["dram"] <= 20


def test_a_gradient_waits_in_host_memory_until_its_state_is_there():
    steps = on_disk(menu(2)).schedule.steps
    names = on_disk(menu(2)).problem.graph.storages
    to_buffers = [names[step.storage].name for step in steps if isinstance(step, Copy) and step.dst == PASSING_HOST]
    for block in ("1", "0"):
        assert to_buffers.index(f"block{block}.weight.moments") < to_buffers.index(f"w{block}.grad")


def test_where_host_memory_has_room_for_parameters_they_are_there():
    """Four blocks in 150 bytes, with 100 of weights and moments there: too little is left. The 80 of moments find no room in 50 of host memory."""
    chosen = choose_jointly(menu(4, hbm=150, dram=50), tiers=("dram", "nvme"), update="backward", tries=200)
    places = chosen.program.states.values()
    assert "nvme" in {place.state for place in places}
    assert {place.parameters for place in places} <= {"host", "device"}


def test_activations_stay_off_a_disk_that_is_busy_with_state():
    """In host memory there is room for some of them; on the disk, which would have room for all, they would wait behind the moments."""
    chosen = choose_jointly(menu(4, hbm=150, dram=45), tiers=("dram", "nvme"), update="backward", tries=200)
    assert {place.state for place in chosen.program.states.values()} == {"nvme"}
    assert {plan.tier for plan in chosen.program.calls.values() if plan.sent} == {"dram"}
    assert above_disk({"block0": IN_HOST, "block1": ON_DISK}, ("dram", "nvme")) == ("dram",)
    assert above_disk({"block0": IN_HOST}, ("dram", "nvme")) == ("dram", "nvme")


def test_rather_more_of_the_state_on_a_busy_disk_than_activations():
    """Who runs updates takes 10 bytes of host memory and 5 for each weight there: of 30 too little is left for the input that has to leave. One more
    weight on the disk is slower than none, and faster than that input."""
    takes = lambda states: (0, 10 + 5 * sum(place.parameters == "host" for place in states.values()))  # noqa: E731
    chosen = choose_jointly(menu(4, hbm=120, dram=30), tiers=("dram", "nvme"), update="backward", tries=200, takes=takes)
    assert {plan.tier for plan in chosen.program.calls.values() if plan.sent} == {"dram"}
    assert sum(place.parameters == "nvme" for place in chosen.program.states.values()) == 1
