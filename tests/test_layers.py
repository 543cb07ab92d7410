"""The two laws of the house, read from the imports: data flows one way, and planning never imports torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tierwise"
STAGES = {"ir", "capture", "profile", "policies", "simulate", "regions", "lower", "execute", "report", "traces", "machines", "zoo"}
# These may import everything.
COMPOSERS = {"pipeline", "estimation", "measurement", "demonstration", "fitting", "cli", "integrations", "__init__", "__main__"}
SHARED = {"ir", "errors", "units", "__init__"}  # everyone may import these; __init__ has the version
# In the right direction only: whoever searches simulates, and what is compiled for running is compiled the same way for measuring.
# A program's lasting state is laid out as the policies lay out theirs.
ALSO = {("policies", "simulate"), ("lower", "simulate"), ("lower", "policies"), ("lower", "regions"), ("profile", "regions"), ("execute", "regions")}
TORCH = {"capture", "profile", "execute", "measurement", "demonstration", "fitting", "integrations", "regions", "zoo"}
WITHOUT_TORCH = {
    "profile/roofline.py",
    "profile/taken.py",
    "profile/step.py",
    "profile/cache.py",
    "profile/__init__.py",
    "__init__.py",
}  # planning passes through these
SCIPY = {"policies/_milp.py"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports, absolute, with the line; also inside functions and under TYPE_CHECKING."""
    parts = ("tierwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    package = parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "tierwise":  # from . import machines
                for alias in node.names:
                    yield node.lineno, f"tierwise.{alias.name}"
            else:
                yield node.lineno, module


def files() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def part_of(name: str) -> str:
    """The folder or top-level file something belongs to."""
    return name.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("name", files())
def test_data_flows_one_way(name):
    mine = part_of(name)
    assert mine in STAGES | COMPOSERS | SHARED, f"{name} has no place in the house: guide the reader by its name, or name it here"
    if mine in COMPOSERS:
        return
    for line, module in imports(PACKAGE / name):
        if module.split(".")[0] != "tierwise":
            continue
        other = [*module.split("."), "__init__"][1]
        if other not in STAGES | COMPOSERS | SHARED:
            other = "__init__"  # from .. import __version__
        allowed = other == mine or other in SHARED or (mine, other) in ALSO
        assert allowed, f"{name}:{line} imports {module}; {mine} may import itself, ir and the top-level files"


def test_ir_is_plain_python():
    known = {"tierwise", *sys.stdlib_module_names}
    for name in files():
        if part_of(name) == "ir":
            for line, module in imports(PACKAGE / name):
                assert module.split(".")[0] in known, f"{name}:{line} imports {module}; ir is standard library only"


@pytest.mark.parametrize("name", files())
def test_planning_never_imports_torch(name):
    for line, module in imports(PACKAGE / name):
        root = module.split(".")[0]
        if root in ("torch", "transformers", "peft") and (part_of(name) not in TORCH or name in WITHOUT_TORCH):
            pytest.fail(f"{name}:{line} imports {module}; only {', '.join(sorted(TORCH))} may")
        if root == "scipy" and name not in SCIPY:
            pytest.fail(f"{name}:{line} imports {module}; policies/_milp.py is the only door to a solver")


def test_the_reader_of_imports_sees_them_all(tmp_path, monkeypatch):
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "x.py").write_text("from ..execute import a\nfrom . import _gaps\nfrom .. import lower\ndef f():\n    import torch.nn\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert list(imports(folder / "x.py")) == [
        (1, "tierwise.execute"),
        (2, "tierwise.policies"),
        (3, "tierwise.lower"),
        (5, "torch.nn"),
    ]
