from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).parent.parent / "benchmarks"


def test_the_page_is_made_from_the_committed_results():
    assert (ROOT / "RESULTS.md").read_text(encoding="utf-8") == benchmarks.results_page(), "run `make bench` again"


@pytest.mark.parametrize("name", benchmarks.case_names())
def test_every_case_has_its_parts(name):
    tree = ast.parse((ROOT / "cases" / f"{name}.py").read_text(encoding="utf-8"))
    assigned = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.get_docstring(tree) and {"NEEDS", "COLUMNS"} <= assigned
    assert "run" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_result_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "HERE", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    monkeypatch.setattr("sys.argv", ["x", "rates", "--machine", "toy"])
    benchmarks.save("rates", "toy", ["what", "measured", "unit"], [["speed", 3.14159, "m/s"], ["nothing", None, ""]])
    page = benchmarks.results_page()
    assert "## rates on toy" in page and "| speed | 3.142 | m/s |" in page and "| nothing | - |  |" in page
    assert "commit abc1234: `python -m benchmarks rates --machine toy`" in page
