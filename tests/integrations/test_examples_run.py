"""The examples that are not tested with their library: they run, and say what they should."""

from __future__ import annotations

import pytest
from integrations.examples import EXAMPLES, example, printed

from tierwise.cli import main


def test_the_plain_loop_under_tierwise_run(process, monkeypatch, capsys):
    pytest.importorskip("transformers")
    alone = printed(example("train_llama"), monkeypatch, capsys, "--steps", "2", "--device", "cpu")
    assert main(["run", "--budget", "8MiB", str(EXAMPLES / "train_llama.py"), "--steps", "2", "--device", "cpu"]) == 0
    ran = capsys.readouterr()
    assert ran.out.splitlines() == alone
    assert "tierwise: LlamaForCausalLM with AdamW: budget 8.00 MiB" in ran.err


def test_the_loop_with_accelerate(monkeypatch, capsys):
    pytest.importorskip("accelerate")
    lines = printed(example("accelerate_loop"), monkeypatch, capsys, "--steps", "2")
    assert [line.split(":")[0] for line in lines[:2]] == ["step 0", "step 1"]
    assert any("sends" in line for line in lines)
