"""What a program comes to, counted by hand on the chain of toy_blocks.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_blocks import CHECKPOINT, IN_HOST, ON_DISK, menu, menu_with_moments

from tierwise.errors import BadInput
from tierwise.ir import INPUTS, CallPlan, Compute, Copy, Free, Program, When, check_schedule, peak_bytes
from tierwise.lower import image, keep_everything
from tierwise.lower.image import with_lasting
from tierwise.simulate import simulate


def steps_of(made):
    """The schedule in words: op names, and storages with where they go."""
    graph = made.problem.graph
    words = []
    for step in made.schedule.steps:
        if isinstance(step, Compute):
            words.append(graph.ops[step.op].name)
        elif isinstance(step, Copy):
            words.append(f"{graph.storages[step.storage].name} -> {step.dst}")
        elif isinstance(step, Free) and step.join:
            words.append(f"wait for {graph.storages[step.storage].name}")
    return words


def test_each_call_is_two_ops_and_saves_one_storage_for_each_value():
    made = image(menu(2, 1000), keep_everything(menu(2, 1000)))
    assert [op.name for op in made.problem.graph.ops][:5] == ["block0.forward", "block1.forward", "loss", "block1.backward", "block0.backward"]
    assert [s.name for s in made.problem.graph.storages if s.name.endswith(".h")] == ["block0.h", "block1.h"]
    # At the first backward: 2 weights, batch and x1, both h, the gradient that comes in, the two that go out.
    assert peak_bytes(made.problem, made.schedule)["hbm"] == 2 * 5 + 2 * 10 + 2 * 30 + 10 + (10 + 5)
    assert simulate(made.problem, made.schedule).seconds == 2 * 2.0 + 1.0 + 2 * 1.0


def test_a_checkpoint_saves_nothing_and_needs_room_to_make_it_again():
    program = Program({0: CallPlan("checkpoint"), 1: CallPlan("checkpoint")})
    made = image(menu(2, 1000), program)
    check_schedule(made.problem, made.schedule)
    workspace = CHECKPOINT.backward_workspace_bytes
    assert peak_bytes(made.problem, made.schedule)["hbm"] == 2 * 5 + 2 * 10 + 10 + (10 + 5) + workspace
    assert simulate(made.problem, made.schedule).seconds == 2 * 2.0 + 1.0 + 2 * 2.0


def test_a_sent_value_leaves_after_forward_and_is_back_before_the_backward_one_call_ahead():
    program = Program({0: CallPlan("keep", ("h",)), 1: CallPlan("keep"), 2: CallPlan("keep")})
    made = image(menu(3, 1000), program)
    check_schedule(made.problem, made.schedule)
    assert steps_of(made)[:9] == [
        "block0.forward",
        "block0.h -> dram",
        "block1.forward",
        "wait for block0.h",
        "block2.forward",
        "loss",
        "block2.backward",
        "block0.h -> hbm",
        "block1.backward",
    ]
    # At the last forward there are 3 weights, batch to x3 and two h; at the first backward one x less and two gradients and a weight's more.
    assert peak_bytes(made.problem, made.schedule)["hbm"] == 3 * 5 + 3 * 10 + 2 * 30 + 10 + (10 + 5)


def test_inputs_leave_too():
    program = Program({call: CallPlan("checkpoint", (INPUTS,)) for call in range(3)})
    made = image(menu(3, 1000), program)
    check_schedule(made.problem, made.schedule)
    assert [word for word in steps_of(made) if "-> dram" in word] == ["x1 -> dram", "x2 -> dram"]  # whoever gave the batch holds it
    assert made.program == Program({**program.calls, 0: CallPlan("checkpoint")})


def test_a_value_that_is_not_saved_cannot_be_sent():
    with pytest.raises(BadInput, match="does not save 'k'"):
        image(menu(2, 1000), Program({0: CallPlan("keep", ("k",)), 1: CallPlan("keep")}))


def test_distances_below_one_are_refused():
    with pytest.raises(BadInput, match="at least 1"):
        image(menu(3, 1000), Program({0: CallPlan("keep", ("h",), fetch=0), 1: CallPlan("keep"), 2: CallPlan("keep")}))


def test_lasting_state_placed_afterwards_is_the_same_image():
    question = menu_with_moments(3)
    states = {"block1": ON_DISK, "block2": IN_HOST}
    kept = keep_everything(question)
    whole, after = image(question, replace(kept, states=states, update="backward")), with_lasting(image(question, kept), states, When("backward"))
    assert (whole.schedule, whole.problem, whole.program) == (after.schedule, after.problem, after.program)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_parameters_that_live_elsewhere_come_so_many_regions_ahead(ahead):
    """Each while the region so many before its own runs, in forward and in backward."""
    question = menu_with_moments(5)
    states = dict.fromkeys(question.homes, IN_HOST)
    words = steps_of(image(question, replace(keep_everything(question), states=states, update="backward", ahead=ahead)))
    for block in range(ahead, 5):
        before = words.index(f"block{block - ahead}.forward")
        assert f"block{block}.weight -> hbm" in words[words.index(f"block{block - ahead - 1}.forward") if block > ahead else 0 : before]


def test_what_stays_is_updated_on_the_device_as_backward_goes_on():
    """Of three blocks the last one's state is elsewhere. The others' gradients, five bytes each, are gone before the next block's are there; after
    backward both would be held at once. With nothing elsewhere torch updates all of it at the end."""
    question = menu_with_moments(3)

    def listed(update, states):
        made = image(question, replace(keep_everything(question), states=states, update=update))
        (grad,) = (s.id for s in made.problem.graph.storages if s.name == "w1.grad")
        found = [step for step in made.schedule.steps if isinstance(step, Compute) or (isinstance(step, Free) and step.storage == grad)]
        words = ["w1.grad goes" if isinstance(step, Free) else made.problem.graph.ops[step.op].name for step in found]
        return [word for word in words if word.endswith((".backward", ".update", "goes")) and "2" not in word]

    one = {"block2": IN_HOST}
    assert listed("backward", one) == ["block1.backward", "w1.update", "w1.grad goes", "block0.backward", "w0.update"]
    at_the_end = ["block1.backward", "block0.backward", "w1.update", "w1.grad goes", "w0.update"]
    assert listed("after", one) == listed("backward", {}) == at_the_end


def test_what_two_regions_share_is_updated_at_the_end():
    """Whoever has the gradient of the one is not done with it before the other's is there."""
    question = menu_with_moments(3)
    graph = question.problem.graph
    (shared,) = (s.id for s in graph.storages if s.name == "block1.weight")
    ops = [replace(op, reads=(*op.reads, shared)) if op.name == "block0.mm" else op for op in graph.ops]
    question = replace(question, problem=replace(question.problem, graph=replace(graph, ops=tuple(ops))))
    words = steps_of(image(question, replace(keep_everything(question), states={"block2": IN_HOST}, update="backward")))
    assert words.index("w1.update") > words.index("block0.backward") < words.index("w0.update")
