from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import results

ROOT = Path(__file__).parent.parent / "benchmarks"


def test_the_page_is_made_from_the_committed_results():
    assert (ROOT / "RESULTS.md").read_text(encoding="utf-8") == benchmarks.results_page(), "run `make bench` again"


@pytest.mark.parametrize("name", benchmarks.case_names())
def test_every_case_has_its_parts(name):
    tree = ast.parse((ROOT / "cases" / f"{name}.py").read_text(encoding="utf-8"))
    assigned = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    assert ast.get_docstring(tree) and "NEEDS" in assigned
    assert "run" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_result_says_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "HERE", tmp_path)
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    monkeypatch.setattr("sys.argv", ["x", "rates", "--machine", "toy"])
    benchmarks.save("rates", "toy", ["what", "measured", "unit"], [["speed", 3.14159, "m/s"], ["nothing", None, ""]])
    page = benchmarks.results_page()
    assert "## rates on toy" in page and "| rates | speed | 3.142 | m/s |" in page and "| rates | nothing | - |  |" in page
    assert "commit abc1234: `python -m benchmarks rates --machine toy`" in page


def test_ratios_are_against_the_baseline_of_the_same_case_and_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    ways = [{"case": "a", "way": "kept", "seconds": 2.0}, {"case": "a", "way": "dropped", "seconds": 3.0, "budget_bytes": 2048},
            {"case": "b", "way": "dropped", "seconds": 5.0}]  # fmt: skip
    path = results.write("rates", ways, machine="toy", command="python -m benchmarks rates", baseline="kept", versions={"python": "3"}, here=tmp_path)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert list(result) == ["machine", "date", "commit", "command", "versions", "baseline", "rows"]
    assert path.name == f"{result['date']}-rates.json" and path.parent.name == "toy"
    assert [row["ratio"] for row in result["rows"]] == [1.0, 1.5, None]  # b has no row to compare with
    assert set(result["rows"][0]) == set(results.FIELDS)
    page = results.page(tmp_path)
    assert "| case | way | budget | seconds | ratio |" in page  # what no row has is no column
    assert "| a | dropped | 2.00 KiB | 3 | 1.5000 |" in page and "python 3" in page


def test_budgets_stand_side_by_side_and_what_differs_shows_both(tmp_path):
    def row(share, **more):
        return {"case": "net", "way": "dtr", "budget_share": share, "ratio": None, **more}

    rows = [row(0.9, ratio=1.01234, published_ratio=1.0123), row(0.5, ratio=1.2, published_ratio=1.3), row(0.2, outcome="OOM", published_ratio=">2")]
    results.write("rates", rows, machine="simulated", command="x", versions={}, here=tmp_path)
    page = results.page(tmp_path)
    assert "| case | way | 0.9 | 0.5 | 0.2 |" in page and "| net | dtr | 1.0123 | 1.2000 (1.3000) | OOM (>2) |" in page
    assert "1 of 3 equal the published value" in page


def test_what_is_measured_again_replaces_nothing_and_the_page_has_the_latest_of_each_way(tmp_path):
    def keep(**seconds):
        rows = [{"case": "toy", "way": way, "seconds": taken} for way, taken in seconds.items()]
        return results.write_as_they_come("rates", rows, machine="toy", command="x", baseline="kept", versions={"python": "3"}, here=tmp_path)

    first, second = keep(kept=2.0, ours=3.0, theirs=5.0), keep(kept=2.0, ours=2.5)
    assert second.name == first.name.replace("-rates", "b-rates")
    page = results.page(tmp_path)
    above, below = page.split("Not run then")
    assert "1.2500" in above and "2.5000" in below, "theirs against what was kept in the same run"
    assert "1.5000" not in page
