"""tierwise capture and estimate: models on the command line."""

from __future__ import annotations

import json

import pytest

from tierwise.cli import main
from tierwise.ir import Graph, Problem, serial

pytest.importorskip("torch")


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_capture_writes_a_graph(capsys, tmp_path):
    target = tmp_path / "step.json"
    code, out, err = run(capsys, "capture", "gpt2-tiny", "-o", str(target))
    assert code == 0
    graph = serial.load(target, Graph)
    assert f"{len(graph.calls)} calls" in out
    assert f"Next: tierwise compare {target}" in err


def test_capture_as_data(capsys, tmp_path):
    code, out, _ = run(capsys, "capture", "gpt2-tiny", "--batch", "3", "--json", "-o", str(tmp_path / "step.json"))
    assert code == 0
    assert json.loads(out)["batch"] == 3


def test_estimate_says_whether_it_fits(capsys):
    code, out, err = run(capsys, "estimate", "gpt2-tiny", "--gpu", "rtx4090")
    assert code == 0
    assert "Fits: keeping everything takes" in out
    for part in ("parameters", "gradients", "optimizer", "activations", "workspace", "unaccounted", "step time", "tokens/s", "largest batch"):
        assert part in out
    assert "Next: tierwise capture gpt2-tiny" in err


def test_estimate_as_data(capsys):
    code, out, _ = run(capsys, "estimate", "gpt2-tiny", "--gpu", "h200", "--budget", "100KB", "--policies", "keep_all,chen", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["fits"], found["budget_bytes"]) == (False, 100_000)


@pytest.fixture
def measurable(monkeypatch, tmp_path):
    """The CPU in the place of the GPU, timed without waiting for clocks to settle, and a cache of its own."""
    import torch

    from tierwise import measurement
    from tierwise.profile import ops, sustained

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measurement, "gpu", lambda machine=None: torch.device("cpu"))
    monkeypatch.setattr(sustained._HostRounds, "settle_seconds", 0.0)
    monkeypatch.setattr(sustained, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(ops, "BURST_SECONDS", 1e-5)


def test_capture_with_measured_costs_writes_a_problem(capsys, tmp_path, measurable):
    target = tmp_path / "step.json"
    code, out, err = run(capsys, "capture", "vgg-tiny", "--batch", "1", "--measure", "--machine", "h200", "-o", str(target))
    assert code == 0
    problem = serial.load(target, Problem)
    assert problem.machine.name == "h200"
    assert "with everything kept, from its parts" in out
    assert f"Next: tierwise compare {target} --budget 0.5" in err
    assert {path.name for path in (tmp_path / "cache" / "tierwise").iterdir()} == {"blocks.json", "ops.json"}


def test_an_estimate_that_was_measured_is_no_range(capsys, measurable):
    code, out, _ = run(capsys, "estimate", "vgg-tiny", "--batch", "1", "--gpu", "h200", "--measure")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("step time")]
    assert " to " not in line


def test_another_card_is_not_the_one_asked_about(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"total_memory": 16 << 30}))
    code, _, err = run(capsys, "estimate", "gpt2-tiny", "--gpu", "rtx4090", "--measure")
    assert code == 2
    assert "the GPU here is a NVIDIA T4 with 16.0 GiB, and rtx4090 has 23.6 GiB" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("estimate", "gpt-2-small", "--gpu", "rtx4090"), "unknown"),
        (("estimate", "gpt2-tiny", "--gpu", "rtx4091"), "unknown machine 'rtx4091'; did you mean 'rtx4090'?"),
        (("estimate", "gpt2-tiny"), "--gpu"),
        (("capture", "gpt2-tiny", "--optimizer", "adamx"), "unknown optimizer 'adamx'"),
        (("capture", "gpt2-tiny", "--dtype", "int3"), "int3"),
        (("capture", "no_such_module:make"), "no_such_module"),
        (("estimate", "gpt2-tiny", "--gpu", "rtx4090", "--measure"), "no GPU here"),
        (("capture", "gpt2-tiny", "--measure", "--machine", "h200"), "no GPU here"),
        (("capture", "gpt2-tiny", "--measure"), "--measure and --machine go together"),
        (("capture", "gpt2-tiny", "--machine", "h200"), "--measure and --machine go together"),
        (("machine", "--probe", "--name", "h200"), "--probe measures this machine"),
        (("machine", "--probe", "--disk", "nowhere"), "--disk nowhere is not a folder"),
        (("capture", "gpt2-tiny", "--batch", "0"), "--batch"),
        (("estimate", "gpt2-tiny", "--gpu", "rtx4090", "--budget", "24G"), "'24G' is not a number of bytes"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run(capsys, *words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []
