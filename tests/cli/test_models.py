"""tierwise capture and estimate: models on the command line."""

from __future__ import annotations

import json

import pytest

from tierwise.cli import main
from tierwise.ir import Graph, serial

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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("estimate", "gpt-2-small", "--gpu", "rtx4090"), "unknown"),
        (("estimate", "gpt2-tiny", "--gpu", "rtx4091"), "unknown machine 'rtx4091'; did you mean 'rtx4090'?"),
        (("estimate", "gpt2-tiny"), "--gpu"),
        (("capture", "gpt2-tiny", "--optimizer", "adamx"), "unknown optimizer 'adamx'"),
        (("capture", "gpt2-tiny", "--dtype", "int3"), "int3"),
        (("capture", "no_such_module:make"), "no_such_module"),
        (("machine", "--probe", "--name", "h200"), "--probe measures this machine"),
        (("machine", "--probe", "--disk", "nowhere"), "--disk nowhere is not a folder"),
        (("capture", "gpt2-tiny", "--batch", "0"), "--batch"),
        (("estimate", "gpt2-tiny", "--gpu", "rtx4090", "--budget", "24G"), "'24G' is not a number of bytes"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []
