import pytest
from problems import chain, machine

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Copy
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def copies(problem, schedule, src: str) -> list[str]:
    return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.src == src]


def test_text_of_a_whole_plan():
    # Everything takes 70: batch and a0 to a4 at the loss, and its gradient. In 40 the batch, a0 and a1 must go; a2 and later ones stay.
    problem = chain(5, on=machine(hbm=40))
    assert list(schedule_lines(problem.graph, plan(problem, "tf_swap"))) == [
        "compute fwd0", "copy batch hbm -> dram", "free batch hbm",
        "compute fwd1", "copy a0 hbm -> dram", "free a0 hbm",
        "compute fwd2", "copy a1 hbm -> dram", "free a1 hbm",
        "compute fwd3", "compute fwd4", "compute loss", "free a4 hbm",
        "compute bwd4", "free a3 hbm", "free d4 hbm",
        "copy a1 dram -> hbm", "free a1 dram", "compute bwd3", "free a2 hbm", "free d3 hbm",
        "copy a0 dram -> hbm", "free a0 dram", "compute bwd2", "free a1 hbm", "free d2 hbm",
        "copy batch dram -> hbm", "free batch dram", "compute bwd1", "free a0 hbm", "free d1 hbm",
        "compute bwd0", "free batch hbm", "free d0 hbm",
    ]  # fmt: skip


@pytest.mark.parametrize("hbm, gone", [(70, []), (69, ["batch"]), (59, ["batch", "a0"]), (40, ["batch", "a0", "a1"])])
def test_only_as_many_go_as_must_and_those_nearest_to_the_loss_stay(hbm, gone):
    problem = chain(5, on=machine(hbm=hbm))
    schedule = plan(problem, "tf_swap")
    assert copies(problem, schedule, "hbm") == gone
    assert copies(problem, schedule, "dram") == gone[::-1]


def test_a_fetch_is_triggered_as_late_as_its_copy_still_hides():
    # At 5 bytes a second a copy takes two ops, at 10 one: a0 is for bwd1, the op behind bwd2 and bwd3.
    for rate, before in ((5.0, "compute bwd3"), (10.0, "compute bwd2")):
        problem = chain(6, on=machine(rate=rate))
        lines = list(schedule_lines(problem.graph, plan(problem, "tf_swap", keep_bytes=40)))
        assert [line for line in lines if "dram -> hbm" in line] == ["copy a0 dram -> hbm", "copy batch dram -> hbm"]
        assert lines.index("copy a0 dram -> hbm") == lines.index(before) - 2


def test_hidden_copies_cost_no_time():
    problem = chain(6, on=machine(hbm=60))
    assert simulate(problem, plan(problem, "tf_swap")).seconds == 13


def test_keep_bytes_is_the_papers_threshold():
    problem = chain(4)
    assert copies(problem, plan(problem, "tf_swap", keep_bytes=0), "hbm") == ["batch", "a0", "a1", "a2"]
    assert copies(problem, plan(problem, "tf_swap", keep_bytes=29), "hbm") == ["batch", "a0"]
    assert copies(problem, plan(problem, "tf_swap", keep_bytes=1000), "hbm") == []


def test_the_least_budget_is_with_everything_swapped():
    problem = chain(5, on=machine(hbm=39))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem, "tf_swap")
    assert caught.value.least_bytes == 40  # a backward op holds two gradients, its map and the next one, fetched ahead
