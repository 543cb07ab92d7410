"""Steps whose blocks are compiled into one op each: rules by layer find them, and MILP policies say how far they are from the best."""

import pytest
from problems import chain
from reading import copied, recomputed
from toy_blocks import menu

from tierwise.lower import image, keep_everything
from tierwise.policies import plan
from tierwise.policies._blocks import blocks


def compiled(length: int = 4):
    question = menu(length, 1000)
    return image(question, keep_everything(question)).problem


def test_a_compiled_block_is_a_layer():
    found = blocks(compiled().graph)
    assert [(block.name, block.ops) for block in found] == [("block0", (0,)), ("block1", (1,)), ("block2", (2,)), ("block3", (3,))]
    assert [block.backward for block in found] == [8, 7, 6, 5]  # the loss is op 4


@pytest.mark.parametrize("name", ["oneflow", "unsloth"])
def test_who_checkpoints_every_layer_runs_compiled_blocks_again(name):
    problem = compiled()
    schedule = plan(problem, name, **({"min_bytes": 0} if name == "unsloth" else {}))
    assert recomputed(problem, schedule) == ["block3.forward", "block2.forward", "block1.forward", "block0.forward"]
    assert copied(problem, schedule) == (["batch", "x1", "x2"] if name == "unsloth" else [])


def test_vdnn_sends_what_the_layers_in_a_block_were_given():
    problem = compiled()
    # What the last block saves is needed at once.
    assert copied(problem, plan(problem, "vdnn", mode="all")) == ["batch", "block0.h", "x1", "block1.h", "x2", "block2.h"]


@pytest.mark.parametrize("name", ["checkmate", "monet", "poet", "rockmate"])
def test_integer_programs_say_how_far_they_are_from_the_best(name):
    # Eight ops and a loss of a second each; within 60 of the 90 bytes something runs again, or, for poet, waits.
    (note,) = plan(chain(8).with_budget(60), name).notes
    assert note.endswith(" above every op once") and note.split()[-5].endswith("%")
