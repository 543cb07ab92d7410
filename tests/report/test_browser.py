"""The page in a real browser: it opens without a word of complaint, zooms, follows the pointer and the keys, turns dark, fits a phone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report.chromium import CHROMIUM, Chromium
from report.example_runs import layered, measured, planned

from tierwise.ir import Curve, Run, Span, Timeline
from tierwise.report import render, summarize

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

LANE = '[data-stage="1"] [data-lane="out"] .strip'
SHOWN = "[...document.querySelectorAll('.run')].map((run) => run.hidden)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    runs = [planned("chen"), measured(planned("vdnn")), layered()]
    found = tmp_path_factory.mktemp("page") / "report.html"
    found.write_text(render(runs, summarize(runs)), encoding="utf-8")
    return found


@pytest.fixture
def page(browser, path):
    """The page as a person first sees it, on the second run, which has both timelines."""
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path)
    browser.click("#tab-1")
    yield browser
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()]  # the file itself and nothing else


def ink(page, selector):
    """How many pixels of a canvas are painted, and how many colours they have."""
    return page.js(f"""(() => {{
      const c = document.querySelector({selector!r}), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
      let painted = 0;
      for (let i = 0; i < d.length; i += 4) if (d[i + 3]) {{ painted++; seen.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); }}
      return [painted / (d.length / 4), seen.size];
    }})()""")


def tip(page):
    return page.js("document.querySelector('.tip').hidden ? null : document.querySelector('.tip').innerText")


def ticks_of(page):
    """A picture of the time axis: it changes when the view does."""
    return page.js("document.querySelector('[data-stage=\"1\"] .axis canvas').toDataURL()")


def test_it_opens_and_draws(page):
    assert page.js(SHOWN) == [True, False, True]
    for canvas in ('[data-stage="1"] [data-memory] canvas', f"{LANE} canvas", '[data-stage="1"] .axis canvas', '[data-stage="1"] .overview canvas'):
        painted, colours = ink(page, canvas)
        assert painted > 0.01 and colours > 1, canvas
    assert page.js("document.querySelectorAll('.pareto circle').length") == 3
    assert page.js("document.querySelectorAll('.silhouettes path').length") == 3


def test_tabs_by_click_and_by_key(page):
    page.click("#tab-0")
    assert page.js(SHOWN) == [False, True, True]
    page.key("ArrowRight")
    assert page.js(SHOWN) == [True, False, True] and page.js("document.activeElement.id") == "tab-1"


def test_hover_says_what_a_span_is(page):
    left, top, width, height = page.box(LANE)
    page.mouse("mouseMoved", left + width * 0.05, top + height * 0.25)
    assert tip(page).splitlines()[:2] == ["batch", "copy of inputs, hbm → dram; predicted"]
    page.mouse("mouseMoved", left + width * 0.05, top + height * 0.75)
    assert tip(page).splitlines()[1].endswith("measured")
    page.mouse("mouseMoved", left + width * 0.7, top + height * 0.25)
    assert tip(page) is None  # nothing is copied out in backward


def test_hover_says_what_memory_holds(page):
    left, top, width, height = page.box('[data-stage="1"] [data-memory]')
    gutter = 164
    page.mouse("mouseMoved", left + gutter + (width - gutter) * (5.5 / 9.9), top + height / 2)  # in the fifth of nine seconds, drawn out by a tenth
    said = tip(page)
    assert said.startswith("hbm at 5.50 s") and "activations" in said and "together" in said and "predicted" in said
    page.click('[data-stage="1"] [data-tier="dram"]')
    left, top, width, height = page.box('[data-stage="1"] [data-memory]')
    page.mouse("mouseMoved", left + gutter + (width - gutter) * 0.5, top + height / 2)
    assert tip(page).startswith("dram at")


def test_zoom_by_wheel_button_and_key_and_back(page):
    whole = ticks_of(page)
    left, top, width, height = page.box(LANE)
    page.mouse("mouseWheel", left + width / 2, top + height / 2, deltaX=0, deltaY=-240, modifiers=2)
    wheel = ticks_of(page)
    assert wheel != whole
    page.drag((left + width * 0.6, top + 5), (left + width * 0.4, top + 5))
    assert ticks_of(page) != wheel  # dragged along
    page.click('[data-stage="1"] [data-zoom="fit"]')
    assert ticks_of(page) == whole
    page.click('[data-stage="1"] [data-zoom="in"]')
    assert ticks_of(page) != whole
    page.js(f"document.querySelector({LANE!r}).focus()")
    page.key("0")
    assert ticks_of(page) == whole
    page.key("+")
    assert ticks_of(page) != whole
    page.key("Escape")
    assert ticks_of(page) == whole


def test_a_wheel_without_ctrl_scrolls_the_page(page):
    whole = ticks_of(page)
    left, top, width, height = page.box(LANE)
    page.mouse("mouseWheel", left + width / 2, top + height / 2, deltaX=0, deltaY=120)
    assert ticks_of(page) == whole


def test_the_overview_chooses_a_stretch(page):
    whole = ticks_of(page)
    left, top, width, _ = page.box('[data-stage="1"] .overview')
    page.drag((left + width * 0.2, top + 10), (left + width * 0.4, top + 10))
    assert ticks_of(page) != whole


def test_a_lane_by_keyboard_speaks(page):
    page.js(f"document.querySelector({LANE!r}).focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "End"):
        page.key(key)
        said.append(page.js("document.querySelector('.status').textContent"))
    assert [words.split(",")[0] for words in said] == ["a0", "a1", "a1", "a1"]
    assert "measured" in said[1] and "predicted" in said[2]
    assert tip(page).splitlines()[0] == "a1"


def test_the_tree_opens_and_closes_by_keyboard(page):
    page.click("#tab-2")
    rows = "[...document.querySelectorAll('#run-2 [data-tree] tbody tr')].filter((row) => !row.hidden).map((row) => row.dataset.key)"
    assert page.js(rows) == [f"/the whole step{key}" for key in ("", "/layers", "/layers/0", "/layers/1")]
    page.js("document.querySelector('#run-2 [data-tree] tbody tr').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.key(key)
    assert page.js("document.activeElement.dataset.key") == "/the whole step/layers/0"
    assert "/the whole step/layers/0/linear" in page.js(rows)
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft"):  # close it, go to its parent, close that
        page.key(key)
    assert page.js(rows) == ["/the whole step", "/the whole step/layers"]


def test_light_and_dark(page, browser, path):
    paper = "getComputedStyle(document.body).backgroundColor"
    light, drawn = page.js(paper), ticks_of(page)
    page.click('[data-theme-choice="dark"]')
    dark = page.js(paper)
    assert dark != light and ticks_of(page) != drawn  # the canvases follow
    page.click('[data-theme-choice="auto"]')
    assert page.js(paper) == light
    browser.requests.clear()
    browser.open(path, dark=True)
    assert page.js(paper) == dark


def test_a_phone(page, browser, path):
    browser.requests.clear()
    browser.open(path, width=375, height=800, scale=2)
    assert page.js("document.documentElement.scrollWidth") == 375  # nothing pushes the page wider
    assert page.js(
        "[...document.querySelectorAll('button')].filter((b) => b.offsetHeight && b.closest('.choice')).every((b) => b.offsetHeight >= 40)"
    )
    painted, _ = ink(page, '[data-stage="0"] [data-memory] canvas')
    assert painted > 0.05


def test_everything_can_be_reached_by_tab(page):
    page.js("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page("dispatchKeyEvent", domain="Input", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(page.js("document.activeElement.getAttribute('class') || document.activeElement.dataset.zoom || document.activeElement.tagName"))
    assert {"skip", "plot", "strip", "in", "scroll"} <= reached


def test_a_measurement_without_memory_leaves_the_prediction_stacked(browser, tmp_path):
    run = measured(planned("vdnn"))
    run = replace(run, measured=replace(run.measured, memory={}))
    (tmp_path / "r.html").write_text(render([run], summarize([run])), encoding="utf-8")
    browser.errors.clear()
    browser.open(tmp_path / "r.html")
    assert browser.js("document.querySelector('[data-timeline=\"0\"]').getAttribute('aria-pressed')") == "true"
    assert browser.js("document.querySelector('[data-legend]').innerText").startswith("at most")
    assert browser.errors == []


def test_what_is_told_apart_by_role_is_stacked(browser, tmp_path):
    """A measurement of what an allocator holds knows one role: the prediction is stacked, and the measurement a line."""
    run = measured(planned("vdnn"))
    run = replace(run, measured=replace(run.measured, memory={"hbm": {"allocated": Curve((0.0, 1.0), (30, 40))}}))
    (tmp_path / "r.html").write_text(render([run], summarize([run])), encoding="utf-8")
    browser.open(tmp_path / "r.html")
    said = browser.js("document.querySelector('[data-legend]').innerText")
    assert "activations" in said and "measured, together" in said and "allocated" not in said


def test_roles_nobody_foresaw_have_a_colour(browser, tmp_path):
    curve = {"hbm": {"odd role": Curve((0.0, 1.0), (3, 5))}}
    run = Run("odd", measured=Timeline(2.0, {"hbm": 5}, (Span(0, "stream 7", -0.5, 3.0),), curve, True))
    (tmp_path / "r.html").write_text(render([run], summarize([run])), encoding="utf-8")
    browser.open(tmp_path / "r.html")
    assert browser.js("getComputedStyle(document.querySelector('[data-legend] .swatch')).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_two_fingers_zoom_on_a_phone(browser, path):
    browser.errors.clear()
    browser.open(path, width=375, height=800, scale=2)
    browser("setTouchEmulationEnabled", domain="Emulation", enabled=True, maxTouchPoints=2)
    left, top, width, height = browser.box('[data-stage="0"] [data-memory]')
    axis = "document.querySelector('[data-stage=\"0\"] .axis canvas').toDataURL()"
    whole = browser.js(axis)

    def fingers(kind, *places):
        points = [{"x": left + width * place, "y": top + height / 2, "id": i} for i, place in enumerate(places)]
        browser("dispatchTouchEvent", domain="Input", type=kind, touchPoints=points)
        browser.settle()

    fingers("touchStart", 0.45, 0.55)
    for apart in (0.1, 0.2, 0.3):
        fingers("touchMove", 0.45 - apart, 0.55 + apart)
    fingers("touchEnd")
    zoomed = browser.js(axis)
    assert zoomed != whole
    fingers("touchStart", 0.7)
    for place in (0.65, 0.5, 0.4):
        fingers("touchMove", place)
    fingers("touchEnd")
    assert browser.js(axis) not in (whole, zoomed)  # one finger moves along
    browser("setTouchEmulationEnabled", domain="Emulation", enabled=False)
    assert browser.errors == []
