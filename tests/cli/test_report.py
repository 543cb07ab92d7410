"""tierwise report on a run of chain(4): the page, the trace, the numbers, the text, and what is refused."""

from __future__ import annotations

import json

import pytest
from problems import chain

from tierwise.ir import Run, Timeline, serial
from tierwise.policies import plan


@pytest.fixture
def run(tierwise, step, tmp_path):
    assert tierwise("plan", step, "--policy", "vdnn", "--budget", "50B", "-o", tmp_path / "vdnn.json").code == 0
    return tmp_path / "vdnn.json"


def test_text_by_default(tierwise, run):
    ran = tierwise("report", run)
    assert ran.out.startswith("chain · vdnn · 50 B\n  The step takes 9.00 s and holds 40 B of hbm, within the budget of 50 B.\n")
    assert ran.err == f"Next: tierwise report {run} -o report.html\n"


def test_a_page_and_a_trace(tierwise, run, tmp_path):
    ran = tierwise("report", run, "-o", tmp_path / "r.html", "--trace", tmp_path / "t.json.gz")
    assert ran.out == "" and ran.err == f"Wrote {tmp_path / 'r.html'}.\nWrote {tmp_path / 't.json.gz'}.\n"
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "chain" in page
    import gzip

    trace = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 15


def test_numbers(tierwise, run):
    found = json.loads(tierwise("report", run, "--json").out)
    assert found["runs"][0]["saved_bytes"] == {"kept": 20, "copied": 30, "recomputed": 0}
    assert found["runs"][0]["predicted"]["seconds"] == 9.0


def test_several_runs_and_tables(tierwise, step, run, tmp_path):
    tierwise("compare", step, "--budget", "50B", "--policies", "keep_all,chen", "-o", tmp_path / "tables.json")
    found = json.loads(tierwise("report", run, run, tmp_path / "tables.json", "--json").out)
    assert [one["title"] for one in found["runs"]] == ["chain · vdnn · 50 B", "chain · vdnn · 50 B #2"]
    assert [row["policy"] for row in found["groups"][0]["tables"][0]["rows"]] == ["keep_all", "vdnn", "chen"]


def test_a_bare_timeline_will_do(tierwise, tmp_path):
    serial.save(Timeline(2.0, {"hbm": 3}, (), {}, True), tmp_path / "t.json")
    assert "The step took 2.00 s and held 3 B of hbm." in tierwise("report", tmp_path / "t.json").out


def test_what_cannot_be_reported(refused, step, tmp_path):
    serial.save(plan(chain(4), "keep_all"), tmp_path / "s.json")
    assert f"`tierwise simulate STEP {tmp_path / 's.json'} -o run.json` makes a run of it" in refused("report", tmp_path / "s.json")
    assert "this is a problem; expected a run or timeline or schedule" in refused("report", step)
    serial.save(Run("empty"), tmp_path / "e.json")
    assert "holds no timeline and no table" in refused("report", tmp_path / "e.json")
    assert "cannot read" in refused("report", tmp_path / "none.json")
    assert "missing argument" in refused("report")
