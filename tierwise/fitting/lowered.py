"""Any policy of the zoo on real tensors: it plans the expanded step, and its schedule is lowered to choices of region calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from .. import policies
from ..execute.device import Device
from ..ir import CallPlan, Costs, Menu, Problem, Program
from ..lower import Expanded, clustered, expand, lower
from ..lower.lasting import homes_in
from ..profile.roofline import fused_costs, roofline_costs
from ..regions import option_saving
from ..regions.compiled import compile_option
from .menus import PreparedMenu, Progress, RegionCode, estimated_choices, measured


def by_policy(
    model: nn.Module, prepared: PreparedMenu, policy: str, device: Device, *, compile: bool, progress: Progress, update: str = "after", **options: Any
) -> tuple[PreparedMenu, Program]:
    """The policy's program, and the menu with the choices it needs. update: when updates of state that is elsewhere run; the loop's affair."""
    joints = {region: code.joint for region, code in prepared.regions.items()}
    expanded = expand(prepared.menu.problem.graph, joints)
    problem = expanded_problem(prepared.menu, expanded, compile=compile)
    schedule = policies.plan(problem, policy, **options)
    lowered = lower(problem, expanded, schedule)
    graph = prepared.menu.problem.graph
    regions, choices, calls = dict(prepared.regions), dict(prepared.menu.choices), {}
    for region, code in prepared.regions.items():
        mine = {call: values for call, values in lowered.saved.items() if graph.calls[call].region == region}
        sizes = {value.name: value.nbytes for value in code.joint.values}
        sets = clustered(mine, sizes)
        named = _options(code, policy, set(sets.values()))
        regions[region] = replace(
            code,
            options={option.name: option for option in named.values()},
            code={
                option.name: code.code.get(option.name)
                or compile_option(type(model.get_submodule(code.example)).forward, option, compile=compile, donate=False)
                for option in named.values()
            },
        )
        found = estimated_choices(regions[region], region, prepared.menu.problem)
        choices[region] = tuple(sorted(found, key=lambda choice: -choice.saved_bytes))
        for call, values in sets.items():
            option, plan = named[values], lowered.plans[call]
            there = {value.name for value in next(choice for choice in found if choice.name == option.name).saved}
            sent = tuple(name for name in plan.sent if name in there or name == "inputs")
            calls[call] = replace(plan, choice=option.name, sent=sent) if sent else CallPlan(option.name)
    notes = (*prepared.notes, *lowered.notes)
    made = PreparedMenu(Menu(prepared.menu.problem, choices, prepared.menu.homes), regions, notes, prepared.at_hand, prepared.elsewhere)
    if device.torch_device.type == "cuda":
        made = measured(made, model, {region: set(code.options) for region, code in regions.items()}, device, progress)
    return made, Program(calls, policy, states=homes_in(problem, schedule, prepared.menu.homes, update), update=update)


def expanded_problem(menu: Menu, expanded: Expanded, *, compile: bool) -> Problem:
    """Ops inside regions share out what the region's first choice takes, by their rooflines."""
    machine = menu.problem.machine
    device = machine.device.name
    seconds = dict((fused_costs if compile else roofline_costs)(expanded.graph, machine).op_seconds)
    for op, fine in expanded.source.items():
        for processor in machine.processors:
            if (fine, processor.name) in menu.problem.costs.op_seconds:
                seconds[op, processor.name] = menu.problem.costs.op_seconds[fine, processor.name]
    for call, ops in expanded.forward.items():
        first = menu.choices[expanded.graph.calls[call].region][0]
        total = sum(seconds[op, device] for op in ops)
        for op in ops:
            seconds[op, device] *= first.forward_seconds / total if total else 0.0
        seconds[expanded.backward[call], device] = first.backward_seconds
    return Problem(expanded.graph, machine, Costs(seconds))


def _options(code: RegionCode, policy: str, sets: set[frozenset[str]]) -> dict[frozenset[str], Any]:
    known = {frozenset(option.saved): option for option in code.options.values()}
    found = {}
    for number, values in enumerate(sorted(sets, key=lambda values: (-len(values), sorted(values)))):
        option = option_saving(code.joint, sorted(values), name=f"{policy}-{number}")
        found[values] = known.get(frozenset(option.saved), option)
    return found
