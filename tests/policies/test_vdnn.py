from dataclasses import replace

import pytest
from problems import chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Compute, Copy, Variant, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.policies.vdnn import _ladder
from tierwise.simulate import simulate


def copies(problem, schedule, src: str) -> list[str]:
    return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.src == src]


def test_all_sends_every_layer_input_but_the_last():
    problem = chain(4)
    schedule = plan(problem, "vdnn", mode="all")
    assert copies(problem, schedule, "hbm") == ["batch", "a0", "a1"]  # a2 belongs to the last feature layer
    assert copies(problem, schedule, "dram") == ["a1", "a0", "batch"]


def test_text_of_a_whole_plan():
    problem = chain(3)
    assert list(schedule_lines(problem.graph, plan(problem, "vdnn", mode="all"))) == [
        "copy batch hbm -> dram", "compute fwd0",
        "copy a0 hbm -> dram", "free batch hbm join", "compute fwd1",
        "free a0 hbm join", "compute fwd2",
        "compute loss", "free a2 hbm",
        "copy a0 dram -> hbm", "compute bwd2",
        "free a0 dram join", "free a1 hbm", "free d2 hbm", "copy batch dram -> hbm", "compute bwd1",
        "free batch dram join", "free a0 hbm", "free d1 hbm", "compute bwd0",
        "free batch hbm", "free d0 hbm",
    ]  # fmt: skip


def test_the_join_makes_the_next_layer_wait():
    # Ten bytes take 2 s over a link of 5: each of batch, a0 and a1 delays the next layer by one second, and so does each way back.
    problem = chain(4, on=machine(rate=5.0))
    assert simulate(problem, plan(problem, "vdnn", mode="all")).seconds == 9 + 3 + 3


def test_conv_sends_only_what_convolutions_read():
    problem = chain(4, kinds=("relu", "conv2d"))
    assert copies(problem, plan(problem, "vdnn", mode="conv"), "hbm") == ["a0"]  # read by fwd1; fwd3 is the last feature layer


def test_the_walk_stops_at_a_convolution():
    # fwd0 conv, fwd1 relu, fwd2 relu, fwd3 conv, ... : with relus between, the walk reaches further back than one op.
    problem = chain(6, kinds=("conv2d", "relu", "relu"))
    lines = list(schedule_lines(problem.graph, plan(problem, "vdnn", mode="conv")))
    assert lines.index("copy a2 dram -> hbm") < lines.index("compute bwd5")  # needed by bwd3, first in the walk from the loss
    assert lines.index("copy batch dram -> hbm") > lines.index("compute bwd4")


def test_dyn_takes_the_first_rung_that_fits():
    problem = chain(6, kinds=("relu", "conv2d"))
    peaks = {mode: simulate(problem, plan(problem, "vdnn", mode=mode)).peak_bytes["hbm"] for mode in ("none", "conv", "all")}
    assert peaks["none"] > peaks["conv"] > peaks["all"]
    for mode, peak in peaks.items():
        assert plan(problem.with_budget(peak), "vdnn") == plan(problem.with_budget(peak), "vdnn", mode=mode)


def with_kernels(problem, workspace_bytes: int = 30):
    """Every convolution also runs in half the time with so much workspace, and in 0.8 of it with a third."""
    variants = [
        Variant(op.id, name, {"gpu": share}, workspace_bytes=scratch)
        for op in problem.graph.ops
        if op.kind == "conv2d"
        for name, share, scratch in (("fft", 0.5, workspace_bytes), ("winograd", 0.8, workspace_bytes // 3))
    ]
    return replace(problem, costs=replace(problem.costs, variants=tuple(variants)))


def kernels(problem, schedule) -> list[str]:
    return [step.variant for step in schedule.steps if isinstance(step, Compute) and problem.graph.ops[step.op].kind == "conv2d"]


def test_kernels_for_speed_and_for_memory():
    problem = with_kernels(chain(4))
    assert kernels(problem, plan(problem, "vdnn", mode="none")) == ["fft"] * 4
    assert kernels(problem, plan(problem, "vdnn", mode="none", kernels="memory")) == [""] * 4
    assert simulate(problem, plan(problem, "vdnn", mode="none")).seconds == 9 - 2


@pytest.mark.parametrize("policy", ["vdnn", "cdma", "cswap"])  # the last two send what vDNN chose, and run its kernels
def test_dyn_downgrades_kernels_before_it_gives_up_speed(policy):
    # With its maps offloaded a forward op holds 20 bytes: with 50 there is room for fft, with 49 for winograd.
    problem = with_kernels(chain(6))
    rungs = _ladder(problem.with_budget(49), "dram", lambda swap: swap)
    assert [peak_bytes(problem, schedule)["hbm"] for schedule in rungs] == [100, 50, 50, 40, 40, 40, 40]
    for hbm, kernel, seconds in ((50, "fft", 13 - 3), (49, "winograd", 13 - 1.2)):
        fast_bus = with_kernels(chain(6, on=machine(hbm=hbm, rate=1000.0)))
        found = plan(fast_bus, policy)
        assert kernels(fast_bus, found) == [kernel] * 6
        assert simulate(fast_bus, found).seconds == pytest.approx(seconds)


def test_the_last_rungs_have_the_least_workspace():
    problem = with_kernels(chain(6), workspace_bytes=3000)
    least = peak_bytes(problem, plan(problem, "vdnn", mode="all", kernels="memory"))["hbm"]
    found = plan(problem.with_budget(least), "vdnn")
    assert kernels(problem, found) == [""] * 6
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(least - 1), "vdnn")
    assert caught.value.least_bytes == least


def test_classifier_layers_stay():
    problem = chain(6, kinds=("conv2d", "conv2d", "conv2d", "linear", "linear", "linear"))
    assert copies(problem, plan(problem, "vdnn", mode="all"), "hbm") == ["batch", "a0"]


def test_unknown_mode():
    with pytest.raises(BadInput, match="mode is 'most'; vdnn knows none, conv, all and dyn"):
        plan(chain(2), "vdnn", mode="most")


def test_unknown_kernels():
    with pytest.raises(BadInput, match="vdnn knows performance and memory"):
        plan(chain(2), "vdnn", kernels="fastest")
