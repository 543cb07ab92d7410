"""On a card: an unmodified script holds its budget."""

from __future__ import annotations

import pytest
import torch
from integrations.examples import EXAMPLES

from tierwise.cli import main
from tierwise.ir import Run, serial

pytestmark = pytest.mark.gpu


def test_an_unmodified_script(process, tmp_path, capsys):
    pytest.importorskip("transformers")
    budget = 512 << 20
    torch.cuda.reset_peak_memory_stats()
    words = ["run", "--budget", str(budget), "--report", str(tmp_path / "page.html"), str(EXAMPLES / "train_llama.py"), "--steps", "4"]
    assert main(words) == 0
    ran = capsys.readouterr()
    assert ran.out.count("step ") == 4
    assert "tierwise: LlamaForCausalLM with AdamW: budget 512 MiB" in ran.err and "tierwise: 4 steps, at most " in ran.err
    run = serial.load(tmp_path / "page.json", Run)
    assert run.measured is not None and run.reserved_bytes <= budget
