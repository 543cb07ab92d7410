"""The examples that are not tested with their library: they run, and print what they print without a budget."""

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
    loop = example("accelerate_loop")
    wide, tight = (printed(loop, monkeypatch, capsys, "--steps", "2", "--budget", budget) for budget in ("1GiB", "8MiB"))
    assert wide[:2] == tight[:2]
    assert wide[3] == "everything fits: nothing is recomputed and nothing is copied"
    assert any("sends" in line for line in tight)
