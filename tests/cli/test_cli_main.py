"""The command line as a whole: exit codes, streams, and what a mistake looks like."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierwise import __version__
from tierwise.ir import serial


def spawn(*words: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tierwise", *map(str, words)], text=True, capture_output=True, timeout=60, **more)


def test_version(tierwise):
    assert tierwise("--version").out == f"tierwise {__version__}\n"


def test_no_words_is_help(tierwise):
    ran = tierwise()
    assert ran.code == 0
    for verb in ("policies", "machine", "plan", "simulate", "compare"):
        assert verb in ran.out


def test_unknown_commands_and_options_name_the_nearest(refused, step):
    assert refused("polices") == "unknown command 'polices'; did you mean 'policies'?"
    assert refused("plan", step, "--polcy", "chen") == "unknown option '--polcy'; did you mean '--policy'?"
    assert refused("plan", step, "--policy") == "option '--policy' requires an argument; see tierwise plan --help"
    assert refused("plan", step) == "missing option '--policy'; see tierwise plan --help"
    assert refused("plan") == "missing argument 'STEP'; see tierwise plan --help"
    assert "unexpected extra argument" in refused("policies", "chen", "vdnn")


def test_data_and_talk_do_not_mix(graph_step):
    ran = spawn("compare", graph_step, "--machine", "h200", "--budget", "6GiB", "--policies", "keep_all,chen", "--json")
    assert ran.returncode == 0
    assert [row["policy"] for row in json.loads(ran.stdout)["comparisons"][0]["rows"]] == ["keep_all", "chen"]
    assert ran.stderr == ""
    ran = spawn("compare", graph_step, "--machine", "h200", "--budget", "6GiB", "--policies", "keep_all,chen")
    assert "Next: tierwise plan" in ran.stderr and "Next" not in ran.stdout
    assert "\x1b" not in ran.stdout + ran.stderr


def test_the_quick_verbs_import_nothing_heavy():
    code = """
import sys
from tierwise.cli import main
assert main(["policies"]) == 0 and main(["machine", "--list"]) == 0
heavy = {"torch", "numpy", "scipy", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_sentence(graph_step):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tierwise", "policies", "--json"]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == "tierwise: cannot write to stdout: No space left on device; send it to a place that has room\n"


def test_a_reader_that_leaves_is_no_error():
    ran = subprocess.run(f"{sys.executable} -m tierwise policies --json | head -c 10", shell=True, capture_output=True, text=True, timeout=60)
    assert ran.stderr == ""


def test_a_terminal_without_our_letters_is_no_error(graph_step):
    more = {"env": os.environ | {"PYTHONIOENCODING": "ascii"}}
    ran = spawn("compare", graph_step, "--machine", "h200", "--policies", "keep_all", **more)
    assert ran.returncode == 0 and "1.00?" in ran.stdout


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_ctrl_c_is_quiet(tmp_path):
    """The process is stopped while it waits for a step that never comes."""
    os.mkfifo(tmp_path / "pipe.json")
    command = [sys.executable, "-m", "tierwise", "compare", str(tmp_path / "pipe.json")]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    writer = os.open(tmp_path / "pipe.json", os.O_WRONLY)  # returns once the process has opened its end
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    os.close(writer)
    assert (running.returncode, out, err) == (130, "", "")


def test_python_dash_m_and_the_exit_code(tmp_path):
    ran = spawn("plan", tmp_path / "nothing.json", "--policy", "chen")
    assert ran.returncode == 2
    assert ran.stdout == "" and ran.stderr.startswith("tierwise: cannot read ")


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ("24G", "'24G' is not a number of bytes"),
        ("much", "'much' is not a number of bytes"),
        ("0", "not a number of bytes"),
        ("", "'' is not a number of bytes"),
        ("1TiB", "budget 1.00 TiB is more than the 9.77 KiB of hbm that toy has"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "compare", "simulate"])
def test_nonsense_budgets(refused, step, tmp_path, verb, budget, sentence):
    more = {"plan": ["--policy", "chen"], "compare": [], "simulate": [tmp_path / "s.json"]}[verb]
    assert sentence in refused(verb, step, *more, "--budget", budget)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not JSON"),
        ("{}", "not a Tierwise file"),
        ('{"tierwise": "graph", "format": 1}', "corrupt graph"),
        ('{"tierwise": "graph", "format": 7}', "format 7; this version reads format 1"),
        ('{"tierwise": "machine", "format": 1}', "this is a machine; expected a graph or problem"),
    ],
)
def test_bad_steps(refused, tmp_path, text, sentence):
    path = tmp_path / "bad.json"
    path.write_text(text)
    for words in (("compare", path), ("plan", path, "--policy", "chen"), ("simulate", path, path)):
        assert sentence in refused(*words)


def test_unknown_names(refused, graph_step, step):
    assert refused("plan", graph_step, "--policy", "chn", "--machine", "h200") == "unknown policy 'chn'; did you mean 'chen'?"
    assert refused("plan", graph_step, "--policy", "chen", "--machine", "h20") == "unknown machine 'h20'; did you mean 'h200'?"
    assert refused("compare", step, "--policies", "chen,vdn") == "unknown policy 'vdn'; did you mean 'vdnn'?"
    assert "needs a machine" in refused("compare", graph_step)
    assert "brings its own machine" in refused("compare", step, "--machine", "h200")


def test_the_same_words_give_the_same_answer(tierwise, step):
    first, second = (json.loads(tierwise("compare", step, "--budget", "60B", "--policies", "chen,vdnn", "--json").out) for _ in range(2))
    for found in (first, second):
        for row in found["comparisons"][0]["rows"]:
            row.pop("planning_seconds")
    assert first == second


def test_a_machine_file_will_do(tierwise, tmp_path, graph_step):
    assert tierwise("machine", "--name", "rtx4090", "-o", tmp_path / "m.json").code == 0
    ran = tierwise("compare", graph_step, "--machine", tmp_path / "m.json", "--budget", "0.5", "--policies", "keep_all", "--json")
    assert json.loads(ran.out)["machine"] == "rtx4090"
    assert serial.load(tmp_path / "m.json", serial.Machine).name == "rtx4090"
