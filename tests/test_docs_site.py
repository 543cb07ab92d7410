"""The site builds without a warning, asks nothing of a network, and says of the commands what the commands say."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main

from tierwise.cli import VERBS, app, with_script_apart

ROOT = Path(__file__).parent.parent
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_commands_says_what_help_says(verb):
    """Not letter by letter: how help is laid out is typer's affair."""
    (section,) = re.findall(rf"^## tierwise {verb}\n(.*?)(?=^## |\Z)", COMMANDS, re.M | re.S)
    said = " ".join(section.split())
    command = typer.main.get_command(app).commands[verb]
    assert " ".join(command.help.split()) in said, "run `make docs` again"
    for parameter in command.params:
        assert all(name in said for name in parameter.opts if name.startswith("-")), (verb, parameter.name)
        if help_text := getattr(parameter, "help", None):
            assert " ".join(help_text.split()) in said, f"{verb} {parameter.name}: run `make docs` again"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_commands_in_the_docs_exist(page):
    known = typer.main.get_command(app).commands
    for line in re.findall(r"^\$ tierwise (.+)$", page.read_text(encoding="utf-8"), re.M):
        verb, *words = line.split("#")[0].split()
        assert verb in known, f"{page.name}: tierwise {verb}"
        if verb == "run":
            _, *words = with_script_apart([verb, *words])
            words = words[: words.index("--")]
        options = {name for parameter in known[verb].params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, f"{page.name}: {line}"


@pytest.mark.skipif(find_spec("material") is None, reason="no mkdocs-material here: pip install mkdocs-material")
def test_the_site_builds_and_asks_for_nothing(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"})
    assert ran.returncode == 0, ran.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 8
    for page in pages:
        asked = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"?(https?://[^\s\">]+)", page.read_text(encoding="utf-8"))
        assert asked == [], page
