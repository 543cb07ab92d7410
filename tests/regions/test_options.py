"""What is saved and what is repeated, on graphs small enough to check on paper; and against every possible choice on random ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierwise.errors import BadFile, BadInput, UnknownName
from tierwise.regions import JointGraph, JointValue, Kind, Option, option_saving, options
from tierwise.regions.cut import fewest_bytes
from tierwise.regions.values import CHEAP


def graph(*values: JointValue, keep: tuple[str, ...] = ()) -> JointGraph:
    return JointGraph(values, compiled=True, keep=keep)


def two_products(**changes: JointValue) -> JointGraph:
    """b = f(x W), c = b V, d = g(c); the gradients need b, c and d."""
    values = {
        "x": JointValue("x", Kind.INPUT, nbytes=10),
        "w": JointValue("w", Kind.PARAMETER, nbytes=7),
        "a": JointValue("a", Kind.MATMUL, nbytes=10, flops=100, made_from=("x", "w")),
        "b": JointValue("b", Kind.POINTWISE, nbytes=10, made_from=("a",), read_by_backward=True),
        "c": JointValue("c", Kind.MATMUL, nbytes=20, flops=400, made_from=("b", "w"), read_by_backward=True),
        "d": JointValue("d", Kind.POINTWISE, nbytes=20, made_from=("c",), read_by_backward=True),
    }
    return graph(*(values | changes).values(), keep=("b", "c", "d"))


def test_each_option_frees_bytes_for_the_least_work():
    found = options(two_products())
    assert [(option.name, option.saved, option.saved_bytes, option.recompute_flops) for option in found] == [
        ("keep", ("b", "c", "d"), 50, 0),
        ("cheap", ("b", "c"), 30, 0),  # d is a pass over c
        ("dear-1", ("c",), 20, 100),  # 10 flops a byte for a, 20 for c
        ("checkpoint", (), 0, 500),
    ]
    assert [option.input_bytes for option in found] == [0, 0, 10, 10]
    assert found[1].recompute_moved_bytes == 20 + 20  # reads c, writes d
    assert found[2].recompute_moved_bytes == 40 + (10 + 7 + 10) + (10 + 10)  # ... and a from x and w, and b


def test_measured_seconds_decide_where_there_are_some():
    found = options(two_products(), op_seconds={"a": 1.0, "c": 1.0})
    assert found[2].saved == ("b",)  # 0.1 s a byte for a, 0.05 for c


def test_fewer_options_leave_out_the_one_that_is_missed_least():
    assert [option.saved_bytes for option in options(two_products(), most=3)] == [50, 30, 0]
    assert [option.name for option in options(two_products(), most=2)] == ["keep", "checkpoint"]
    with pytest.raises(BadInput, match="at least 2"):
        options(two_products(), most=1)


def test_a_view_is_saved_as_the_value_it_looks_at():
    joint = graph(
        JointValue("x", Kind.INPUT, nbytes=4),
        JointValue("a", Kind.MATMUL, nbytes=8, made_from=("x",)),
        JointValue("t", Kind.VIEW, made_from=("a",)),
        JointValue("u", Kind.VIEW, made_from=("t",), read_by_backward=True),
    )
    option = option_saving(joint, ["u"])
    assert (option.saved, option.saved_bytes, option.recompute_moved_bytes) == (("a",), 8, 0)
    assert option_saving(joint, ["t"]).saved == ("a",)


def test_what_may_not_be_repeated_is_saved_whatever_is_asked_for():
    statistic = JointValue("r", Kind.REDUCTION, nbytes=1, made_from=("x",), must_save="it adds in another order")
    joint = graph(
        JointValue("x", Kind.INPUT, nbytes=10),
        statistic,
        JointValue("n", Kind.POINTWISE, nbytes=10, made_from=("x", "r"), read_by_backward=True),
        keep=("n",),
    )
    assert [option.saved for option in options(joint)] == [("n",), ("r",)]
    assert option_saving(joint, []).saved == ("r",)
    repeatable = graph(*(replace(value, must_save="") for value in joint.values), keep=("n",))
    assert options(repeatable)[-1].saved == ()


def test_results_of_one_op_are_saved_or_repeated_each_for_itself():
    joint = graph(
        JointValue("q", Kind.INPUT, nbytes=10),
        JointValue("op", Kind.ATTENTION, flops=50, made_from=("q",)),
        JointValue("out", Kind.PART, nbytes=10, made_from=("op",), read_by_backward=True),
        JointValue("sums", Kind.PART, nbytes=2, made_from=("op",), read_by_backward=True),
        keep=("out", "sums"),
    )
    assert [(option.saved, option.recompute_flops) for option in options(joint)] == [(("out", "sums"), 0), ((), 50)]
    assert option_saving(joint, ["out"]).recompute_flops == 50  # for the sums
    assert option_saving(joint, ["sums"]).recompute_moved_bytes == 10 + 12


def test_a_result_of_the_region_is_saved_before_anything_else():
    joint = graph(
        JointValue("x", Kind.INPUT, nbytes=8),
        JointValue("a", Kind.MATMUL, nbytes=8, flops=10, made_from=("x",)),
        JointValue("y", Kind.POINTWISE, nbytes=8, made_from=("a",), is_output=True),
        JointValue("mask", Kind.POINTWISE, nbytes=1, made_from=("y",), in_forward=False, read_by_backward=True),
        keep=("mask",),
    )
    cheapest = options(joint)[-1]
    assert (cheapest.saved, cheapest.saved_bytes, cheapest.output_bytes) == (("y",), 0, 8)
    assert cheapest.recompute_moved_bytes == 0  # the mask is made for backward alone


def test_of_equals_the_one_that_is_kept_anyway_then_the_nearest_to_backward():
    values = (
        JointValue("x", Kind.INPUT, nbytes=8),
        JointValue("a", Kind.MATMUL, nbytes=8, flops=10, made_from=("x",)),
        JointValue("b", Kind.POINTWISE, nbytes=8, made_from=("a",)),
        JointValue("c", Kind.POINTWISE, nbytes=8, made_from=("b",), read_by_backward=True),
    )
    assert fewest_bytes(graph(*values), ()) == ("c",)
    assert fewest_bytes(graph(*values, keep=("a",)), ()) == ("a",)


def test_a_region_without_gradients_has_one_option():
    (only,) = options(graph())
    assert (only.name, only.saved, only.saved_bytes) == ("keep", (), 0)


def test_json_and_back():
    joint = two_products()
    assert JointGraph.from_json(joint.to_json()) == joint
    assert all(Option.from_json(option.to_json()) == option for option in options(joint))
    with pytest.raises(BadFile, match="describe the region again"):
        JointGraph.from_json('{"values": [{"name": "a"}]}')
    with pytest.raises(BadFile, match="plan again"):
        Option.from_json('{"name": "keep"}')
    with pytest.raises(UnknownName, match="did you mean 'mask_1'"):
        option_saving(graph(JointValue("mask_1", Kind.POINTWISE)), ["mask_2"])


def test_the_fingerprint_is_of_the_ops_and_not_of_their_sizes():
    joint = two_products()
    assert joint.fingerprint == two_products(a=replace(joint.named["a"], nbytes=99, flops=1)).fingerprint
    assert joint.fingerprint != two_products(b=replace(joint.named["b"], read_by_backward=False)).fingerprint
    assert joint.fingerprint != replace(joint, compiled=False).fingerprint


@st.composite
def joints(draw: st.DrawFn) -> JointGraph:
    values = [JointValue("x", Kind.INPUT, nbytes=draw(st.integers(0, 9)))]
    for index in range(draw(st.integers(1, 7))):
        sources = draw(st.lists(st.sampled_from([value.name for value in values]), max_size=3, unique=True))
        kind = draw(st.sampled_from([Kind.POINTWISE, Kind.MATMUL, Kind.REDUCTION, Kind.VIEW, Kind.OTHER]))
        if kind is Kind.VIEW and not sources:
            kind = Kind.POINTWISE
        values.append(
            JointValue(
                f"v{index}",
                kind,
                nbytes=0 if kind is Kind.VIEW else draw(st.integers(0, 9)),
                flops=draw(st.integers(1, 9)) if kind is Kind.MATMUL else 0,
                made_from=tuple(sources[:1] if kind is Kind.VIEW else sources),
                must_save="because" if kind is Kind.REDUCTION else "",
                in_forward=draw(st.booleans()),
                read_by_backward=draw(st.booleans()),
                is_output=kind is not Kind.VIEW and draw(st.booleans()),
            )
        )
    joint = graph(*values)
    return replace(joint, keep=joint.hand_over([value.name for value in values]).saved)


@given(joints(), st.data())
@settings(max_examples=200, deadline=None)
def test_no_choice_saves_fewer_bytes_and_none_is_invalid(joint, data):
    allowed = data.draw(st.sets(st.sampled_from(sorted(joint.named))))
    saved = option_saving(joint, fewest_bytes(joint, allowed))

    def repeats_only_what_it_may(option: Option) -> bool:
        return all(joint.named[name].kind in CHEAP or name in allowed for name in option.recomputed)

    savable = [value.name for value in joint.values if joint.savable(value)]
    choices = (option_saving(joint, choice) for choice in chain.from_iterable(combinations(savable, count) for count in range(len(savable) + 1)))
    assert repeats_only_what_it_may(saved)
    assert saved.saved_bytes == min(choice.saved_bytes for choice in choices if repeats_only_what_it_may(choice))


@given(joints())
@settings(max_examples=200, deadline=None)
def test_options_of_any_graph_can_be_run_and_save_ever_fewer_bytes(joint):
    found = options(joint)
    assert found == options(joint)
    sizes = [option.saved_bytes for option in found]
    assert sizes == sorted(set(sizes), reverse=True)
    for option in found:
        handover = joint.hand_over(option.saved)
        at_hand = {*handover.saved, *handover.given, *handover.recomputed}
        assert all(source in at_hand for name in handover.recomputed for source in joint.named[name].made_from)
        assert all(value.name in at_hand for value in joint.values if value.read_by_backward)
        assert not any(joint.named[name].must_save for name in handover.recomputed)
