"""Ops that run outside of regions, timed on the card: a pool's backward, or a convolution of three channels, is far from what a roofline promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..ir import Menu, Phase
from ..profile.ops import op_times

MOST_RECIPES = 32  # the longest ones; the others together are little
LEAST_SECONDS = 1e-5  # by their roofline: shorter ones are launches


def with_ops_outside(menu: Menu, recipes: Mapping[int, Any], card: torch.device, progress: Callable[[str], None] = lambda what: None) -> Menu:
    """The menu with what no choice of a region covers as fast as it is on the card. `recipes`: how ops are called by themselves, by op."""
    graph, device, costs = menu.problem.graph, menu.problem.machine.device.name, menu.problem.costs
    planned = {call.id for call in graph.calls if call.region in menu.choices}
    promised = {
        op.id: costs.op_seconds[op.id, device]
        for op in graph.ops
        if op.phase is not Phase.UPDATE and op.region not in planned and op.id in recipes and (op.id, device) in costs.op_seconds
    }
    alike: dict[str, list[int]] = {}
    for op in sorted(promised, key=lambda op: -promised[op]):
        if promised[op] >= LEAST_SECONDS:
            alike.setdefault(recipes[op].key, []).append(op)
    timed = [op for ops in list(alike.values())[:MOST_RECIPES] for op in ops]
    if not timed:
        return menu
    progress("timing what runs outside of regions")
    taken = op_times({op: recipes[op] for op in timed}, card)
    if card.type == "cuda":
        torch.cuda.empty_cache()  # what the budget caps has what torch keeps for later in it
    seconds = {**costs.op_seconds, **{(op, device): found.device_seconds for op, found in taken.items()}}
    return replace(menu, problem=replace(menu.problem, costs=replace(costs, op_seconds=seconds)))
