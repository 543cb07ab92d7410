"""Every number of a report, on runs worked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from report.example_runs import layered, measured, planned

from tierwise.ir import Curve, Run, Span, Timeline, Within
from tierwise.report.summary import Copied, summarize, times
from tierwise.report.terminal import off_words


def only(run):
    (summary,) = summarize([run]).runs
    return summary


def test_chen_in_numbers():
    run = only(planned("chen"))
    assert (run.title, run.device_tier, run.budget_bytes, run.machine) == ("chain · chen · 50 B", "hbm", 50, "toy")
    assert run.saved_bytes == {"kept": 30, "copied": 0, "recomputed": 20}
    assert (run.recomputed_ops, run.recomputed_seconds, run.copied, run.homes) == (2, 2.0, (), ())
    (gpu,) = run.predicted.lanes
    assert (gpu.name, gpu.what, gpu.spans, gpu.busy_seconds, gpu.share) == ("gpu", "computes in hbm", 11, 11.0, 1.0)
    assert gpu.phase_seconds == {"forward": 4.0, "backward": 5.0, "recompute": 2.0}
    assert run.predicted.waiting_seconds == 0.0
    hbm = run.predicted.peaks[0]
    assert (hbm.tier, hbm.nbytes, hbm.capacity_bytes, hbm.at_seconds, hbm.roles) == ("hbm", 50, 50, 6.0, {"input": 10, "activation": 40})
    assert hbm.during == "bwd3"


def test_vdnn_in_numbers():
    run = only(planned("vdnn"))
    assert run.saved_bytes == {"kept": 20, "copied": 30, "recomputed": 0}
    assert run.copied == (
        Copied("activation", "dram", "hbm", 20, 2), Copied("activation", "hbm", "dram", 20, 2),
        Copied("input", "dram", "hbm", 10, 1), Copied("input", "hbm", "dram", 10, 1),
    )  # fmt: skip
    assert [(lane.name, lane.what, lane.busy_seconds) for lane in run.predicted.lanes] == [
        ("gpu", "computes in hbm", 9.0),
        ("out", "hbm → dram", 3.0),
        ("in", "dram → hbm", 3.0),
    ]


def test_what_compiled_blocks_recompute_inside():
    run = layered()
    run = replace(run, within=(Within("layers.0", 30, 0.25), Within("layers.1", 30, 0.5), Within("head", 0, 0.0)))
    found = only(run)
    assert (found.recomputed_ops, found.recomputed_blocks, found.recomputed_seconds) == (1, 2, 2.75)  # the op of two seconds, and the blocks
    assert found.saved_bytes == {"kept": 10, "copied": 10, "recomputed": 70}
    assert [child.recomputed_bytes for child in found.modules.children[0].children] == [40, 30]
    assert "70 B are recomputed (1 op and inside 2 blocks, 2.75 s)" in " ".join(found.words)


def test_what_nobody_said_is_not_known():
    """A whole block's backward is one op: the schedule cannot tell what runs twice in it."""
    run = planned("chen")
    ops = tuple(replace(op, kind="region_backward") if op.name == "bwd3" else op for op in run.problem.graph.ops)
    run = replace(run, problem=replace(run.problem, graph=replace(run.problem.graph, ops=ops)))
    assert (only(run).recomputed_ops, only(run).recomputed_seconds) == (None, None)
    assert only(replace(run, within=())).recomputed_ops == 2


def test_predicted_against_measured():
    run = only(measured(planned("vdnn"), slower=1.5, more_bytes=2))
    gaps = {gap.what: gap for gap in run.gaps}
    assert (gaps["step time"].predicted, gaps["step time"].measured, gaps["step time"].off) == (9.0, 13.5, 0.5)
    assert (gaps["peak of hbm"].predicted, gaps["peak of hbm"].measured) == (40, 42)
    assert gaps["out busy"].off == 0.5 and gaps["device waiting"].off is None  # nothing was predicted to wait
    assert run.best is run.measured


