"""State on disk, which passes through host memory in a few buffers: the chain of toy_blocks.py, with 20 bytes of moments for each weight of 5."""

from __future__ import annotations

from dataclasses import replace

from problems import machine
from toy_blocks import CHECKPOINT, KEEP, chain

from tierwise.ir import ON_DEVICE, PASSING, PASSING_HOST, Copy, Costs, Menu, Phase, Placement, Problem, Role, Storage, check_schedule, peak_bytes
from tierwise.lower import choose_jointly, image, keep_everything
from tierwise.lower.image import with_lasting

ON_DISK = Placement("nvme", "cpu", "host", "host")
ALL_ON_DISK = Placement("nvme", "cpu", "nvme", "host")


def menu(length: int, *, hbm: int = 10_000, dram: int = 100_000, cpu_seconds: float = 1.0) -> Menu:
    graph = chain(length)
    storages = [replace(s, name=f"block{s.name[1:]}.weight") if s.lasting else s for s in graph.storages]
    ops = list(graph.ops)
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            storages.append(Storage(len(storages), f"{storages[op.mutates[0]].name}.moments", 20, Role.OPTIMIZER_STATE, lasting=True))
            ops[op.id] = replace(op, mutates=(*op.mutates, storages[-1].id))
    seconds = {(op.id, "gpu"): 1.0 for op in ops} | {(op.id, "cpu"): cpu_seconds for op in ops if op.phase is Phase.UPDATE}
    problem = Problem(replace(graph, ops=tuple(ops), storages=tuple(storages)), machine(hbm, dram), Costs(seconds))
    homes = {f"block{n}": (ON_DEVICE, Placement("host", "cpu", "host", "host"), ON_DISK, ALL_ON_DISK) for n in range(length)}
    return Menu(problem, {0: (KEEP, CHECKPOINT)}, homes)


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
    chosen = choose_jointly(menu(4, hbm=150, dram=50), tiers=("dram", "nvme"), update="backward", seconds=1.0)
    places = chosen.program.states.values()
    assert "nvme" in {place.state for place in places}
    assert {place.parameters for place in places} <= {"host", "device"}


def test_activations_stay_off_a_disk_that_is_busy_with_state():
    chosen = choose_jointly(menu(4, hbm=150, dram=50), tiers=("dram", "nvme"), update="backward", seconds=1.0)
    assert {plan.tier for plan in chosen.program.calls.values() if plan.sent} <= {"dram"}


def test_after_backward_other_copies_are_faster_than_state():
    """Half of them move in backward, when no update runs: 0.85 of ten bytes a second, where state comes at less."""
    question = menu(2)
    homes = {"block0": Placement("host", "cpu", "host", "host"), "block1": Placement("host", "streamed", "device", "device")}
    question = replace(question, homes={path: (ON_DEVICE, home) for path, home in homes.items()})
    after, backward = (
        image(question, replace(keep_everything(question), states=homes, update=when)).problem.machine for when in ("after", "backward")
    )
    assert after.link("dram", "hbm").bytes_per_second == 8.5 > after.link("dram", PASSING).bytes_per_second
    assert backward.link("dram", "hbm").bytes_per_second == backward.link("dram", PASSING).bytes_per_second


def test_lasting_state_placed_afterwards_is_the_same_image():
    question = menu(3)
    states = {"block1": ON_DISK, "block2": Placement("host", "cpu", "host", "host")}
    kept = keep_everything(question)
    whole, after = image(question, replace(kept, states=states, update="backward")), with_lasting(image(question, kept), states, "backward")
    assert (whole.schedule, whole.problem, whole.program) == (after.schedule, after.problem, after.program)
