"""The first screen keeps its promises: it is short, what it says to type works, and every file it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tierwise
from tierwise.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_fits_a_screen():
    assert len(TEXT.splitlines()) <= 40


def test_its_python_runs(capsys):
    """As it stands, in a loop over a Hugging Face model, on the CPU."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    tokens = torch.randint(32, (2, 8))
    loop = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "loader": [{"input_ids": tokens, "labels": tokens}] * 2}
    (block,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 6
    try:
        exec(compile(block, "README.md", "exec", dont_inherit=True), loop)
    finally:
        tierwise.release(model)
    assert capsys.readouterr().out.startswith("budget 24.0 GiB; keeping everything takes ")


def test_its_command_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"`tierwise (compare [^`]*)`", TEXT)
    assert main([*command.split(), "--policies", "keep_all,chen"]) == 0
    assert "chen" in capsys.readouterr().out


def test_its_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", TEXT)) == {"demo", "test"}
    assert targets == {"demo", "test", "test-gpu", "check", "bench", "docs"}


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
