"""A process in which scripts can run, and what it must be afterwards."""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread
from quick_plans import quick_plans as quick_plans
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_hooks

from tierwise.cli import main

BEGINNING = "import torch\nimport one_arithmetic\nfrom fitting.training import Block, batch, tower\n"


@pytest.fixture(autouse=True)
def nothing_stays_of_accelerate():
    """What accelerate remembers for the process, such as the precision of the last Accelerator, is not the next test's."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.fixture
def process(monkeypatch):
    """Torch and this process are left as they were."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, hooks_before = (nn.Module.__call__, Optimizer.__init__), len(optimizer_hooks)
    yield
    assert (nn.Module.__call__, Optimizer.__init__) == before
    assert len(optimizer_hooks) == hooks_before


@pytest.fixture
def run(process, tmp_path, monkeypatch, capsys):
    """Runs a script under a budget: its exit code, its output, what Tierwise said, and all of stderr."""
    monkeypatch.chdir(tmp_path)

    def run(source, *arguments, budget="1MiB", options=(), words=("script.py",), beginning=BEGINNING):
        Path("script.py").write_text(beginning + textwrap.dedent(source), encoding="utf-8")
        code = main(["run", "--budget", budget, *options, *words, *arguments])
        said = capsys.readouterr()
        return code, said.out, [line.removeprefix("tierwise: ") for line in said.err.splitlines() if line.startswith("tierwise: ")], said.err

    return run


@pytest.fixture
def expected():
    """What a script prints alone."""

    def expected(source: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(BEGINNING + textwrap.dedent(source), {"__name__": "__main__"})
        return out.getvalue()

    return expected
