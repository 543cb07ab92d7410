"""Each verb on chain(4), whose numbers are worked by hand: keeping everything takes 60 bytes and 9 seconds."""

from __future__ import annotations

import json

import pytest
from problems import chain, relu_net

from tierwise import machines, policies
from tierwise.cli import _terminal as terminal
from tierwise.errors import BadFile
from tierwise.ir import Run, check_schedule, peak_bytes, serial
from tierwise.policies import plan
from tierwise.simulate import simulate

# -- policies ---------------------------------------------------------------------------------------------------------------------------


def test_policies_lists_every_policy_with_its_line(tierwise):
    ran = tierwise("policies")
    for name in policies.names():
        card = policies.card(name)
        assert any(line.startswith(name) and line.endswith(card.summary) for line in ran.out.splitlines()), name
    assert any(line.startswith("zenflow (not exact) ") for line in ran.out.splitlines())
    assert any(line.split()[:4] == ["gist", "exact", "if", "dpr"] for line in ran.out.splitlines())
    assert ran.err.startswith("Next: tierwise policies ")


def test_policies_as_json(tierwise):
    rows = {row["name"]: row for row in json.loads(tierwise("policies", "--json").out)}
    assert [name for name, row in rows.items() if row["status"] == "policy"] == policies.names()
    assert rows["vdnn"]["requires"] == ["dram"]
    assert {key: rows["chen"][key] for key in ("year", "venue", "executable", "fidelity")} == {
        "year": 2016, "venue": "arXiv", "executable": True, "fidelity": "faithful"
    }  # fmt: skip
    assert rows["flashneuron"]["executable"].startswith("simulated only: ")
    assert rows["gtbm"]["status"] == "unknown" and rows["gtbm"]["reason"]


def test_one_policy_in_full(tierwise, refused):
    ran = tierwise("policies", "chen")
    for part in ("paper", "idea", "rule", "differs", "options"):
        assert any(line.startswith(part) for line in ran.out.splitlines())
    assert "segments=search" in ran.out
    assert json.loads(tierwise("policies", "chen", "--json").out)["options"] == {"segments": "'search'", "ends": "'auto'"}
    assert "no policy here, unknown" in refused("policies", "gtbm")
    assert refused("policies", "chn") == "unknown policy 'chn'; did you mean 'chen'?"


# -- machine ----------------------------------------------------------------------------------------------------------------------------


def test_machine_lists_what_ships(tierwise):
    listed = tierwise("machine").out
    assert listed == tierwise("machine", "--list").out
    assert [line.split()[0] for line in listed.splitlines()[2:]] == machines.names()
    assert [one["name"] for one in json.loads(tierwise("machine", "--json").out)] == machines.names()


def test_machine_shows_one(tierwise):
    out = tierwise("machine", "--name", "h200").out
    assert "140 GiB" in out and "55.4 GB/s" in out and machines.load("h200").source in out
    assert json.loads(tierwise("machine", "--name", "h200", "--json").out)["name"] == "h200"


def test_machine_writes_a_file_or_says_why_not(tierwise, refused, tmp_path):
    ran = tierwise("machine", "--name", "t4", "-o", tmp_path / "t4.json")
    assert ran.out == "" and f"Wrote {tmp_path / 't4.json'}." in ran.err
    assert machines.load(tmp_path / "t4.json") == machines.load("t4")
    assert "cannot write" in refused("machine", "--name", "t4", "-o", tmp_path / "no" / "t4.json")
    assert "name one machine to write" in refused("machine", "-o", tmp_path / "x.json")


# -- plan -------------------------------------------------------------------------------------------------------------------------------


def test_plan_predicts_and_ends_with_the_next_command(tierwise, step):
    ran = tierwise("plan", step, "--policy", "chen", "--budget", "50B")
    lines = ran.out.splitlines()
    assert lines[1].split() == ["policy", "peak", "time", "keep_all", "bound", "recomputed", "copied", "in"]
    assert lines[2].split()[:5] == ["keep_all", "60", "B", "9.00", "s"] and lines[2].endswith("does not fit")
    assert lines[3].startswith("chen ")
    assert "recomputes" in ran.out
    assert ran.err == f"Next: tierwise plan {step} --budget 50B --policy chen -o chain.chen.json\n"