def test_what_the_device_waits_for():
    """Two ops of a second in a period of five; `in` works from 1 to 3, `out` from 4 into the next period until 5.5."""
    spans = (Span(0, "gpu", 0.0, 1.0), Span(1, "in", 1.0, 3.0), Span(2, "gpu", 3.0, 4.0), Span(3, "out", 4.0, 5.5))
    found = times(Timeline(5.0, {}, spans, {}, False), None, None)
    assert found.waiting_seconds == 3.0  # 1 to 3 and 4 to 5
    assert found.waiting_while == {"in": 2.0, "out": 1.0}  # out's last half second runs under the next op
    back = times(Timeline(5.0, {}, (*spans[:3], Span(3, "out", -1.0, 0.5)), {}, False), None, None)
    assert back.waiting_while == {"in": 2.0, "out": 1.0}  # the same work, named by the period before


def test_the_peak_is_of_one_moment():
    """At 1 the first role gives back as the second takes: they are never there together."""
    memory = {"hbm": {"a": Curve((0.0, 1.0), (10, 0)), "b": Curve((0.0, 1.0, 2.0), (1, 9, 5))}}
    peak = times(Timeline(3.0, {"hbm": 11}, (), memory, True), None, None).peaks[0]
    assert (peak.at_seconds, peak.roles, peak.capacity_bytes) == (0.0, {"a": 10, "b": 1}, None)


def test_a_bare_timeline_is_a_run():
    run = only(Run("mine", measured=Timeline(2.0, {"cuda": 7}, (Span(0, "stream 7", 0.0, 1.0),), {}, True)))
    assert (run.title, run.device_tier, run.modules, run.saved_bytes, run.recomputed_ops) == ("mine", "cuda", None, {}, None)
    assert run.words == ("The step took 2.00 s and held 7 B of cuda.", "The stream 7 waits 1.00 s (50.0%) of the step.")


def test_runs_of_the_same_name_are_told_apart():
    runs = [planned("chen"), planned("chen", 60), planned("chen"), planned("chen")]
    assert [run.title for run in summarize(runs).runs] == [
        "chain · chen · 50 B",
        "chain · chen · 60 B",
        "chain · chen · 50 B #2",
        "chain · chen · 50 B #3",
    ]


def test_losses_are_compared_bit_for_bit():
    run = replace(planned("chen"), losses=(1.0, 2.0, math.nan, 4.0), untouched_losses=(1.0, 2.0000000000000004, math.nan))
    losses = only(run).losses
    assert (losses.compared, losses.identical) == (3, 2)
    assert losses.losses == (1.0, 2.0, None, 4.0)


def test_the_words():
    assert only(planned("chen")).words == (
        "The step takes 11.0 s and holds 50 B of hbm, within the budget of 50 B.",
        "Keeping everything would take 9.00 s and 60 B, which does not fit; this plan takes 22.2% longer.",
        "Of 50 B that backward needs of forward, 30 B stay in hbm and 20 B are recomputed (2 ops, 2.00 s).",
        "The gpu never waits.",
        "hbm is fullest at 6.00 s, during bwd3; most of it is 40 B of activations and 10 B of inputs.",
        "At the rates of this machine no schedule within this budget is faster than 9.00 s; this one takes 22.2% longer.",
    )


def test_the_words_of_the_plan_stand_apart():
    run = only(replace(planned("chen"), words=("everything fits", "Chosen by hand.")))
    assert run.plan == ("Everything fits.", "Chosen by hand.") and "fits" not in " ".join(run.words)


def test_what_is_off_by_more_than_itself_is_said_in_times():
    assert [off_words(off) for off in (0.031, -0.5, 0.999, 5.4)] == ["+3.1%", "-50.0%", "+99.9%", "6.4×"]


def test_the_words_of_a_measurement():
    words = only(measured(planned("vdnn"), slower=1.1, more_bytes=20)).words
    assert "The step took 9.90 s and held 60 B of hbm, more than the budget of 50 B." in words
    assert "Measured: 9.90 s, 10.0% more than predicted and a peak of 60 B, 50.0% more than predicted." in words
    assert "The allocator reserved 64 B; 7 B more are outside the allocator and not accounted for." in words
    assert words[-1] == "The loss is that of the untouched run, bit for bit, in all 3 steps."


@pytest.mark.parametrize("run", [planned("chen"), measured(planned("vdnn")), Run("tables", comparisons=planned("chen").comparisons)])
def test_a_summary_is_json(run):
    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    assert json.loads(json.dumps(asdict(summarize([run]))), parse_constant=refuse)
