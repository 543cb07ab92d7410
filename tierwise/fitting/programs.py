"""A menu becomes a program. On a GPU: plan on estimates, compile and time what was chosen, plan again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from ..errors import InfeasibleBudget
from ..execute.device import Device
from ..ir import Menu, Placement, Program
from ..ir.program import MIN_SENT_BYTES
from ..lower import Chosen, choose_jointly, keep_everything
from .lowered import by_policy
from .menus import PreparedMenu, Progress, measured
from .saved import load_program

ROUNDS = 3  # of planning and measuring
GUESSED_SECONDS = 2.0  # of planning for a device whose times are guesses
WORTH_A_COMPILATION = 1.01  # a plan that promises less than this over what is measured is not worth compiling for


def program_for(
    prepared: PreparedMenu,
    policy: str,
    tiers: Sequence[str],
    model: nn.Module,
    device: Device,
    *,
    compile: bool,
    update: str = "after",
    fixed: Mapping[str, Placement] | None = None,
    takes: Callable[[Mapping[str, Placement]], tuple[int, int]] = lambda states: (0, 0),
    saved: str | os.PathLike[str] | None = None,
    progress: Progress,
) -> tuple[PreparedMenu, Program]:
    """The policy's program within the budget of the menu, and the menu with what was measured on the way. `fixed`: where lasting state already is.
    `saved`: a file with the program, which is taken as it is."""
    choose = partial(choose_jointly, tiers=tiers, update=update, fixed=fixed, takes=takes)
    on_gpu = device.torch_device.type == "cuda"
    if saved is not None:
        program = load_program(os.fspath(saved), prepared.menu)
        return (measured(prepared, model, _unmeasured(prepared.menu, program), device, progress) if on_gpu else prepared), program
    if policy == "keep_all":
        program = keep_everything(prepared.menu)
        return (measured(prepared, model, _unmeasured(prepared.menu, program), device, progress) if on_gpu else prepared), program
    if policy != "auto":
        return by_policy(model, prepared, policy, device, compile=compile, progress=progress, update=update)
    if not on_gpu:
        return prepared, choose(prepared.menu, min_sent_bytes=MIN_SENT_BYTES, seconds=GUESSED_SECONDS).program
    for round in range(ROUNDS):
        best = _chosen(prepared.menu, choose)
        if best is None:  # on estimates; they are careful, so measure before saying that it cannot be done
            wanted = _first_and_last(prepared.menu) if round == 0 else _all_unmeasured(prepared.menu)
            if not wanted:
                break
        else:
            wanted = _unmeasured(prepared.menu, best.program)
            known = _chosen_from_measured(prepared.menu, choose)
            if not wanted or (known is not None and known.seconds <= best.seconds * WORTH_A_COMPILATION):
                return prepared, best.program if known is None else known.program
        prepared = measured(prepared, model, wanted, device, progress)
        progress("planning")
    known = _chosen_from_measured(prepared.menu, choose)
    if known is not None:
        return prepared, known.program
    best_of_all = choose(prepared.menu)
    return measured(prepared, model, _unmeasured(prepared.menu, best_of_all.program), device, progress), best_of_all.program


def _chosen(menu: Menu, choose: Callable[..., Chosen]) -> Chosen | None:
    try:
        return choose(menu)
    except InfeasibleBudget:
        return None


def _chosen_from_measured(menu: Menu, choose: Callable[..., Chosen]) -> Chosen | None:
    """The best program of choices that are measured; None if there is none within the budget."""
    only = replace(menu, choices={region: tuple(choice for choice in found if choice.measured) for region, found in menu.choices.items()})
    if not all(only.choices.values()):
        return None
    try:
        return choose(only, min_sent_bytes=MIN_SENT_BYTES)
    except InfeasibleBudget:
        return None


def _unmeasured(menu: Menu, program: Program) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for call, plan in program.calls.items():
        if not menu.choice(call, plan.choice).measured:
            found.setdefault(menu.problem.graph.calls[call].region, set()).add(plan.choice)
    return found


def _first_and_last(menu: Menu) -> dict[int, set[str]]:
    return _only({region: {found[0].name, found[-1].name} for region, found in menu.choices.items()}, menu)


def _all_unmeasured(menu: Menu) -> dict[int, set[str]]:
    return _only({region: {choice.name for choice in found} for region, found in menu.choices.items()}, menu)


def _only(wanted: dict[int, set[str]], menu: Menu) -> dict[int, set[str]]:
    """Those that are not measured yet."""
    left = {
        region: {choice.name for choice in menu.choices[region] if choice.name in names and not choice.measured} for region, names in wanted.items()
    }
    return {region: names for region, names in left.items() if names}
