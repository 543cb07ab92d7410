"""The Chrome trace, by the rules of its format: complete events, thread names, counters; no time before zero."""

from __future__ import annotations

import json

from report.example_runs import measured, planned

from tierwise.ir import Run, Span, Timeline
from tierwise.report import chrome_trace


def events(run, kind):
    return [event for event in chrome_trace([(run, "mine")])["traceEvents"] if event["ph"] == kind]


def test_a_thread_for_each_lane_and_an_event_for_each_span():
    run = planned("vdnn")
    threads = {event["tid"]: event["args"]["name"] for event in events(run, "M") if event["name"] == "thread_name"}
    assert threads == {1: "gpu: computes in hbm", 2: "out: hbm → dram", 3: "in: dram → hbm"}
    spans = events(run, "X")
    assert len(spans) == len(run.predicted.spans)
    first = next(event for event in spans if event["tid"] == 2)
    assert (first["name"], first["ts"], first["dur"]) == ("batch", 0.0, 1e6)
    assert first["args"] == {"bytes": 10, "role": "input", "step": 0, "from": "hbm", "to": "dram"}


def test_phases_are_categories():
    recomputed = [event["name"] for event in events(planned("chen"), "X") if event["cat"] == "recompute"]
    assert recomputed == ["fwd2", "fwd0"]


def test_counters_hold_every_role_at_every_change():
    counters = [event for event in events(planned("chen"), "C") if event["name"] == "hbm bytes"]
    assert [(event["ts"] / 1e6, sum(event["args"].values())) for event in counters][:4] == [(0.0, 20), (1.0, 30), (3.0, 40), (6.0, 50)]
    assert all(set(event["args"]) == {"input", "activation"} for event in counters)


def test_predicted_and_measured_are_two_processes():
    names = [event["args"]["name"] for event in events(measured(planned("chen")), "M") if event["name"] == "process_name"]
    assert names == ["mine (predicted)", "mine (measured)"]


def test_nothing_is_before_zero():
    run = Run("early", predicted=Timeline(2.0, {}, (Span(0, "gpu", -0.5, 0.5), Span(1, "gpu", 0.5, 1.0)), {}, False))
    assert [event["ts"] for event in events(run, "X")] == [0.0, 1e6]
    assert json.dumps(chrome_trace([(run, "early")]))
