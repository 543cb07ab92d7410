import pytest
from problems import chain
from transformer import transformer

from tierwise.errors import BadInput
from tierwise.ir import Compute
from tierwise.policies import plan
from tierwise.policies.chen import _articulations
from tierwise.simulate import simulate


def recomputed(problem, schedule) -> list[str]:
    seen: set[int] = set()
    again = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            if step.op in seen:
                again.append(problem.graph.ops[step.op].name)
            seen.add(step.op)
    return again


def test_recomputes_every_second_activation():
    problem = chain(length=4, activation_bytes=10, weight_bytes=0)
    schedule = plan(problem, "chen", segments="sqrt")
    assert recomputed(problem, schedule) == ["fwd2", "fwd0"]  # a1 and a3 were kept
    assert simulate(problem, schedule).peak_bytes["hbm"] == 50  # batch, a1, a2 and two gradients


def test_nine_layers_in_three_segments():
    # Kept: batch, a2, a5 (a8 goes straight into the loss). Backward of the middle segment holds batch, a2, a3, a4 and two gradients.
    problem = chain(9)
    schedule = plan(problem, "chen", segments="sqrt")
    assert recomputed(problem, schedule) == ["fwd6", "fwd7", "fwd3", "fwd4", "fwd0", "fwd1"]
    assert simulate(problem, schedule).seconds == 19 + 6
    assert simulate(problem, schedule).peak_bytes["hbm"] == 70  # batch, a2, a5, a6, a7, d8 and d7


def test_the_search_finds_no_worse_a_peak_than_sqrt():
    for length in (4, 9, 16, 30):
        problem = chain(length)
        searched = simulate(problem, plan(problem, "chen")).peak_bytes["hbm"]
        assert searched <= simulate(problem, plan(problem, "chen", segments="sqrt")).peak_bytes["hbm"]


def test_memory_grows_with_the_root_of_the_depth():
    def peak(length: int, policy: str) -> int:
        problem = chain(length)
        return simulate(problem, plan(problem, policy)).peak_bytes["hbm"]

    assert peak(64, "chen") <= 2 * peak(16, "chen") + 20
    assert peak(256, "chen") <= 2 * peak(64, "chen") + 20
    assert peak(256, "chen") < 0.2 * peak(256, "keep_all")


def test_segments_may_be_made_to_end_where_only_one_output_is_needed():
    # In a residual layer something waits for each sum; behind a sum nothing does.
    problem = transformer(layers=9)
    joints = {problem.graph.storages[s].name for s in _articulations(problem.graph)}
    assert {name for name in joints if not name.endswith(".0")} == {f"{sum_}.{layer}" for layer in range(1, 9) for sum_ in "yz"}
    # Only sums are kept: everything within layers runs again.
    again = set(recomputed(problem, plan(problem, "chen", segments="sqrt", ends="articulation")))
    assert {f"{op}.{layer}" for layer in range(9) for op in ("norm1", "qkv", "softmax", "up", "gelu")} <= again


def test_unknown_words():
    with pytest.raises(BadInput, match="ends is 'some'; chen knows 'auto', 'any' and 'articulation'"):
        plan(chain(2), "chen", ends="some")
