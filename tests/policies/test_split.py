"""A step in pieces, small enough to write down."""

from __future__ import annotations

import dataclasses

from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, machine, relu_net, with_sign_bits

from tierwise.ir import Codec, Costs, Processor, Role, Variant, check_graph, check_schedule
from tierwise.ir.judge import choice_faults
from tierwise.ir.text import graph_lines
from tierwise.policies import keep_all
from tierwise.policies._split import split


def two_layers(middle: str = "relu"):
    """x -> conv -> a -> `middle` -> b -> loss, and back, with the conv's weight and its update."""
    b = GraphBuilder()
    x, w = b.storage("x", 8, Role.INPUT), b.storage("w", 6, Role.PARAM)
    a, c, d, e = (b.storage(name, 8, Role.ACTIVATION) for name in "abde")
    g = b.storage("g", 6, Role.GRAD)
    b.op("conv", FORWARD, [x, w], [a], kind="conv2d", workspace_bytes=5, flops=100, seconds=4)
    b.op("middle", FORWARD, [a], [c], kind=middle)
    b.op("loss", BACKWARD, [c], [d], kind="loss")
    b.op("middle'", BACKWARD, [d, c], [e], kind=f"{middle}_backward")
    b.op("conv'", BACKWARD, [e, x, w], [g], kind="conv2d_backward")
    b.op("step", UPDATE, [g], [], mutates=(w,), kind="update")
    return b.problem()


def test_each_piece_goes_through_the_run_and_backward_begins_with_the_last():
    # b is read by the loss, and x is an input: both stay whole. So does d, which the loss writes, and the gradient, which both pieces add to.
    assert list(graph_lines(split(two_layers(), 2).graph)) == [
        "0 forward conv 1/2: x, w -> a 1/2",
        "1 forward middle 1/2: a 1/2 -> b",
        "2 forward conv 2/2: x, w -> a 2/2",
        "3 forward middle 2/2: a 2/2, b -> b!",
        "4 backward loss: b -> d",
        "5 backward middle' 2/2: d, b -> e 2/2",
        "6 backward conv' 2/2: e 2/2, x, w -> g",
        "7 backward middle' 1/2: d, b -> e 1/2",
        "8 backward conv' 1/2: e 1/2, x, w, g -> g!",
        "9 update step: g, w -> w!",
    ]


def test_sizes_workspace_and_seconds_are_shared():
    problem = two_layers()
    launching = dataclasses.replace(problem.machine, processors=(Processor("gpu", "hbm", launch_seconds=0.5), Processor("cpu", "dram")))
    pieces = split(dataclasses.replace(problem, machine=launching), 4)
    conv = pieces.graph.ops[0]
    assert {s.name: s.nbytes for s in pieces.graph.storages if s.name.startswith("a ")} == {f"a {i}/4": 2 for i in range(1, 5)}
    assert (conv.workspace_bytes, conv.flops) == (2, 25)  # 5 bytes in four are two each
    assert pieces.seconds(0, "gpu") == 0.5 + 3.5 / 4  # a launch of its own, and a quarter of the work
    assert pieces.seconds(len(pieces.graph.ops) - 1, "gpu") == 1  # the update is not split


def test_batch_norm_ends_a_run():
    problem = two_layers("batch_norm")
    assert split(problem, 2) is problem  # the conv alone touches nothing that only split ops touch


def test_what_does_not_divide_stays_whole():
    problem = two_layers()
    assert split(problem, 3) is problem


def test_an_op_in_place_is_split_with_both_its_sides_or_not_at_all():
    pieces = split(relu_net(), 2).graph
    in_place = {op.name: [(pieces.storages[old].name, pieces.storages[new].name) for old, new in op.in_place] for op in pieces.ops if op.in_place}
    assert in_place == {"relu0 1/2": [("c0 1/2", "r0 1/2")], "relu0 2/2": [("c0 2/2", "r0 2/2")]}


def test_codecs_and_variants_follow_their_pieces():
    problem = with_sign_bits(relu_net())
    pieces = split(problem, 2)
    name = {s.id: s.name for s in pieces.graph.storages}
    sizes = {name[s]: nbytes for s, nbytes in pieces.costs.codec_named["sign"].encoded_bytes.items()}
    assert sizes == {"r0 1/2": 4, "r0 2/2": 4, "r1 1/2": 2, "r1 2/2": 2}  # 64 and 32 bytes of values, an eighth, in halves
    forms = {pieces.graph.ops[v.op].name: {name[s]: form for s, form in v.forms.items()} for v in pieces.costs.variants}
    assert forms["relu0' 2/2"] == {"r0 2/2": "sign"} and len(forms) == 4
    assert not list(choice_faults(pieces))


def test_a_variant_that_reads_another_piece_than_its_op_is_dropped():
    problem = relu_net()
    c0, r0 = 1, 2
    relu = next(op for op in problem.graph.ops if op.name == "relu0'")
    other = Variant(relu.id, "from input", {"gpu": 1.0}, reads=(relu.reads[0], c0))
    problem = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, (Codec("x", {r0: 3}),), (other,)))
    assert split(problem, 2).costs.variants == ()


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=training_steps(), pieces=st.sampled_from((2, 3, 4)))
def test_any_step_in_pieces_is_a_step(problem, pieces):
    """Legal, with the same bytes, the same work and no more of it than before."""
    problem = dataclasses.replace(problem, machine=machine(hbm=100_000))
    new = split(problem, pieces)
    check_graph(new.graph)
    check_schedule(new, keep_all.plan(new))
    assert sum(s.nbytes for s in new.graph.storages) == sum(s.nbytes for s in problem.graph.storages)
    assert abs(sum(new.costs.op_seconds.values()) - sum(problem.costs.op_seconds.values())) < 1e-9
    assert {s.name for s in new.graph.storages if s.lasting} == {s.name for s in problem.graph.storages if s.lasting}
