"""A small step measured on the CPU from end to end: every block once, cached, and the whole as long as its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierwise import machines, measurement, pipeline
from tierwise.errors import BadInput
from tierwise.ir import Phase
from tierwise.measurement import by_name, measure_step
from tierwise.profile import ops, sustained


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sustained._HostRounds, "settle_seconds", 0.0)
    monkeypatch.setattr(sustained, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(ops, "BURST_SECONDS", 1e-5)


@pytest.fixture(scope="module")
def model() -> pipeline.CapturedModel:
    return pipeline.capture_model("gpt2-tiny", batch=2, seq=8, dtype="fp32")


def test_a_step_takes_what_its_parts_take(model: pipeline.CapturedModel, tmp_path: Path):
    said: list[str] = []
    found = measure_step(model, machines.load("h200"), device="cpu", every_op=False, cache=tmp_path, progress=said.append)
    assert not found.notes
    parts = by_name(found.parts)
    assert parts["blocks.0"][Phase.FORWARD][0] == 2 and parts["blocks.0"][Phase.BACKWARD][0] == 2
    assert all(part.measured for part in found.parts if part.name != "glue")
    # On the CPU the device is the host, and waits for nobody but autograd around the ops outside blocks, which is counted as the host's.
    together = sum(taken.device_seconds for phases in parts.values() for _, taken in phases.values())
    assert pipeline.reference(found.problem).row.seconds >= 0.999 * together
    assert sum("blocks.0" in line for line in said) == 1, "equal blocks are timed once"
    assert "timing the update" in said


def test_what_was_measured_is_not_measured_again(model: pipeline.CapturedModel, tmp_path: Path):
    first = measure_step(model, machines.load("h200"), device="cpu", cache=tmp_path)
    said: list[str] = []
    again = measure_step(model, machines.load("h200"), device="cpu", cache=tmp_path, progress=said.append)
    assert {file.name for file in tmp_path.iterdir()} == {"blocks.json", "ops.json"}
    assert [line for line in said if "op " not in line] == ["timing the update"]
    assert by_name(again.parts)["blocks.0"] == by_name(first.parts)["blocks.0"]


def test_a_block_that_cannot_be_run_by_itself_is_said_and_its_ops_are_timed(
    model: pipeline.CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = measurement._Blocks._run

    def fails(self, region, count, compile):
        if region.example == "norm":
            raise RuntimeError("it needs its parent\nand a stack of lines")
        return run(self, region, count, compile)

    monkeypatch.setattr(measurement._Blocks, "_run", fails)
    found = measure_step(model, machines.load("h200"), device="cpu", every_op=False, cache=tmp_path)
    assert found.notes == ("norm (LayerNorm) could not be run by itself, so its ops are timed one by one: RuntimeError: it needs its parent",)
    assert all(part.measured for part in found.parts if part.name == "norm")


def test_a_block_too_large_for_several_copies_is_run_once(model: pipeline.CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = measurement._Blocks._run
    tried: list[int] = []

    def short_of_memory(self, region, count, compile):
        tried.append(count)
        if count > 1:
            raise torch.OutOfMemoryError("out of memory")
        return run(self, region, count, compile)

    monkeypatch.setattr(measurement._Blocks, "_run", short_of_memory)
    found = measure_step(model, machines.load("h200"), device="cpu", every_op=False, cache=tmp_path)
    assert not found.notes and tried[:2] == [measurement.MOST_LAYERS, 1]


def test_nothing_of_the_caller_changes(model: pipeline.CapturedModel, tmp_path: Path):
    state = torch.get_rng_state()
    measure_step(model, machines.load("h200"), device="cpu", every_op=False, cache=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_gpu_it_says_so(model: pipeline.CapturedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="no GPU here to measure on"):
        measure_step(model, machines.load("h200"))
