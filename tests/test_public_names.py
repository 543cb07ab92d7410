"""The surface, exact: what `import tierwise` offers, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import tierwise
from tierwise.ir import Graph

PUBLIC = {
    "TierwiseError",
    "__version__",
    "capture",
    "fit",
    "plan_of",
    "release",
    "stats",
    "watch",
}


def test_the_public_names_are_these_and_all_are_there():
    assert set(tierwise.__all__) == PUBLIC
    assert set(dir(tierwise)) >= PUBLIC
    assert all(getattr(tierwise, name) is not None for name in PUBLIC)
    with pytest.raises(AttributeError, match="no attribute 'captures'"):
        _ = tierwise.captures


def test_importing_tierwise_imports_no_torch():
    loaded = "import sys, tierwise; print([m for m in ('torch', 'numpy', 'typer', 'tierwise.ir') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_capture_is_the_function_whatever_was_imported_before():
    """In a process of its own, since who imports the folder binds its name; torch stays, as it takes longest to load."""
    code = """
import sys, torch
for first in ("pass", "import tierwise.capture", "import tierwise.capture.step", "from tierwise.capture import capture_step"):
    for name in [name for name in sys.modules if name.split(".")[0] == "tierwise"]:
        del sys.modules[name]
    exec(first, {})
    import tierwise
    print(len(tierwise.capture(torch.nn.Sequential(torch.nn.Linear(2, 1)), torch.ones(1, 2)).ops))
"""
    counts = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(counts) == 4 and len(set(counts)) == 1 and int(counts[0]) > 0


def test_capture_takes_an_optimizer():
    model = nn.Sequential(nn.Linear(4, 1))
    by_name = tierwise.capture(model, torch.ones(1, 4), optimizer="sgd")
    by_instance = tierwise.capture(model, torch.ones(1, 4), optimizer=torch.optim.SGD(model.parameters()))
    assert isinstance(by_name, Graph) and by_name == by_instance
