"""tierwise demo: what it says is what happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick_plans import quick_plans as quick_plans

from tierwise import demonstration
from tierwise.cli.demo import sparkline
from tierwise.errors import NotExact
from tierwise.ir import Run, serial


def test_it_trains_inside_the_budget_and_writes_the_page(tierwise, tmp_path, monkeypatch):
    monkeypatch.setattr(demonstration, "POLICIES", ("vdnn", "unsloth"))
    for name, small in {"LAYERS": 3, "HIDDEN": 32, "TOKENS": 32, "TRIAL_STEPS": 2}.items():
        monkeypatch.setattr(demonstration, name, small)
    ran = tierwise("demo", "--steps", 3, "-o", tmp_path / "page.html")
    assert ran.code == 0
    assert "All 3 losses and all 47,392 parameters are equal, bit for bit." in ran.out
    assert "vdnn" in ran.out and "unsloth" in ran.out and "keep_all" in ran.out
    assert "Next: tierwise estimate" in ran.err and "Next: tierwise run" in ran.err and "Next" not in ran.out
    run = serial.load(tmp_path / "page.json", Run)
    assert len(run.losses) == 3 and run.losses == run.untouched_losses
    assert run.losses[2] < run.losses[0]
    assert run.predicted is not None and run.measured is not None and run.measured.measured
    (comparison,) = run.comparisons
    first, *others = (row.policy for row in comparison.rows)
    assert first == "keep_all" and sorted(others) == ["unsloth", "vdnn"]  # which of them is faster, this machine says
    assert run.reserved_bytes <= run.problem.budget_bytes == comparison.budget_bytes < comparison.keep_all_bytes
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html") and "http://" not in page.replace("http://www.w3.org", "")


def test_one_other_bit_is_an_error():
    one = demonstration.Trained((2.0, 1.0), (0.1, 0.1), {"weight": torch.ones(2)})
    demonstration._check(one, one)
    with pytest.raises(NotExact, match=r"the losses of step 1 differ: 1\.0 untouched, 1\.5 inside"):
        demonstration._check(one, replace(one, losses=(2.0, 1.5)))
    with pytest.raises(NotExact, match="weight differs at the end"):
        demonstration._check(one, replace(one, weights={"weight": torch.tensor([1.0, 1.0000001])}))


def test_a_sparkline_falls_with_the_loss():
    assert sparkline((3.0, 2.0, 1.0)) == "█▅▁"
    assert sparkline((1.0, 1.0)) == "▁▁"
    assert len(sparkline(tuple(map(float, range(100))))) == 20


def test_where_nothing_can_be_written_is_said_before_the_work(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(demonstration, "demonstrate", None)  # would be called
    assert "is no folder that can be written to" in refused("demo", "-o", tmp_path / "no" / "page.html")
    assert "it is a folder" in refused("demo", "-o", tmp_path)
    assert "name the page" in refused("demo", "-o", tmp_path / "page.json")  # what it is made of would be written over
    (tmp_path / "train.py").write_text("print(1)", encoding="utf-8")
    assert "is no folder" in refused("run", "--report", tmp_path / "no" / "page.html", tmp_path / "train.py")
    assert "is no folder" in refused("capture", "gpt2-tiny", "-o", tmp_path / "no" / "step.json")


def test_steps_are_at_least_two(refused):
    assert "--steps" in refused("demo", "--steps", 1)
