from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from one_thread import one_thread as one_thread
from problems import chain

from tierwise.cli import main
from tierwise.ir import serial


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def tierwise(capsys):
    """Runs one command line in this process: exit code, stdout, stderr."""

    def run(*words: object) -> Ran:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def refused(tierwise):
    """Runs a command line that must end in exit code 2, nothing on stdout and one sentence on stderr; returns the sentence."""

    def run(*words: object) -> str:
        ran = tierwise(*words)
        assert ran.code == 2, ran
        assert ran.out == ""
        assert ran.err.startswith("tierwise: ") and ran.err.count("\n") == 1, ran.err
        return ran.err.removeprefix("tierwise: ").rstrip("\n")

    return run


@pytest.fixture
def step(tmp_path) -> Path:
    """chain(4) as a problem file: keeping everything takes 60 bytes and 9 seconds."""
    serial.save(chain(4), tmp_path / "chain.json")
    return tmp_path / "chain.json"


@pytest.fixture
def graph_step() -> Path:
    return Path(__file__).parent.parent.parent / "examples" / "gpt-small.step.json"
