"""tierwise run: scripts as people have them, in this process and in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from integrations.conftest import BEGINNING

from tierwise.cli.run import split
from tierwise.ir import Run, serial

TESTS = Path(__file__).parent.parent
LOOP = """
model = tower()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    loss = model(**batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def test_a_plain_loop_prints_what_it_prints_alone(run, expected):
    code, out, said, _ = run(LOOP, options=("--report", "page.html"))
    assert (code, out) == (0, expected(LOOP))
    assert len(said) == 2
    assert said[0].startswith("Tower with SGD: budget 1.00 MiB; keeping everything takes 1.3") and "planned: " in said[0]
    assert said[1].startswith("4 steps, at most ") and said[1].endswith(" of 1.00 MiB in use")
    found = serial.load("page.json", Run)
    assert found.name == "Tower with SGD" and len(found.step_seconds) == 4
    assert found.predicted is not None and found.measured is not None
    assert 0 < found.reserved_bytes <= 1 << 20
    assert "Tower with SGD" in Path("page.html").read_text(encoding="utf-8")


def test_arguments_names_and_exit_code_are_the_scripts_own(run):
    code, out, said, _ = run(
        """
        import sys
        print(__name__, __file__, sys.argv, sys.path[0] == __file__.rpartition("/")[0])
        sys.exit(7)
        """,
        "--budget",
        "his",
        "--policy",
    )
    assert code == 7
    here = Path("script.py").absolute()
    assert out == f"__main__ {here} ['script.py', '--budget', 'his', '--policy'] True\n"
    assert said == ["nothing was planned: no torch.optim optimizer was made"]


def test_a_module(run, expected):
    code, out, said, _ = run("import sys\nprint(__name__, sys.argv[1:])" + LOOP, "--lr", "1", words=("-m", "script"))
    assert code == 0 and out == "__main__ ['--lr', '1']\n" + expected(LOOP)
    assert said[0].startswith("Tower with SGD: ")


def test_words_after_the_script_are_not_ours():
    assert split(["--budget", "1GiB", "a.py", "--report", "x"], ["--budget", "--report"]) == (["--budget", "1GiB"], ["a.py", "--report", "x"])
    assert split(["--budget=1GiB", "--no-compile", "-m", "a", "-x"], ["--budget"]) == (["--budget=1GiB", "--no-compile"], ["-m", "a", "-x"])
    assert split(["--", "a.py"], ["--budget"]) == ([], ["a.py"])


@pytest.mark.parametrize(
    ("ending", "code", "shown"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('so long')", 1, "so long"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("1 / 0", 1, "ZeroDivision"),
    ],
)
def test_how_a_script_ends_is_how_the_run_ends(run, ending, code, shown):
    ran, _, _, err = run(ending)
    assert ran == code and shown in err
    assert "tierwise/integrations" not in err  # the traceback begins with the script


def test_a_budget_that_is_too_small_is_one_sentence(run):
    code, out, said, err = run(LOOP, budget="100KiB")
    assert code == 2 and out == "" and len(said) == 1
    assert "too small for this step" in said[0] and "Traceback" not in err


def test_mistakes_are_found_before_the_script_runs(run):
    for options in (("--host", "1gb"), ("--nvme", "/scratch"), ("--policy", "atuo")):
        code, out, said, _ = run("print('ran')", options=options)
        assert (code, out) == (2, "") and len(said) == 1
    code, out, said, _ = run("print('ran')", words=("nosuch.py",))
    assert (code, said) == (2, ["nosuch.py cannot be read: No such file or directory; name a Python script, or -m and a module"])
    code, out, said, _ = run("print('ran')", words=("-m", "no.such"))
    assert code == 2 and said[0].startswith("there is no module 'no.such' here")


def test_several_ranks_are_refused(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, said, _ = run("print('ran')")
    assert (code, out) == (2, "") and said[0].startswith("2 processes train together here; Tierwise plans for one")


def test_evaluation_and_frozen_modules_before_training_are_not_the_training(run):
    _, _, said, _ = run(
        """
        teacher = tower().requires_grad_(False)
        model = tower()
        optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
        with torch.no_grad():
            model(batch(0)["x"])
        loss = torch.nn.MSELoss()(model(batch(0)["x"]), teacher(batch(0)["x"]))
        loss.backward()
        optimizer.step()
        """
    )
    assert len(said) == 2 and said[0].startswith("Tower with SGD: budget") and said[1].startswith("1 steps")


def test_a_second_model_beside_the_first_is_said_to_run_as_it_is(run):
    source = """
    one, two = tower(), torch.nn.Linear(8, 4)
    optimizers = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters())
    for number in range(2):
        (one(**batch(number)) + two(batch(number)["x"]).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    """
    _, _, said, _ = run(source)
    assert said[0].startswith("Tower with SGD: budget")
    assert said[1] == "Linear with Adam trains too, beside Tower with SGD; one model at a time is planned, so it runs as it is"
    assert len(said) == 3


def test_one_model_after_the_other_are_both_fitted(run, expected):
    _, out, said, _ = run("for fold in range(2):\n" + textwrap.indent(LOOP + "del model, optimizer, loss\n", "    "))
    assert out == expected(LOOP) * 2
    assert [sentence.split(":")[0] for sentence in said[:2]] == ["Tower with SGD"] * 2


def test_a_model_in_two_parts_says_what_is_not_planned(run):
    source = """
    model, head = tower(), torch.nn.Linear(4, 1000)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    head(model(batch(0)["x"])).sum().backward()
    optimizer.step()
    """
    _, _, said, _ = run(source)
    assert "of what the optimizer trains belongs to other modules, which run as they are" in said[0]


def test_parts_that_are_all_small_are_named(run):
    source = """
    parts = [torch.nn.Linear(8, 8) for _ in range(3)]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    sum(part(batch(0)["x"]).sum() for part in parts).backward()
    optimizer.step()
    """
    _, _, said, _ = run(source)
    (sentence,) = said
    assert sentence.startswith("nothing was planned: no module that was called holds most of what an optimizer trains; those that were: Linear (33%)")


def test_one_optimizer_for_each_parameter(run):
    source = """
    model = tower()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    for number in range(2):
        model(**batch(number)).backward()
        for optimizer in optimizers:
            optimizer.step()
    """
    _, _, said, _ = run(source)
    assert len(said) == 2 and said[0].endswith("19 more optimizers train it, and their state is not in the plan")


def test_a_script_that_fits_by_itself_is_left_alone(run, expected):
    _, out, said, _ = run(LOOP.replace("for number", "import tierwise\ntierwise.fit(model, optimizer, budget='1MiB')\nfor number"))
    assert out == expected(LOOP) and said == ["Tower with SGD was already fitted by the script, which is left as it is"]


def test_what_a_script_leaves_to_a_spawned_process_is_found_there(run):
    _, out, _, _ = run(
        """
        import multiprocessing
        def twice(number):
            return 2 * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(twice, [1, 2]))
        """,
        beginning="",
    )
    assert out == "[2, 4]\n"


def test_as_its_own_process(tmp_path, expected):
    """As torchrun starts one: with a rank in the environment."""
    one_of_one = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    (tmp_path / "script.py").write_text(BEGINNING + LOOP + "raise SystemExit(5)", encoding="utf-8")
    command = [sys.executable, "-m", "tierwise", "run", "--budget", "1MiB", "script.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, **one_of_one, "PYTHONPATH": str(TESTS)}
    )
    assert (ran.returncode, ran.stdout) == (5, expected(LOOP)), ran.stderr
    assert ran.stderr.count("tierwise: ") == 2 and "tierwise: 4 steps" in ran.stderr


def test_a_model_that_cannot_be_planned_is_one_sentence(run):
    source = LOOP.replace("model = tower()", "model = torch.nn.DataParallel(tower())")
    code, out, said, _ = run(source)
    assert (code, out) == (2, "") and len(said) == 1 and "CUDA_VISIBLE_DEVICES=0" in said[0]


def test_no_call_that_can_be_seen_is_said(run):
    _, _, said, _ = run(
        """
        model = tower()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @torch.compile(backend="eager")
        def loss_of(number):
            return model(**number)
        loss_of(batch(0)).backward()
        """
    )
    assert len(said) == 1 and said[0].startswith("nothing was planned: no module was called with gradients") and "compiled as a whole" in said[0]
