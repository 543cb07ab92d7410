"""What the page is given to draw, decoded again: nothing is lost, or it says what was merged."""

from __future__ import annotations

import itertools

import pytest
from report.example_runs import measured, planned

from tierwise.ir import Compute, Costs, Curve, Problem, Run, Schedule, Span, Timeline
from tierwise.report import charts, summarize
from tierwise.report.charts import page_data


def data_of(*runs):
    return page_data(list(zip(runs, summarize(runs).runs, strict=True)))


def decoded(flat, data):
    """(start, end, label, kind) of every span, in seconds."""
    found, at = [], 0
    for i in range(0, len(flat), 4):
        at += flat[i]
        found.append((at / 1e9, (at + flat[i + 1]) / 1e9, data["labels"][flat[i + 2]], tuple(data["kinds"][flat[i + 3]])))
    return found


def levels(memory):
    """(seconds, total bytes) at every change."""
    changes, i, at, now, found = memory["changes"], 0, 0, [0] * len(memory["roles"]), []
    while i < len(changes):
        at, count, i = at + changes[i], changes[i + 1], i + 2
        for _ in range(count):
            now[changes[i]] += changes[i + 1]
            i += 2
        found.append((at / 1e9, sum(now)))
    return found


def test_every_span_is_there():
    data = data_of(planned("vdnn"))
    (timeline,) = data["runs"][0]["timelines"]
    assert [lane["name"] for lane in data["runs"][0]["lanes"]] == ["gpu", "out", "in"]
    gpu, out, back = (decoded(lane, data) for lane in timeline["lanes"])
    assert [(start, label) for start, _, label, _ in gpu] == list(enumerate(["fwd0", "fwd1", "fwd2", "fwd3", "loss", "bwd3", "bwd2", "bwd1", "bwd0"]))
    assert out[0] == (0.0, 1.0, "batch", ("copy", "input", "hbm", "dram"))
    assert [(start, label) for start, _, label, _ in back] == [(5.0, "a1"), (6.0, "a0"), (7.0, "batch")]
    assert data["sizes"][data["labels"].index("a1")] == 10
    assert timeline["merged"] == []


def test_recomputation_is_a_kind_of_its_own():
    data = data_of(planned("chen"))
    (gpu,) = data["runs"][0]["timelines"][0]["lanes"]
    assert [(start, label) for start, _, label, kind in decoded(gpu, data) if kind == ("recompute",)] == [(5.0, "fwd2"), (8.0, "fwd0")]


def test_memory_is_exact():
    data = data_of(planned("chen"))
    memory = data["runs"][0]["timelines"][0]["memory"]
    assert memory["hbm"]["roles"] == ["input", "activation"] and memory["hbm"]["words"] == ["inputs", "activations"]
    assert levels(memory["hbm"]) == [(0, 20), (1, 30), (3, 40), (6, 50), (7, 40), (8, 30), (9, 40), (10, 20), (11, 0)]
    assert "dram" not in memory  # nothing is ever there


def test_runs_share_their_names():
    one, two = data_of(planned("chen")), data_of(measured(planned("chen")), planned("vdnn"))
    assert len(two["labels"]) == len({(text, size) for text, size in zip(two["labels"], two["sizes"], strict=True)})
    assert set(one["labels"]) <= set(two["labels"])
    assert [timeline["measured"] for timeline in two["runs"][0]["timelines"]] == [False, True]


def many(count):
    """`count` ops of 1 µs one after the other, then one of a second."""
    from problems import chain

    problem = chain(2)
    steps = (*(Compute(0) for _ in range(count)), Compute(1))
    spans = (*(Span(i, "gpu", i * 1e-6, (i + 1) * 1e-6) for i in range(count)), Span(count, "gpu", 1.0, 2.0))
    curve = Curve(tuple(i * 1e-6 for i in range(count)), tuple(100 + (i * 37) % 50 for i in range(count)))
    timeline = Timeline(2.0, {"hbm": 149}, spans, {"hbm": {"activation": curve}}, False)
    return Run("many", Problem(problem.graph, problem.machine, Costs(problem.costs.op_seconds)), Schedule(steps, {}), timeline)


def test_too_many_spans_are_joined_and_it_says_so(monkeypatch):
    monkeypatch.setattr(charts, "MAX_SPANS", 50)
    data = data_of(many(1000))
    (timeline,) = data["runs"][0]["timelines"]
    spans = decoded(timeline["lanes"][0], data)
    assert len(spans) <= 50
    assert spans[-1][:3] == (1.0, 2.0, "fwd1")  # what can be seen by itself stays by itself
    assert spans[0][0] == 0.0 and spans[-2][1] == pytest.approx(1e-3)
    assert all(later[0] == pytest.approx(earlier[1]) for earlier, later in itertools.pairwise(spans[:-1]))
    assert sum(int(label.split()[0]) if "together" in label else 1 for _, _, label, _ in spans[:-1]) == 1000
    (sentence,) = timeline["merged"]
    assert sentence.startswith(f"1,001 spans are drawn as {len(spans)}: neighbours of one kind, shorter than ")


def test_too_many_moments_keep_the_peak_and_it_says_so(monkeypatch):
    monkeypatch.setattr(charts, "MAX_MOMENTS", 40)
    run = many(1000)
    (timeline,) = data_of(run)["runs"][0]["timelines"]
    found = levels(timeline["memory"]["hbm"])
    curve = run.predicted.memory["hbm"]["activation"]
    exact = {round(when * 1e9) / 1e9: nbytes for when, nbytes in zip(curve.seconds, curve.nbytes, strict=True)}
    assert len(found) <= 42
    assert max(total for _, total in found) == 149 and min(total for _, total in found) == 100
    assert all(total == exact[when] for when, total in found)  # real moments, not averages
    (sentence,) = timeline["merged"]
    assert sentence == "Of 1,000 changes of hbm, the fullest and the emptiest moment of each 100 ms are drawn, both exact."
