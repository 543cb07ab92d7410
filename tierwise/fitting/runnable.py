"""A program as what the session runs: for each call of a region its code, and what it does with what that saves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ..execute.passes import RegionPlan
from ..ir import Menu, Program, peak_bytes
from ..ir.program import MIN_SENT_BYTES
from ..lower import Image, image
from ..regions.compiled import CompiledOption
from .menus import PreparedMenu


def region_plans(prepared: PreparedMenu, program: Program) -> dict[tuple[str, int], RegionPlan]:
    """By module and how many times it was called before; what is outside of regions under no module's name."""
    graph, calls = prepared.menu.problem.graph, program.calls
    times: dict[str, int] = {}
    found: dict[tuple[str, int], RegionPlan] = {}
    for call in graph.calls:
        time = times[call.module] = times.get(call.module, -1) + 1
        if call.id not in calls:
            continue
        code = prepared.regions[call.region]
        plan = calls[call.id]
        saved = prepared.menu.choice(call.id, plan.choice).saved
        sends_all = bool(plan.sent) and all(value.name in plan.sent for value in saved if value.nbytes >= MIN_SENT_BYTES)
        found[call.module, time] = RegionPlan(code.code[plan.choice], plan, tuple(value.name for value in saved), call.id, sends_all)
    return found | {("", gap): RegionPlan(_nothing, plan) for gap, plan in program.outside.items()}


def sent_bytes(menu: Menu, made: Image) -> dict[str, int]:
    """What activations take below the device."""
    if made.program.states:
        made = image(menu, replace(made.program, states={}))
    return peak_bytes(made.problem, made.schedule)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is outside of regions is the model's own code."""


def kept(prepared: PreparedMenu, calls: Collection[int]) -> dict[str, CompiledOption]:
    """By module, the code of the choice that saves the most."""
    graph = prepared.menu.problem.graph
    first = {region: code.code[prepared.menu.choices[region][0].name] for region, code in prepared.regions.items()}
    return {graph.calls[call].module: first[graph.calls[call].region] for call in calls}