def test_plan_says_what_memory_would_buy_unless_the_step_is_too_large_to_plan_twice_more(tierwise, step, monkeypatch):
    def said() -> list[str]:
        out = tierwise("plan", step, "--policy", "auto", "--budget", "50", "-O", "max_tries=3").out
        return [line.split()[0] for line in out.splitlines() if line.startswith(("more ", "less "))]

    assert said() == ["more", "less"]
    monkeypatch.setattr("tierwise.policies.auto.MANY_OPS", 3)
    assert said() == []


def test_plan_writes_a_run_whose_schedule_the_judge_accepts(tierwise, step, tmp_path):
    ran = tierwise("plan", step, "--policy", "vdnn", "--budget", "50B", "-o", tmp_path / "s.json.gz")
    assert ran.code == 0
    problem = chain(4).with_budget(50)
    run = serial.load(tmp_path / "s.json.gz", Run, graph=problem.graph)
    assert (run.name, run.policy, run.problem, run.measured) == ("chain", "vdnn", problem, None)
    check_schedule(problem, run.schedule)
    assert run.schedule == plan(problem, "vdnn") and run.predicted == simulate(problem, run.schedule)
    assert [(table.budget_bytes, [row.policy for row in table.rows]) for table in run.comparisons] == [(50, ["keep_all", "vdnn"])]
    with pytest.raises(BadFile, match="another graph"):
        serial.load(tmp_path / "s.json.gz", Run, graph=chain(5).graph)
    assert f"Wrote {tmp_path / 's.json.gz'}." in ran.err
    assert ran.err.endswith(f"Next: tierwise report {tmp_path / 's.json.gz'} -o chain.vdnn.html\n")


def test_plan_shows_the_schedule(tierwise, step):
    out = tierwise("plan", step, "--policy", "keep_all", "--show").out
    assert out.count("\ncompute ") == 9 and "\ncompute fwd0\n" in out and "recompute" not in out.split("\n\n")[-1]


def test_plan_as_json(tierwise, step):
    found = json.loads(tierwise("plan", step, "--policy", "keep_all", "--json").out)
    assert (found["policy"], found["outcome"], found["peak_bytes"], found["seconds"]) == ("keep_all", "fits", 60, 9.0)
    assert found["times_keep_all"] == 1.0 and found["bound_seconds"] == 9.0 and found["budget_bytes"] == 10_000


def test_plan_places_by_every_allocator(tierwise, step):
    ran = tierwise("plan", step, "--policy", "keep_all", "--place")
    assert [line.split() for line in ran.out.splitlines() if line.startswith(("first-fit", "offline"))] == [
        ["first-fit", "60", "B", "0.0%"], ["offline", "60", "B", "0.0%"]
    ]  # fmt: skip
    found = json.loads(tierwise("plan", step, "--policy", "keep_all", "--place", "--json").out)["placements"]
    assert found["best-fit"] == {"span_bytes": 60, "used_bytes": 60}


def test_plan_takes_options(tierwise, refused, step):
    assert tierwise("plan", step, "--policy", "chen", "-O", "segments=sqrt").code == 0
    assert refused("plan", step, "--policy", "chen", "-O", "segmants=sqrt") == "unknown option of chen 'segmants'; did you mean 'segments'?"
    assert refused("plan", step, "--policy", "chen", "-O", "segments") == "option 'segments' is not of the form key=value, such as key=2"
    assert refused("plan", step, "--policy", "keep_all", "-O", "x=1") == "keep_all takes no options, and was given 'x'"
    assert "chen knows" in refused("plan", step, "--policy", "chen", "-O", "segments=some")


