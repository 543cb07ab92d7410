"""The files of examples/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def printed(module: ModuleType, monkeypatch, capsys, *words: str) -> list[str]:
    """What the example's main prints."""
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *words])
    module.main()
    return capsys.readouterr().out.splitlines()
