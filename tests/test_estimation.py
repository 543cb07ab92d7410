"""The estimate, on steps small enough to check on paper."""

from __future__ import annotations

import dataclasses

import pytest
from problems import awkward, chain, masters, shared_weight, skip

from tierwise import estimation, machines, policies
from tierwise.estimation import BatchScale, at_peak
from tierwise.ir import peak_bytes
from tierwise.policies import keep_all
from tierwise.simulate import simulate


@pytest.mark.parametrize("make", [chain, skip, shared_weight, masters, awkward])
def test_live_bytes_are_the_curve_of_keep_all(make):
    problem = make()
    assert max(problem.graph.live_bytes) == peak_bytes(problem, keep_all.plan(problem))["hbm"]


def test_bytes_by_role_at_the_peak():
    problem = chain(2, weight_bytes=5, state_bytes=7)
    timeline = simulate(problem, keep_all.plan(problem))
    assert at_peak(timeline, "hbm") == {"param": 10, "optimizer_state": 14, "input": 10, "activation": 30, "grad": 5}  # at bwd1


def scale() -> BatchScale:
    """Activations of ten bytes a sample, weights that do not grow: at one sample and at two."""
    return BatchScale(chain(2, weight_bytes=5).graph, chain(2, activation_bytes=20, weight_bytes=5).graph, batch=1)


def test_a_step_at_another_batch():
    graph = scale().graph(7)
    assert {s.name: s.nbytes for s in graph.storages if s.name in ("a0", "w0")} == {"a0": 70, "w0": 5}


def test_the_largest_batch_that_fits():
    # 10 bytes of weights and, at the loss, batch, a0, a1 and d1: 40 bytes a sample. At bwd1: batch, a0, d1, d0 and g1: 40 a sample and 15.
    sizes = scale()
    assert sizes.largest_kept(10 + 5 + 3 * 40) == 3
    assert sizes.largest_kept(10 + 5 + 4 * 40 - 1) == 3
    for batch, budget in ((3, 135), (4, 175)):
        problem = dataclasses.replace(chain(2, weight_bytes=5), graph=sizes.graph(batch))
        assert peak_bytes(problem, keep_all.plan(problem))["hbm"] == budget


def test_the_largest_batch_that_a_plan_has_room_for():
    # The plan that keeps everything, as if it had been made for one sample: what it holds is what was counted above.
    sizes, problem = scale(), chain(2, weight_bytes=5)
    assert sizes.largest_planned(problem.with_budget(10 + 5 + 3 * 40), keep_all.plan(problem)) == 3
    assert sizes.largest_planned(problem.with_budget(10 + 5 + 4 * 40 - 1), keep_all.plan(problem)) == 3


def test_no_batch_fits_where_the_weights_do_not():
    assert scale().largest_kept(9) == 0


def test_estimate_of_a_tiny_model():
    pytest.importorskip("torch")
    found = estimation.estimate("gpt2-tiny", machines.load("rtx4090"))
    assert found.fits
    assert found.planned is None
    assert sum(found.kept.bytes_by_role.values()) == found.kept.peak_bytes
    assert found.kept.seconds_range.low < found.kept.seconds < found.kept.seconds_range.high
    assert found.kept.largest_batch > found.batch


def test_estimate_where_it_does_not_fit_names_a_plan_or_the_least():
    pytest.importorskip("torch")
    rtx = machines.load("rtx4090")
    kept = estimation.estimate("gpt2-tiny", rtx).kept
    tight = estimation.estimate("gpt2-tiny", rtx, budget_bytes=int(kept.peak_bytes * 0.9), names=["keep_all", "chen", "vdnn"])
    assert not tight.fits
    assert tight.planned is not None
    assert tight.planned.peak_bytes <= kept.peak_bytes * 0.9
    assert tight.planned.largest_batch >= tight.batch > tight.kept.largest_batch
    hopeless = estimation.estimate("gpt2-tiny", rtx, budget_bytes=1000, names=["keep_all", "chen"])
    assert hopeless.planned is None
    assert hopeless.least_bytes is not None


def test_policies_that_plan_slowly_are_tried_when_they_are_named(monkeypatch):
    untried: list[str] = []
    quick = list(estimation._worth_trying(None, untried))
    assert set(quick) == set(estimation.QUICK_TO_PLAN) and {"checkmate", "dtr"} <= set(untried)
    assert sorted([*quick, *untried, "keep_all"]) == policies.names()
    late: list[str] = []
    assert list(estimation._worth_trying(["keep_all", "dtr", "chen"], late)) == ["dtr", "chen"] and not late
    monkeypatch.setattr(estimation, "PLANNING_SECONDS", -1.0)
    assert list(estimation._worth_trying(None, late)) == [] and set(quick) < set(late)
    assert list(estimation._worth_trying(["dtr"], [])) == ["dtr"], "who asks for it waits"


def test_what_was_not_tried_is_said():
    pytest.importorskip("torch")
    rtx = machines.load("rtx4090")
    found = estimation.estimate("vgg-tiny", rtx, budget_bytes=int(estimation.estimate("vgg-tiny", rtx).kept.peak_bytes * 0.9))
    assert any("dtr" in note and "--policies all" in note for note in found.notes)
