"""A menu becomes a program. On a GPU: plan on estimates, compile and time what was chosen, plan again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ..errors import InfeasibleBudget
from ..execute.device import Device
from ..ir import Menu, Program
from ..lower import choose, keep_everything
from .lowered import by_policy
from .menus import PreparedMenu, Progress, measured

ROUNDS = 4  # of planning and measuring; the last one plans with what is measured


def program_for(
    prepared: PreparedMenu, policy: str, tiers: Sequence[str], model: nn.Module, device: Device, *, compile: bool, progress: Progress
) -> tuple[PreparedMenu, Program]:
    """The policy's program within the budget of the menu, and the menu with what was measured on the way."""
    if policy == "keep_all":
        return prepared, keep_everything(prepared.menu)
    if policy != "auto":
        return by_policy(model, prepared, policy, device, compile=compile, progress=progress)
    on_gpu = device.torch_device.type == "cuda"
    for round in range(ROUNDS):
        only_measured = on_gpu and round > 0
        try:
            program = choose(_measured_only(prepared.menu) if only_measured else prepared.menu, tiers=tiers).program
        except InfeasibleBudget:
            if not only_measured:
                raise
            program = choose(prepared.menu, tiers=tiers).program  # what was measured needs more than was estimated: other choices are needed
        wanted = _unmeasured(prepared.menu, program) if on_gpu else {}
        if not wanted:
            return prepared, program
        prepared = measured(prepared, model, wanted, device, progress)
        progress("planning")
    return prepared, choose(_measured_only(prepared.menu), tiers=tiers).program


def _measured_only(menu: Menu) -> Menu:
    return replace(menu, choices={region: tuple(choice for choice in found if choice.measured) for region, found in menu.choices.items()})


def _unmeasured(menu: Menu, program: Program) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for call, plan in program.calls.items():
        if not menu.choice(call, plan.choice).measured:
            found.setdefault(menu.problem.graph.calls[call].region, set()).add(plan.choice)
    return found
