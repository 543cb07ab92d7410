"""A plan in a file: it comes back as it was for the step it was made for, and is refused for any other, in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fitting.training import equal, fitting, three_steps, tower, trained
from toy_blocks import menu

from tierwise.errors import BadFile
from tierwise.fitting import plan_of
from tierwise.fitting.saved import fingerprint, load_program, save_program
from tierwise.ir import Placement
from tierwise.lower import choose, with_budget

QUESTION = menu(6, 250, bytes_per_second=1000.0)


@pytest.fixture
def saved(tmp_path):
    chosen = choose(QUESTION)
    assert any(plan.sent for plan in chosen.program.calls.values())
    save_program(chosen.program, QUESTION, 250, tmp_path / "plan.json")
    return chosen.program, tmp_path / "plan.json"


def test_a_program_comes_back_as_it_was(saved):
    program, path = saved
    assert load_program(path, QUESTION) == program


def test_homes_of_state_come_back_too(tmp_path):
    program = replace(choose(QUESTION).program, states={"block0": Placement("host", "cpu")}, update="backward", ahead=3, in_flight=5)
    save_program(program, QUESTION, 250, tmp_path / "plan.json")
    text = json.loads((tmp_path / "plan.json").read_text())["program"]
    assert text["states"] == {"block0": {"state": "host", "update": "cpu", "parameters": "device", "gradients": "device"}}
    assert (text["update"], text["ahead"], text["in_flight"]) == ("backward", 3, 5)


@pytest.mark.parametrize(
    ("name", "without", "refused"),
    [("ahead", 1, "parameters come 0 regions ahead"), ("in_flight", 4, "gradients of 0 regions wait")],  # without: a file of a version that knew one
)
def test_how_early_parameters_come_and_how_many_gradients_wait_is_read_as_well(saved, name, without, refused):
    program, path = saved
    data = json.loads(path.read_text())
    for given, expected in ((3, 3), (None, without)):
        data["program"].pop(name, None)
        path.write_text(json.dumps(data | {"program": data["program"] | ({} if given is None else {name: given})}))
        assert load_program(path, QUESTION) == replace(program, **{name: expected})
    path.write_text(json.dumps(data | {"program": data["program"] | {name: 0}}))
    with pytest.raises(BadFile, match=f"corrupt plan: {refused}; plan again"):
        load_program(path, QUESTION)


def renamed(machine_name):
    return replace(QUESTION, problem=replace(QUESTION.problem, machine=replace(QUESTION.problem.machine, name=machine_name)))


def resized(name, nbytes):
    graph = QUESTION.problem.graph
    storages = tuple(replace(s, nbytes=nbytes) if s.name == name else s for s in graph.storages)
    return replace(QUESTION, problem=replace(QUESTION.problem, graph=replace(graph, storages=storages)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (menu(5, 250, bytes_per_second=1000.0), "another model: its parameters have other names or sizes;"),
        (resized("batch", 20), "other inputs: what the step is given has another size;"),
        (resized("h0", 31), "another step of this model: its ops are not the same;"),
        (replace(QUESTION, choices={0: QUESTION.choices[0][:1]}), "other choices: what regions can save and recompute is not the same;"),
        (renamed("another"), "another machine (toy with hbm, dram, and this is another with hbm, dram);"),
    ],
)
def test_a_plan_for_something_else_is_refused_with_what_differs(saved, other, words):
    _, path = saved
    with pytest.raises(BadFile) as refused:
        load_program(path, other)
    assert str(refused.value) == f"{path}: this plan is for {words} plan again, by leaving the file out"


def test_a_plan_made_under_another_torch_is_refused(saved):
    _, path = saved
    data = json.loads(path.read_text())
    data["for"]["torch"] = "1.0"
    path.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=rf"another version of torch \(1\.0, and this is {fingerprint(QUESTION)['torch']}".replace("+", r"\+")):
        load_program(path, QUESTION)


def test_a_plan_that_no_longer_fits_says_what_it_needs(saved):
    _, path = saved
    with pytest.raises(BadFile, match=r"this plan needs \d+ B of hbm, and there are 100 B"):
        load_program(path, with_budget(QUESTION, 100))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a saved plan"),
        ('{"tierwise": "plan", "format": 9}', "a plan of format 9"),
        ('{"tierwise": "plan", "format": 1, "for": {}}', "does not say what it is for"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text, words):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BadFile, match=words):
        load_program(tmp_path / "plan.json", QUESTION)
    with pytest.raises(BadFile, match="cannot read"):
        load_program(tmp_path / "absent.json", QUESTION)


@pytest.mark.parametrize(
    "broken",
    [
        lambda program: program["calls"].popitem(),
        lambda program: program.pop("update"),
        lambda program: program["calls"]["0"].update(choice="no such choice"),
        lambda program: program["calls"]["0"].update(release=0),
        lambda program: program["calls"]["0"].update(sent=["no such value"]),
        lambda program: program.update(states={"block0": {"state": "moon"}}),
    ],
)
def test_a_corrupt_program_is_refused(saved, broken):
    _, path = saved
    data = json.loads(path.read_text())
    broken(data["program"])
    path.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=r"corrupt plan|this plan needs"):
        load_program(path, QUESTION)


def test_a_fitted_plan_says_why_and_is_saved(tmp_path):
    model = tower(blocks=8)
    with fitting(model, budget="900KiB"):
        trained(three_steps, model)
        plan = plan_of(model)
        words = plan.summary().splitlines()
        assert any(line.startswith("activations: of 2.31 MiB that wait for backward, ") for line in words)
        assert any(line.startswith("limit: ") for line in words)
        assert [line.split(" would ")[0] for line in words[-2:]] == ["112 KiB more", "112 KiB less"]
        plan.save(tmp_path / "plan.json")
        assert load_program(tmp_path / "plan.json", plan.menu) == plan.program


def test_a_training_runs_by_a_plan_that_was_saved(tmp_path, monkeypatch):
    model = tower()
    with fitting(model, budget="800KiB"):
        losses = trained(three_steps, model)
        plan_of(model).save(tmp_path / "plan.json")
        calls = plan_of(model).program.calls
    monkeypatch.setattr("tierwise.fitting.programs.choose_jointly", lambda *args, **options: pytest.fail("it was planned again"))
    model = tower()
    with fitting(model, budget="800KiB", plan=tmp_path / "plan.json"):
        assert equal(trained(three_steps, model), losses)
        assert plan_of(model).program.calls == calls
    model = tower(blocks=3)
    with fitting(model, budget="800KiB", plan=tmp_path / "plan.json"), pytest.raises(BadFile, match="this plan is for another model"):
        trained(three_steps, model)