def test_a_budget_too_small_says_the_smallest(refused, step, tierwise):
    sentence = refused("plan", step, "--policy", "keep_all", "--budget", "59B", "-o", step.with_name("s.json"))
    assert (
        sentence == "budget 59 B is below 60 B, the smallest keep_all can do for this step; use a budget of 60B, a smaller batch, or another policy"
    )
    assert not step.with_name("s.json").exists()
    assert tierwise("plan", step, "--policy", "keep_all", "--budget", "60B").code == 0


def test_an_unwritable_output_leaves_nothing(refused, step, tmp_path):
    assert "cannot write" in refused("plan", step, "--policy", "chen", "-o", tmp_path / "no" / "s.json")
    assert "Is a directory" in refused("plan", step, "--policy", "chen", "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [step.name]


# -- simulate ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def schedule(step, tmp_path):
    problem = chain(4).with_budget(50)
    serial.save(plan(problem, "vdnn"), tmp_path / "s.json", graph=problem.graph)
    return tmp_path / "s.json"


def test_simulate_predicts(tierwise, step, schedule, tmp_path):
    problem = chain(4).with_budget(50)
    predicted = simulate(problem, plan(problem, "vdnn"))
    ran = tierwise("simulate", step, schedule, "--budget", "50B", "-o", tmp_path / "t.json")
    for lane in predicted.busy_seconds():
        assert f"\n{lane}" in ran.out
    assert serial.load(tmp_path / "t.json", Run, graph=problem.graph).predicted == predicted
    assert ran.err.endswith(f"Next: tierwise report {tmp_path / 't.json'} -o report.html\n")
    again = tierwise("simulate", step, tmp_path / "t.json", "--budget", "50B")  # a run brings its schedule
    assert again.out.replace("t.json", "s.json") == ran.out
    assert again.err.endswith(f"Next: tierwise compare {step} --budget 50B\n")
    found = json.loads(tierwise("simulate", step, schedule, "--budget", "50B", "--json").out)
    assert found["seconds"] == predicted.seconds
    assert found["peak_bytes"] == dict(predicted.peak_bytes)
    assert found["busy_seconds"] == predicted.busy_seconds()


def test_simulate_knows_the_kernels_a_policy_prepared_and_what_rounds(tierwise, tmp_path):
    problem = relu_net()
    budget = f"{peak_bytes(problem, plan(problem, 'keep_all'))['hbm'] - 1}B"
    step, run = tmp_path / "relus.json", tmp_path / "gist.json"
    serial.save(problem, step)
    planned = tierwise("plan", step, "--policy", "gist", "-O", "dpr=fp16", "--budget", budget, "-o", run)
    assert "\ngist (not exact) " in planned.out  # exact but for this option
    assert f"{run} (not exact) " in tierwise("simulate", step, run, "--budget", budget).out  # max pooling's backward is not the step's own
    assert "not exact" not in tierwise("plan", step, "--policy", "gist", "--budget", budget).out


def test_simulate_refuses_a_schedule_of_another_graph(refused, schedule, tmp_path):
    serial.save(chain(5), tmp_path / "other.json")
    assert "was made for another graph" in refused("simulate", tmp_path / "other.json", schedule)


def test_simulate_refuses_a_schedule_over_budget(refused, step, schedule):
    assert "hbm needs" in refused("simulate", step, schedule, "--budget", "20B")


def test_simulate_refuses_other_files(refused, step):
    assert "this is a problem; expected a schedule or run" in refused("simulate", step, step)
    assert "cannot read" in refused("simulate", step, step.with_name("none.json"))


# -- compare ----------------------------------------------------------------------------------------------------------------------------


def test_compare_prints_a_table_for_each_budget(tierwise, step):
    ran = tierwise("compare", step, "--budget", "100B", "--budget", "50B,40B", "--policies", "keep_all,chen,vdnn")
    titles = [line for line in ran.out.splitlines() if line.startswith("toy with a budget")]
    assert titles == [f"toy with a budget of {size} B; keeping everything takes 60 B" for size in (100, 50, 40)]
    assert ran.out.count("lower bound") == 3
    assert ran.err.startswith(f"Next: tierwise plan {step} --budget ")


def test_compare_says_what_does_not_fit(tierwise, step):
    out = tierwise("compare", step, "--budget", "30B", "--policies", "chen,keep_all").out.splitlines()
    assert out[3].startswith("keep_all") and out[3].endswith("does not fit")
    least = policies.load("chen") and json.loads(tierwise("compare", step, "--budget", "30B", "--policies", "chen", "--json").out)
    nbytes = least["comparisons"][0]["rows"][0]["least_bytes"]
    assert out[-1].split(maxsplit=1) == ["chen", f"does not fit; its smallest budget is {nbytes}B"]


def test_compare_marks_what_is_not_exact_and_does_not_recommend_it(tierwise, graph_step):
    ran = tierwise("compare", str(graph_step), "--machine", "h200", "--budget", "7.5GiB", "--policies", "zenflow,zero_offload")
    names = [line.split("  ")[0] for line in ran.out.splitlines()[-3:]]
    assert names == ["zenflow (not exact)", "zero_offload", "lower bound"]  # the fastest first
    assert "--policy zero_offload" in ran.err


def test_compare_writes_and_prints_a_run(tierwise, step, tmp_path):
    words = ("compare", step, "--budget", "50B,40B", "--policies", "keep_all,chen")
    ran = tierwise(*words, "-o", tmp_path / "t.json")
    written = serial.load(tmp_path / "t.json", Run)
    assert written.name == "chain on toy" and [table.budget_bytes for table in written.comparisons] == [50, 40]
    assert ran.err.endswith(f"Wrote {tmp_path / 't.json'}.\nNext: tierwise report {tmp_path / 't.json'} -o chain.html\n")
    printed = serial.loads(tierwise(*words, "--json").out, Run)
    assert [[row.seconds for row in table.rows] for table in printed.comparisons] == [[r.seconds for r in t.rows] for t in written.comparisons]


def test_compare_takes_options_of_a_policy(tierwise, refused, step):
    assert tierwise("compare", step, "--policies", "chen", "-O", "chen.segments=sqrt").code == 0
    assert refused("compare", step, "--policies", "chen", "-O", "vdnn.x=1").startswith("unknown policy among those compared 'vdnn'")
    assert "not of the form" in refused("compare", step, "-O", "segments")
    assert "did you mean 'segments'" in refused("compare", step, "-O", "chen.segmants=sqrt")


def test_compare_runs_every_policy_by_default(tierwise, step):
    ran = tierwise("compare", step, "--json")
    assert sorted(row["policy"] for row in json.loads(ran.out)["comparisons"][0]["rows"]) == policies.names()


# -- tables -----------------------------------------------------------------------------------------------------------------------------

COLUMNS = (terminal.Column("name", right=False), terminal.Column("size\nin B"), terminal.Column("note", optional=True))
LINES = [terminal.Line(("a", "1", "x")), terminal.Line(("long", "1000", "y")), terminal.Line(("b",), rest="cannot")]


def test_tables_are_aligned(capsys):
    terminal.print_table(COLUMNS, LINES)
    assert capsys.readouterr().out.splitlines() == [
        "      size",
        "name  in B  note",
        "a        1     x",
        "long  1000     y",
        "b     cannot",
    ]


@pytest.mark.parametrize(("width", "head"), [(16, "name  in B  note"), (15, "name in B note"), (13, "name in B")])
def test_tables_move_together_on_a_narrow_terminal(width, head, monkeypatch):
    from rich.console import Console

    narrow = Console(force_terminal=True, color_system=None, width=width, soft_wrap=True, highlight=False, markup=False)
    monkeypatch.setattr(terminal, "console", lambda: narrow)
    with narrow.capture() as captured:
        terminal.print_table(COLUMNS, LINES)
    assert captured.get().splitlines()[1] == head
    assert max(map(len, captured.get().splitlines())) <= width
