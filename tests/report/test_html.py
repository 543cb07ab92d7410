"""The page as text: one file that asks for nothing, with everything it says also in tables, and names that cannot break it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from problems import GraphBuilder
from report.example_runs import measured, planned

from tierwise.ir import Compute, Copy, Curve, Phase, Role, Run, Schedule, Span, Timeline
from tierwise.report import render, summarize
from tierwise.report.html import TEMPLATES

VOID = {"meta", "br", "line", "circle", "path", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, checked to close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attrs for found, attrs in self.tags if found == tag]


def page_of(*runs):
    text = render(runs, summarize(runs))
    page = Page(text)
    assert not page.open
    return text, page


RUNS = {
    "predicted": (planned("chen"),),
    "measured": (measured(planned("vdnn")),),
    "several": (planned("chen"), measured(planned("vdnn")), planned("chen", 60)),
    "tables": (Run("tables", comparisons=planned("chen").comparisons),),
    "timeline": (Run("bare", measured=planned("vdnn").predicted),),
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_one_file_that_asks_for_nothing(runs):
    text, page = page_of(*runs)
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", outside)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object"}
    assert all(set(attrs) <= {"type", "id"} for attrs in page.all("script"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:  # what refers to an id finds it
        for name in ("aria-labelledby", "aria-controls"):
            assert attrs.get(name) is None or attrs[name] in ids


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_the_page_can_be_read_without_seeing_it(runs):
    text, page = page_of(*runs)
    assert ("a", {"class": "skip", "href": "#main"}) in page.tags and page.all("main") == [{"id": "main"}]
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    for _, attrs in page.tags:
        if attrs.get("role") in ("application", "region", "tablist", "img"):
            assert attrs.get("aria-label"), attrs
        if attrs.get("role") == "application":
            assert attrs["tabindex"] == "0"
    timed = [run for run in runs if run.predicted or run.measured]
    if timed:
        assert text.count("<caption>Lanes") == len(timed) and "<caption>Memory of hbm" in text
    assert all(attrs.get("scope") in ("col", "row") or attrs.get("class") == "number" for attrs in page.all("th"))


def test_lanes_can_be_focused_and_say_what_they_are():
    _, page = page_of(planned("vdnn"))
    labels = [attrs["aria-label"] for _, attrs in page.tags if attrs.get("aria-roledescription") == "lane"]
    assert [label.split(" Left")[0] for label in labels] == [
        "Lane gpu, computes in hbm: 9 spans, busy 9.00 s, 100% of the step.",
        "Lane out, hbm → dram: 3 spans, busy 3.00 s, 33% of the step.",
        "Lane in, dram → hbm: 3 spans, busy 3.00 s, 33% of the step.",
    ]


def test_what_it_says():
    text, page = page_of(measured(planned("vdnn")), planned("chen"))
    said = " ".join(" ".join(page.texts).split())
    for sentence in (word for run in summarize([measured(planned("vdnn")), planned("chen")]).runs for word in run.words):
        assert sentence in said
    assert "Predicted against measured" in said and "+10.0%" in said
    assert "Every span and every change of memory is drawn; none was merged or left out." in said
    assert text.count('role="tab"') == 2 and text.count('role="tabpanel"') == 2


def test_names_cannot_break_the_page():
    evil = '</script><img src=x onerror="alert(1)">{{ 7*7 }}'
    run = measured(planned("vdnn"))
    ops = tuple(replace(op, name=evil) for op in run.problem.graph.ops)
    graph = replace(run.problem.graph, ops=ops)
    run = replace(run, name=evil, policy=evil, words=(evil,), problem=replace(run.problem, graph=graph))
    text, page = page_of(run, planned("chen"))
    assert not page.all("img")
    data = json.loads(re.search(r'<script type="application/json" id="page-data">(.*?)</script>', text, re.S)[1])
    assert evil in data["labels"]
    assert "{{ 7*7 }}" in next(said for said in page.texts if said.startswith("</script>"))  # neither a tag nor a template


def test_light_and_dark_have_the_same_colours_however_they_are_chosen():
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    by_system = re.search(r':root:not\(\[data-theme="light"\]\) \{(.*?)\n\} \}', css, re.S)[1]
    by_hand = re.search(r':root\[data-theme="dark"\] \{\s*color-scheme: dark;(.*?)\n\}', css, re.S)[1]
    assert by_system.split() == by_hand.split()
    light = set(re.findall(r"(--[a-z0-9_-]+):", css[: css.index("@media")]))
    assert light == set(re.findall(r"(--[a-z0-9_-]+):", by_hand))
    assert {f"--{role}" for role in (*Role, "workspace", "staging", *Phase, "recompute")} <= light


def contrast(one, other):
    """As WCAG counts it: 4.5 is enough for small letters."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((light(one), light(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_letters_can_be_read(theme):
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    block = css[: css.index("@media")] if theme == "light" else css[css.index(':root[data-theme="dark"]') : css.index("* { box-sizing")]
    colours = dict(re.findall(r"--([a-z0-9_-]+): (#[0-9a-f]{6});", block))
    for letters in ("ink", "muted", "accent", "warning"):
        for paper in ("paper", "card", "track"):
            assert contrast(colours[letters], colours[paper]) >= 4.5, (letters, paper)


