"""The table of every policy on every model, on a model small enough to plan at once; and the page made of it."""

from __future__ import annotations

import json

import pytest

from benchmarks import results
from benchmarks.cases import zoo
from docs import make_zoo
from tierwise import machines, policies


@pytest.fixture(scope="module")
def rows():
    zoo._problems.clear()
    return zoo.run(["vgg-tiny"], ["chen", "vdnn", "zenflow"], workers=1)


def test_one_row_for_each_cell(rows):
    here = [row for row in rows if row["case"] == "vgg-tiny on h200"]
    assert [row["way"] for row in here] == ["keep_all", *[zoo.BOUND] * 5, *["chen"] * 5, *["vdnn"] * 5, *["zenflow"] * 5]
    assert [row["budget_share"] for row in here[-5:]] == list(zoo.SHARES)
    assert {row["case"] for row in rows} == {f"vgg-tiny on {name}" for name in ("a100-80", "h200", "titanx-12")}
    # The machine of a paper is for its own policy.
    assert {row["way"] for row in rows if row["case"].endswith("a100-80")} == {"keep_all", zoo.BOUND, "zenflow"}


def test_a_cell_has_a_time_within_its_budget_or_says_why_not(rows):
    for row in rows:
        if row["way"] in ("keep_all", zoo.BOUND):
            continue
        if row["outcome"]:
            assert row["outcome"].startswith("needs 0.") and row.get("seconds") is None
            assert float(row["outcome"].split()[1]) >= row["budget_share"]
        else:
            assert row["peak_bytes"] <= row["budget_bytes"] and row["ratio"] > 0
    assert any(row["outcome"] for row in rows) and any(row["way"] == "vdnn" and row.get("seconds") for row in rows)


def test_what_takes_too_long_or_breaks_says_so(monkeypatch):
    def planned(problem, name, **options):
        if name == "chen":
            while True:
                pass
        raise ValueError("a bug")

    zoo._problems.clear()
    zoo._prepare(["vgg-tiny"], ["h200"])
    monkeypatch.setattr(zoo, "CELL_SECONDS", 0.05)
    problem = zoo._problems["vgg-tiny", "h200"]
    kept = zoo._kept(problem)
    monkeypatch.setattr(policies, "planned", planned)
    assert zoo._planned(problem, "chen", *kept)["outcome"] == "over 0 s"
    assert zoo._planned(problem, "vdnn", *kept)["outcome"] == "crashed: ValueError"


def test_what_was_interrupted_goes_on_where_it_was(tmp_path):
    partial = tmp_path / "zoo.partial.jsonl"
    first = zoo.run(["vgg-tiny"], ["chen"], workers=1, partial=partial)
    lines = partial.read_text(encoding="utf-8").strip().splitlines()
    assert [json.loads(line)["task"] for line in lines] == [["vgg-tiny", "h200", "chen"], ["vgg-tiny", "titanx-12", "chen"]]
    # The first column is there, changed so that it can be told from one computed again; the second was cut off while it was written.
    partial.write_text(lines[0].replace('"budget_bytes": ', '"seen": 1, "budget_bytes": ')
                       + "\n" + lines[1][:40], encoding="utf-8")  # fmt: skip
    again = zoo.run(["vgg-tiny"], ["chen"], workers=1, partial=partial)
    assert [{key: value for key, value in row.items() if key not in ("seen", "planning_seconds")} for row in again] == [
        {key: value for key, value in row.items() if key != "planning_seconds"} for row in first
    ]
    assert {(row["case"], row["way"]) for row in again if "seen" in row} == {("vgg-tiny on h200", "chen")}
    assert len(dict(zoo._kept_columns(partial))) == 2


def test_what_is_not_run_again_stays(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "HERE", tmp_path)
    results.write("zoo", rows, machine="simulated", command="x", baseline="keep_all", here=tmp_path)
    kept = zoo._others([row for row in rows if row["way"] == "chen"])
    assert {row["way"] for row in kept} == {"keep_all", zoo.BOUND, "vdnn", "zenflow"}


def test_every_paper_has_a_machine():
    homes = {**zoo.PAPER_MACHINE, **{name: machine for name, (machine, _) in zoo.STAND_IN.items()}}
    assert set(homes.values()) <= set(machines.names())
    assert len(homes) == len(zoo.PAPER_MACHINE) + len(zoo.STAND_IN)
    assert set(homes) == {name for name in policies.names() if policies.card(name).year and name != "auto"}


def test_the_page(rows, tmp_path):
    path = tmp_path / "simulated" / "2026-01-01-zoo.json"
    path.parent.mkdir()
    kept = [dict.fromkeys(results.FIELDS) | row for row in rows]
    path.write_text(json.dumps({"date": "2026-01-01", "commit": "abc", "command": "x", "versions": {}, "rows": kept}), encoding="utf-8")
    page, pictures = make_zoo.zoo_page(path)
    assert "3 published policies plan the same training steps" in page and "### vgg-tiny" in page
    history = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| 20")]
    assert history == [["| 2016", "chen"], ["| 2016", "vdnn"], ["| 2025", "zenflow (not exact)"]]
    assert "- **gtbm** (HPDC 2020): unknown" in page
    home = next(line for line in page.splitlines() if line.startswith("| zenflow | a100-80"))
    planned = sum(row["way"] == "zenflow" and row["case"].endswith("a100-80") and row["outcome"] is None for row in rows)
    assert home.split(" | ")[2] == f"{planned} of 5"
    why = next(line for line in page.splitlines() if line.startswith("| chen | 10 |"))  # of its ten cells, those without a plan need more
    assert int(why.split(" | ")[2]) + int(why.split(" | ")[3].replace("-", "0")) == 10
    assert pictures["by-year"].count("<circle") == 3
    assert pictures["vgg-tiny"].count("<circle") >= 3 and 'stroke="#8a5a00"' in pictures["vgg-tiny"]  # zenflow is hollow


def test_orders_that_were_published():
    def cell(way: str, machine: str, share: float, ratio: float | None) -> dict[str, object]:
        return {"case": f"net on {machine}", "way": way, "budget_share": share, "ratio": ratio, "seconds": ratio}

    cells = [
        cell("cdma", "titanx-12", 0.9, 2.0), cell("cdma", "titanx-12", 0.6, 8.0), cell("vdnn", "titanx-12", 0.9, 1.5),
        cell("vdnn", "titanx-12", 0.6, None), cell("coop", "h200", 0.9, 1.5), cell("coop", "h200", 0.6, 1.5), cell("dtr", "h200", 0.9, 1.2),
    ]  # fmt: skip
    lines = make_zoo._orders(cells, ["cdma", "coop", "dtr", "vdnn"])[2:]
    assert [line.split(" | ")[3:7] for line in lines] == [
        ["titanx-12", "2.000 against 1.500", "2 against 1", "the other way round"],  # at home, where both have a plan
        ["h200", "1.500 against 1.200", "2 against 1", "as published"],  # said to need less memory, and has more plans
    ]


def test_the_committed_page_is_of_the_latest_result():
    latest = max((results.HERE / "results" / "simulated").glob("*-zoo.json"))
    result = json.loads(latest.read_text(encoding="utf-8"))
    assert f"`benchmarks/results/simulated/{latest.name}`" in (page := (make_zoo.HERE / "zoo.md").read_text(encoding="utf-8"))
    assert f"commit {result['commit']}, `{result['command']}`" in page
    assert not [row for row in result["rows"] if (row["outcome"] or "").startswith("crashed")]
