"""The site builds without a warning, asks nothing of a network, and says of the commands what the commands say."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main

from docs import make_api, make_commands, make_policies, make_reference, make_zoo
from tierwise import policies
from tierwise.cli import VERBS, app, with_script_apart

ROOT = Path(__file__).parent.parent
COMMANDS = make_commands.commands_page()


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_commands_says_what_help_says(verb):
    """Not letter by letter: how help is laid out is typer's affair."""
    (section,) = re.findall(rf"^## tierwise {verb}\n(.*?)(?=^## |\Z)", COMMANDS, re.M | re.S)
    said = " ".join(section.split())
    command = typer.main.get_command(app).commands[verb]
    assert " ".join(command.help.split()) in said
    for parameter in command.params:
        assert all(name in said for name in parameter.opts if name.startswith("-")), (verb, parameter.name)
        if help_text := getattr(parameter, "help", None):
            assert " ".join(help_text.split()) in said, (verb, parameter.name)


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


def rows(**ratios):
    """Of one model: a policy's ratio at 0.9 and at 0.5 of the memory; None where it has no plan."""
    kept = {"case": "net on h200", "way": "keep_all", "budget_share": 1.0, "peak_bytes": 100, "ratio": 1.0}
    cells = [
        {"case": "net on h200", "way": way, "budget_share": share, "peak_bytes": ratio and int(100 * share), "ratio": ratio,
         "outcome": None if ratio else "needs 0.600"}
        for way, pair in ratios.items()
        for share, ratio in zip((0.9, 0.5), pair, strict=True)
    ]  # fmt: skip
    return [kept, *cells]


def result(**ratios):
    """As benchmarks/cases/zoo.py writes one."""
    return {"rows": rows(**ratios), "file": "f.json", "date": "2026-01-01", "commit": "abc", "command": "x"}


@pytest.mark.skipif(find_spec("material") is None, reason="no mkdocs-material here: pip install mkdocs-material")
def test_the_site_builds_and_asks_for_nothing(tmp_path, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setattr(policies, "names", lambda: ["chen", "keep_all", "vdnn"])  # each page takes its time
    monkeypatch.setattr(make_policies, "zoo_result", lambda: result(chen=(1.1, None), vdnn=(1.5, 1.6)))
    monkeypatch.setattr(make_zoo, "zoo_page", lambda: ("# The field on one engine\n", {"net": "<svg/>"}))
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))  # a warning is an error
    assert {page.stem for page in (site / "reference" / "policies").glob("*.html")} == {"index", *policies.names()}
    assert all((site / f"{name}.html").exists() for name in ("index", "zoo", "benchmarks", "accuracy", "combinations", "reference/api"))
    assert "<svg" in (site / "how_it_works.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        asked = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"?(https?://[^\s\">]+)", page.read_text(encoding="utf-8"))
        assert asked == [], page


def test_the_api_is_what_the_docstrings_say():
    page = make_api.api_page()
    for name in ("fit", "plan_of", "stats", "watch", "release", "capture"):
        assert f"### tierwise.{name}\n" in page
    assert "    budget: str | int | float | None = None,\n" in page and '- `nvme`: "DIR:200GiB": a directory' in page
    assert "| &emsp;&emsp;`UnknownName` | A name that is not in a list of names. |" in page  # below BadInput, below TierwiseError
    assert "### fit_trainer\n" in page and "class Timeline\n    seconds: float\n" in page


def test_every_name_of_the_surface_has_something_to_say():
    surface = [module for module in make_api.SECTIONS if module == "tierwise" or ".integrations." in module]
    silent = [f"{module}.{name}" for module in surface for name, (found, _) in make_api.public(module) if not ast.get_docstring(found)]
    assert silent == []


def test_the_page_of_a_policy_has_its_card_and_its_curve(monkeypatch):
    monkeypatch.setattr(make_policies, "zoo_result", lambda: result(vdnn=(1.5, None), chen=(1.1, 1.2)))
    page = make_policies.policy_page("vdnn")
    assert page.startswith("# vdnn\n") and "MICRO 2016" in page and "`mode='dyn'`" in page
    assert "| net | 1.500× | needs 0.600 |" in page and "f.json" in page
    assert page.count('<circle class="mine"') == 1
    assert make_policies.frontier([(1.0, 1.0), (0.9, 1.5), (0.9, 1.1), (0.5, 1.2)]) == [(0.5, 1.2), (0.9, 1.1), (1.0, 1.0)]


def test_a_policy_that_is_in_no_result_is_simulated(monkeypatch):
    monkeypatch.setattr(make_policies, "zoo_result", dict)
    page = make_policies.policy_page("chen")
    assert re.search(r"\| gpt-small \| 1\.\d+× ", page) and "simulated when this page was made" in page


def test_the_table_of_policies_names_all():
    page = make_reference.policies_page()
    assert all(f"[{name}]({name}.md)" in page for name in policies.names())
    assert all(f"| {absent.name} |" in page for absent in policies.ABSENT)
