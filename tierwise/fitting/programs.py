"""A menu becomes a program. On a GPU: plan on estimates, compile and time what was chosen, plan again."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import InfeasibleBudget
from ..execute.device import Device
from ..ir import Menu, Placement, Program
from ..ir.program import MIN_SENT_BYTES
from ..lower import Chosen, choose_jointly, keep_everything
from ..lower.choose import hull
from ..lower.states import Takes
from .lowered import by_policy
from .menus import PreparedMenu, Progress, measured
from .saved import load_program

ROUNDS = 3  # of planning and measuring
PLAN_SECONDS = 10.0  # of planning in all, not counting what is compiled and timed
FIRST_SHARE, LAST_SHARE = 0.05, 0.6  # of these, for each plan that only says what to measure, and at least for the one that will run
GUESSED_SECONDS = 2.0  # of planning for a device whose times are guesses
MANY_COMPILATIONS, MANY_ELSEWHERE = 8, 16  # at once; more where other processes help
MOST_FURTHER_SECONDS = 10.0  # of compiling and timing after the first round: who waits for the first step has waited for that one already
WORTH_COMPILING, WORTH_A_COMPILATION = 0.01, 0.005  # of a step: what a plan must promise over what is measured, at least and for each compilation


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
    known: Program | None = None,
    takes: Takes = lambda states: (0, 0),
    saved: str | os.PathLike[str] | None = None,
    plan_seconds: float = PLAN_SECONDS,
    progress: Progress,
) -> tuple[PreparedMenu, Program]:
    """The policy's program within the budget of the menu, and the menu with what was measured on the way. `fixed`: where lasting state already is.
    `known`: one that runs, and is to be beaten. `saved`: a file with the program, which is taken as it is."""
    choose = _Timed(partial(choose_jointly, tiers=tiers, update=update, fixed=fixed, takes=takes), plan_seconds)
    on_gpu = device.torch_device.type == "cuda"
    if saved is not None or policy == "keep_all":
        program = keep_everything(prepared.menu) if saved is None else load_program(os.fspath(saved), prepared.menu)
        return (measured(prepared, model, _unmeasured(prepared.menu, program), device, progress) if on_gpu else prepared), program
    if policy != "auto":
        return by_policy(model, prepared, policy, device, compile=compile, progress=progress, update=update)
    if not on_gpu:
        return prepared, choose.thoroughly(prepared.menu, min(plan_seconds, GUESSED_SECONDS), known=known).program
    seconds_each = 0.0  # of compiling and timing a choice
    for round in range(ROUNDS):
        best = choose.quickly(prepared.menu)
        if best is None:  # on estimates; they are careful, so measure before saying that it cannot be done: first what saves least
            wanted = _last(prepared.menu) if round == 0 else _all_unmeasured(prepared.menu)
        else:
            many = MANY_ELSEWHERE if prepared.elsewhere is not None and prepared.elsewhere.is_running else MANY_COMPILATIONS
            wanted = _most_used(_unmeasured(prepared.menu, best.program), prepared.menu, best.program, many)
            if best.program.states and round == 0:
                wanted = _and_lighter(wanted, prepared.menu, best.program)
            at_hand = choose.quickly(measured_only(prepared.menu)) if wanted else None
            count = sum(map(len, wanted.values()))
            worth = max(WORTH_COMPILING, WORTH_A_COMPILATION * count)
            if at_hand is not None and (at_hand.seconds <= best.seconds * (1 + worth) or seconds_each * count > MOST_FURTHER_SECONDS):
                break
        if not wanted:
            break
        began = time.monotonic()
        prepared = measured(prepared, model, wanted, device, progress)
        seconds_each = (time.monotonic() - began) / sum(map(len, wanted.values()))
        progress("planning")
    try:
        return prepared, choose.thoroughly(measured_only(prepared.menu), known=known).program
    except InfeasibleBudget:
        best_of_all = choose.thoroughly(prepared.menu)
    return measured(prepared, model, _unmeasured(prepared.menu, best_of_all.program), device, progress), best_of_all.program


class _Timed:
    """A planner with so many seconds in all: a little for plans that say what to measure, the rest for the one that will run."""

    def __init__(self, choose: Callable[..., Chosen], seconds: float) -> None:
        self._choose, self._left, self._first, self._last = choose, seconds, FIRST_SHARE * seconds, LAST_SHARE * seconds

    def quickly(self, menu: Menu) -> Chosen | None:
        """None if there is none within the budget, or nothing to choose from."""
        try:
            return self._within(menu, self._first, explained=False, detailed=False)
        except InfeasibleBudget:
            return None

    def thoroughly(self, menu: Menu, seconds: float | None = None, known: Program | None = None) -> Chosen:
        return self._within(menu, max(self._last, self._left) if seconds is None else seconds, known=known)

    def _within(self, menu: Menu, seconds: float, **options: Any) -> Chosen:
        if not all(menu.choices.values()):
            raise InfeasibleBudget("a region has no choice")
        began = time.monotonic()
        try:
            return self._choose(menu, min_sent_bytes=MIN_SENT_BYTES, seconds=seconds, **options)
        finally:
            self._left -= time.monotonic() - began


def measured_only(menu: Menu) -> Menu:
    return replace(menu, choices={region: tuple(choice for choice in found if choice.measured) for region, found in menu.choices.items()})


def _unmeasured(menu: Menu, program: Program) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for call, plan in program.calls.items():
        if not menu.choice(call, plan.choice).measured:
            found.setdefault(menu.problem.graph.calls[call].region, set()).add(plan.choice)
    return found


def _most_used(wanted: dict[int, set[str]], menu: Menu, program: Program, many: int) -> dict[int, set[str]]:
    """Where they are many, of each class the one that most calls use: what else is worth its compilation is asked for again."""
    if sum(map(len, wanted.values())) <= many:
        return wanted
    calls = Counter((menu.problem.graph.calls[call].region, plan.choice) for call, plan in program.calls.items())
    return {region: {max(sorted(names), key=lambda name: calls[region, name])} for region, names in wanted.items()}


def _and_lighter(wanted: dict[int, set[str]], menu: Menu, program: Program) -> dict[int, set[str]]:
    """Also what saves a little less than most calls of a class do: how much memory lasting state leaves to activations a quick plan knows roughly,
    and the one that will run has only what was measured."""
    graph, found = menu.problem.graph, {region: set(names) for region, names in wanted.items()}
    for region, choices in menu.choices.items():
        used = Counter(plan.choice for call, plan in program.calls.items() if graph.calls[call].region == region)
        if used and used.total() > 1:
            saved = menu.choice(next(call.id for call in graph.calls if call.region == region), used.most_common(1)[0][0]).saved_bytes
            lighter = [choice for choice in hull(choices) if choice.saved_bytes < saved][:1]
            found.setdefault(region, set()).update(choice.name for choice in lighter)
    return _only(found, menu)


def _last(menu: Menu) -> dict[int, set[str]]:
    return _only({region: {found[-1].name} for region, found in menu.choices.items()}, menu)


def _all_unmeasured(menu: Menu) -> dict[int, set[str]]:
    return _only({region: {choice.name for choice in found} for region, found in menu.choices.items()}, menu)


def _only(wanted: dict[int, set[str]], menu: Menu) -> dict[int, set[str]]:
    """Those that are not measured yet."""
    left = {
        region: {choice.name for choice in menu.choices[region] if choice.name in names and not choice.measured} for region, names in wanted.items()
    }
    return {region: names for region, names in left.items() if names}
