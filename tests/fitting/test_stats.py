"""Numbers of a step for a logger, and a recorded step as a Timeline."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from fitting.training import ROWS, WIDTH, batch, fitting, forced, tower

from tierwise.errors import BadInput, UnknownName
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fit, plan_of, release, stats
from tierwise.ir import Compute, Copy, Run, serial
from tierwise.report.summary import times

INPUT = ROWS * WIDTH * 4  # bytes of what a block is given
SAVED = 2 * 4 * INPUT  # and of what it keeps: both sides of the activation function


def test_the_numbers_of_a_step(monkeypatch):
    """Four blocks send what they save and what they were given, and fetch it again."""
    model = tower()
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", device=device):
        assert stats(model)["step"] == 0
        for number in range(2):
            model(**batch(number)).backward()
            model.zero_grad()
        found = stats(model)
        assert json.loads(json.dumps(found)) == found and all(type(value) in (int, float) for value in found.values())
        assert found["step"] == 2
        assert (
            found["sent_bytes"] == found["fetched_bytes"] == found["predicted_sent_bytes"] == found["predicted_fetched_bytes"] == 4 * (INPUT + SAVED)
        )
        assert found["host_bytes"] == found["pinned_bytes"] >= found["predicted_host_bytes"] > 0
        assert 0 < found["peak_allocated_bytes"] <= 1.02 * found["predicted_peak_bytes"]
        assert found["peak_reserved_bytes"] == found["peak_allocated_bytes"]
        assert found["exposed_seconds"] >= 0 and found["seconds"] > 0 and found["predicted_seconds"] > 0
        assert found["retries"] == found["disk_written_bytes"] == 0
        assert found["budget_bytes"] == 64 << 20


def test_a_peak_is_the_user_s_to_reset(monkeypatch):
    model = tower()
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=False), fitting(model, budget="64MiB", device=device) as found:
        for record in (False, True):
            model(**batch(0)).backward()
            before = stats(model)["peak_allocated_bytes"]
            model(**batch(0, rows=8)).backward()  # a small step, also when it is recorded, leaves the peak as it is
            assert stats(model)["peak_allocated_bytes"] == before
            if record:
                found.record_next_step()
        device.reset_peak()
        model.zero_grad()
        model(**batch(0, rows=8)).backward()
        assert stats(model)["peak_allocated_bytes"] < before


def test_a_recorded_step_is_a_timeline_of_the_plan_s_schedule(monkeypatch):
    model = tower()
    device = NullDevice(1 << 30, max_delay_seconds=0.002)
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", device=device) as found:
        model(**batch(0)).backward()
        assert found.measured is None
        found.record_next_step()
        loss = model(**batch(1))
        assert found.measured is None  # not over yet
        loss.backward()
        measured, plan = found.measured, plan_of(model)
        assert measured.measured
        steps, graph = plan.image.schedule.steps, plan.image.problem.graph
        ran = [(graph.ops[steps[span.step].op].name, span.lane) for span in measured.spans if isinstance(steps[span.step], Compute)]
        blocks = [f"blocks.{number}" for number in range(4)]
        assert ran == [(f"{name}.forward", "gpu") for name in blocks] + [(f"{name}.backward", "gpu") for name in blocks[::-1]]
        copied = [(steps[span.step], span.lane) for span in measured.spans if isinstance(steps[span.step], Copy)]
        assert {step for step, _ in copied} == {step for step in steps if isinstance(step, Copy)}
        assert {(step.dst, lane) for step, lane in copied} == {("dram", "out"), ("hbm", "in")}
        assert all(0 <= span.start <= span.end <= measured.seconds for span in measured.spans)
        ends = {(steps[span.step].dst, steps[span.step].storage): span.end for span in measured.spans if isinstance(steps[span.step], Copy)}
        assert all(ends["dram", storage] <= ends["hbm", storage] for tier, storage in ends if tier == "dram")
        assert measured.peak_bytes["hbm"] == pytest.approx(plan.peak_bytes, rel=0.05)
        assert measured.peak_bytes["dram"] == found.below.host_bytes
        curve = measured.memory["hbm"]["allocated"]
        assert max(curve.nbytes) <= measured.peak_bytes["hbm"] and list(curve.seconds) == sorted(curve.seconds)
        assert found.measured.spans == measured.spans
        model(**batch(2)).backward()  # a step that is not recorded, and larger: gradients are there already
        assert found.measured.spans == measured.spans


def test_the_peak_of_a_recorded_step(monkeypatch):
    """After a larger step it is only known if it may be reset."""
    model = tower()
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=False), fitting(model, budget="64MiB", device=device) as found:
        peaks = []
        for rows, reset_peak in ((512, True), (256, False), (256, True)):
            found.record_next_step(reset_peak=reset_peak)
            model(**batch(0, rows=rows)).backward()
            model.zero_grad()
            peaks.append(found.measured.peak_bytes["hbm"])
            assert peaks[-1] <= plan_of(model).peak_bytes
        large, seen, small = peaks
        assert seen < small < large
        assert small == pytest.approx(plan_of(model).peak_bytes, rel=0.02)


def test_a_run_with_both_timelines_can_be_saved_and_reported(monkeypatch, tmp_path):
    model = tower()
    with forced(monkeypatch, "cheap", send=True), fitting(model, budget="64MiB") as found:
        found.record_next_step()
        model(**batch(0)).backward()
        run = plan_of(model).run("tower", found.measured)
        serial.save(run, tmp_path / "run.json.gz")
        assert serial.load(tmp_path / "run.json.gz", Run).measured == found.measured
        assert times(run.measured, run.problem, run.schedule).seconds == found.measured.seconds


def test_what_is_decided_and_what_happens_is_logged(monkeypatch, caplog):
    monkeypatch.setenv("TIERWISE_LOG", "info")
    model = tower()
    with fitting(model, budget="0.9MiB"):
        model(**batch(0)).backward()
    assert any("planned:" in record.getMessage() for record in caplog.records if record.name == "tierwise")
    logging.getLogger("tierwise").setLevel(logging.NOTSET)
    monkeypatch.setenv("TIERWISE_LOG", "imfo")
    with pytest.raises(UnknownName, match="did you mean 'info'"):
        fit(tower(), budget="1MiB")


def test_only_a_fitted_model_has_numbers():
    model = tower()
    with pytest.raises(BadInput, match=r"call tierwise.fit\(model, optimizer, budget=...\) first"):
        stats(model)
    fit(model, budget="1GiB", compile=False)
    with torch.no_grad():
        model(**batch(0))
    assert stats(model)["step"] == 0
    release(model)