def deep(layers: int, ops_a_layer: int = 24) -> Run:
    """As many ops, names, copies and changes of memory as a transformer of so many layers has; every activation goes to dram and back."""
    b = GraphBuilder()
    x = b.storage("x", 1 << 20, Role.INPUT)
    acts = []
    for layer in range(layers):
        for op in range(ops_a_layer):
            y = b.storage(f"model.layers.{layer}.self_attention.projection.{op}.out", (1 << 20) + op, Role.ACTIVATION)
            b.op(f"model.layers.{layer}.self_attention.projection.mm.{op}", Phase.FORWARD, [x], [y])
            acts.append((y, layer, op))
            x = y
    for y, layer, op in reversed(acts):
        for half in range(2):
            b.op(f"model.layers.{layer}.self_attention.projection.mm.{op}.backward.mm.{half}", Phase.BACKWARD, [y], [])
    steps, spans, now = [], [], 0.0
    held = {"hbm": [(0.0, 0)], "dram": [(0.0, 0)]}
    for op in b.ops:
        length = 1e-4 + (op.id % 97) * 1.7e-6
        steps.append(Compute(op.id))
        spans.append(Span(len(steps) - 1, "gpu", now, now + length))
        if op.phase is Phase.FORWARD or op.name.endswith("0"):
            out = op.phase is Phase.FORWARD
            storage = op.writes[0] if out else op.reads[0]
            steps.append(Copy(storage, "hbm", "dram") if out else Copy(storage, "dram", "hbm"))
            spans.append(Span(len(steps) - 1, "out" if out else "in", now, now + length * 0.83))
            held["dram"].append((now, held["dram"][-1][1] + (1 if out else -1) * b.storages[storage].nbytes))
        held["hbm"].append((now, (1 << 30) + (op.id * 7919) % (1 << 28)))
        now += length
    memory = {tier: {"activation": Curve(*map(tuple, zip(*points, strict=True)))} for tier, points in held.items()}
    timeline = Timeline(now, {"hbm": (1 << 30) + (1 << 28), "dram": 70 << 20}, tuple(spans), memory, False)
    return Run("deep", b.problem(), Schedule(tuple(steps), {0: ("hbm",)}), timeline, policy="by hand")


def test_seventy_layers_measured_stay_under_three_megabytes():
    run = measured(deep(70), slower=1.0373)
    assert len(run.predicted.spans) == 70 * 24 * 5
    text, _ = page_of(run)
    assert len(text.encode()) < 3_000_000
    assert "none was merged" in text
