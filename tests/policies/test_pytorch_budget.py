import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain
from reading import recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Role, peak_bytes
from tierwise.policies import plan
from tierwise.policies.pytorch_budget import _left_out


def again(fraction: float, kinds=("matmul", "gelu")) -> list[str]:
    problem = chain(4, kinds=kinds)
    return recomputed(problem, plan(problem, "pytorch_budget", fraction=fraction))


def test_by_default_only_what_is_fused_in_backward_is_computed_again():
    # a1 is cheap, but bwd2 is a product, which cannot be fused with it: it would have to be written to memory all the same.
    assert again(1.0) == []
    # exp after exp: bwd2 is fused with what makes a1 again.
    assert again(1.0, kinds=("matmul", "gelu", "gelu", "matmul")) == ["fwd1"]


def test_a_fraction_lifts_the_bans_on_cheap_ops_first():
    # The default saves batch, a0..a3: 40 beyond the input. Without a1 and a3 it is 20 of 40.
    assert again(0.9) == ["fwd1"]
    assert again(0.51) == ["fwd1"]


def test_then_a_knapsack_picks_the_work_to_save():
    # Of the products a0 and a2, a quarter each, 0.4 has room for one: a2 is made again from a0.
    assert again(0.4) == ["fwd1", "fwd2"]


def test_zero_saves_the_inputs_alone():
    assert again(0.0) == ["fwd0", "fwd1", "fwd2"]


def test_the_cut_is_where_the_fewest_bytes_pass():
    b = GraphBuilder()
    sizes = {"x": 20, "a": 40, "narrow": 5, "wide": 40, "d": 40}
    x, a, narrow, wide, d = (b.storage(n, z, Role.INPUT if n == "x" else Role.ACTIVATION) for n, z in sizes.items())
    b.op("product", FORWARD, [x], [a], kind="matmul")
    b.op("mean", FORWARD, [a], [narrow], kind="mean")  # a reduction: never again
    b.op("exp", FORWARD, [narrow], [wide], kind="exp")
    b.op("loss", BACKWARD, [x], [d], kind="loss")
    b.op("exp'", BACKWARD, [d, wide], [b.storage("e", 40, Role.ACTIVATION)], kind="exp_backward")
    problem = b.problem()
    schedule = plan(problem, "pytorch_budget", fraction=1.0)
    assert recomputed(problem, schedule) == ["exp"]
    assert kept_for_backward(problem, schedule) == 5  # narrow; neither wide nor a, whatever wide is made from


def test_knapsack():
    assert _left_out([0.5, 0.5, 0.4], [3.0, 1.0, 2.0], 0.9) == [1]
    assert _left_out([0.5, 0.0], [1.0, 1.0], 0.2) == [0]  # what weighs nothing is always taken
    assert _left_out([], [], 1.0) == []


def test_the_largest_fraction_that_fits():
    problem = transformer(layers=4)
    peak = {f: peak_bytes(problem, plan(problem, "pytorch_budget", fraction=f))["hbm"] for f in (1.0, 0.5, 0.0)}
    assert peak[1.0] > peak[0.5] and peak[0.0] > peak[0.5]  # saving the inputs alone means to hold it all again when backward begins
    found = plan(problem.with_budget(peak[0.5]), "pytorch_budget")
    assert peak_bytes(problem, found)["hbm"] <= peak[0.5]
    assert len(recomputed(problem, found)) <= len(recomputed(problem, plan(problem, "pytorch_budget", fraction=0.5)))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(40), "pytorch_budget")
    assert peak_bytes(problem, plan(problem.with_budget(caught.value.least_bytes), "pytorch_budget"))["hbm"] == caught.value.least_bytes


def test_blocks_by_themselves_keep_their_inputs():
    problem = transformer(layers=4)
    schedule = plan(problem, "pytorch_budget", fraction=0.0, graphs="blocks")
    assert kept_for_backward(problem, schedule) == 4 * 2


def test_unknown_words():
    with pytest.raises(BadInput, match="fraction is 2; give 0 to 1"):
        plan(chain(2), "pytorch_budget", fraction=2.0)
    with pytest.raises(BadInput, match="graphs is 'all'; pytorch_budget knows whole, blocks"):
        plan(chain(2), "pytorch_budget", graphs="all")
