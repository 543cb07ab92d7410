"""On a card: an unmodified script holds a budget that it would not hold alone, and every example trains."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from integrations.examples import EXAMPLES, example, printed

from tierwise.cli import main
from tierwise.ir import Run, serial

pytestmark = pytest.mark.gpu

# Enough that activations are most of it: about 0.4 GB of parameters, gradients and state, and 2 GB of activations.
SIZES = ["--steps", "4", "--hidden", "512", "--layers", "8", "--tokens", "512"]


@pytest.fixture(autouse=True)
def empty_card():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def losses(lines):
    return [float(found[1]) for line in lines if (found := re.match(r"step \d+: loss ([\d.]+)", line))]


def test_an_unmodified_script(process, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    alone = losses(printed(example("train_llama"), monkeypatch, capsys, *SIZES))
    budget = int(0.7 * torch.cuda.max_memory_reserved())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert main(["run", "--budget", str(budget), "--report", str(tmp_path / "page.html"), str(EXAMPLES / "train_llama.py"), *SIZES]) == 0
    ran = capsys.readouterr()
    # Compiled blocks round elsewhere than eager ones: the same training, not the same bits.
    assert losses(ran.out.splitlines()) == pytest.approx(alone, rel=1e-2)
    assert "tierwise: LlamaForCausalLM with AdamW: budget " in ran.err and "tierwise: 4 steps, at most " in ran.err
    run = serial.load(tmp_path / "page.json", Run)
    assert run.measured is not None and run.reserved_bytes <= budget == run.problem.budget_bytes
    assert any("saves" in sentence for sentence in run.words)


@pytest.mark.parametrize(("name", "library"), [("accelerate_loop", "accelerate"), ("lightning_module", "lightning"), ("compiler_backend", "torch")])
def test_an_example(process, name, library, monkeypatch, capsys):
    pytest.importorskip(library)
    if name == "compiler_backend" and "tierwise" not in torch._dynamo.list_backends(exclude_tags=()):
        pytest.skip("torch.compile finds backends by entry points: pip install -e .")
    words = ["--budget", "2GiB"] if name != "compiler_backend" else []
    found = losses(printed(example(name), monkeypatch, capsys, "--steps", "3", *words))
    assert len(found) == 3 and found[2] < found[0]


def test_trainer_with_an_adapter(process, monkeypatch, capsys):
    pytest.importorskip("peft")
    lines = printed(example("huggingface_trainer"), monkeypatch, capsys, "--steps", "3", "--budget", "2GiB")
    assert lines[-1].startswith("trained within 2GiB by tierwise ")
