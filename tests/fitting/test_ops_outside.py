"""Ops outside of regions take what they take on the device."""

from __future__ import annotations

import torch
from fitting.test_states import batch, model_and_optimizer
from fitting.training import fitting

from tierwise.capture.recipes import recipe_of
from tierwise.fitting import ops_outside
from tierwise.profile.taken import Taken


def test_the_longest_ops_outside_of_regions_are_timed_and_no_others(monkeypatch):
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1200KiB") as found:
        found.prepare((), batch(0))
        (menu,) = (prepared.menu for prepared in found._menus.values())
    graph, costs = menu.problem.graph, menu.problem.costs.op_seconds
    recipes = {op.id: recipe_of(torch.ops.aten.add.Tensor, (torch.empty(op.id % 2 + 1, 4), 1.0), {}) for op in graph.ops}
    asked = {}

    def op_times(recipes, card):
        asked.update(recipes)
        return {op: Taken(7.0, 0.5) for op in recipes if op != max(recipes)}  # one that cannot be run by itself

    monkeypatch.setattr(ops_outside, "op_times", op_times)
    monkeypatch.setattr(ops_outside, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(ops_outside, "MOST_RECIPES", 1)
    after = ops_outside.with_ops_outside(menu, recipes, torch.device("cpu")).problem.costs.op_seconds
    planned = {call.id for call in graph.calls if call.region in menu.choices}
    inside = {op.id for op in graph.ops if op.region in planned}
    assert asked and inside and len({recipe.key for recipe in asked.values()}) == 1 and not inside & asked.keys()
    assert {op for op, _ in costs if after[op, "gpu"] != costs[op, "gpu"]} == asked.keys() - {max(asked)}
    assert all(after[op, "gpu"] == 7.0 for op in asked.keys() - {max(asked)})
