"""Plans of one shape of step that have run, each with what its step took. A plan made anew must promise to be faster than the fastest of them, and
one that turns out slower gives way to it: measuring never makes a training slower."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..ir import Machine, Menu, Timeline
from ..lower import image, keeping_everything, with_budget
from ..simulate import simulate
from ..units import format_seconds
from .feedback import MOST_CORRECTIONS, NOTICED, corrected, is_cpu_off, is_off
from .plan import Plan

_log = logging.getLogger("tierwise")
FAR = 1.08  # times what no plan could beat: a plan that takes more, and was not as far from that before it was measured, is made again
PROMISE = 0.98  # of the fastest step measured: what a plan must promise to be worth a change


class Trials:
    def __init__(self, alone: Machine | None = None) -> None:
        self._ran: list[tuple[float, Plan]] = []
        self.corrections = 0  # how many times a plan was made again with what was measured
        self.settled = False  # nothing changes any more
        self._alone = alone  # the machine before anything was learned in steps

    def look(
        self,
        plan: Plan,
        taken_seconds: float,
        measured: Timeline | None,
        may_run: Callable[[Plan], bool],
        cpu_seconds: float | None = None,
        least_seconds: Callable[[Menu], float] | None = None,
    ) -> Plan | None:
        """What a step by a plan takes: the plan to go on with, or None if it is to be made again. `measured`: one that was recorded, if they take
        something else than predicted. `may_run`: whether an earlier plan still can. `cpu_seconds`: of the CPU with its updates. `least_seconds`:
        what no plan could beat, if being far from it is to count."""
        looked_at, why = plan, ""
        if measured is not None:
            looked_at = as_measured(plan, corrected(plan, measured, taken_seconds, cpu_seconds, self._alone), self.corrections)
            if self.corrections < MOST_CORRECTIONS:
                why = _why_again(plan, looked_at, taken_seconds, cpu_seconds, least_seconds)
        self.ran(looked_at, taken_seconds)
        if why:
            self.corrections += 1
            _log.warning("%s: planned again with what was measured", why)
            return None
        self.settled = True
        seconds, fastest = self.fastest()
        if seconds < PROMISE * taken_seconds and may_run(fastest):
            _log.warning("a step takes %s, and %s by an earlier plan: back to that", format_seconds(taken_seconds), format_seconds(seconds))
            return self._with_what_is_known(fastest, looked_at.menu)
        return looked_at

    @property
    def has_run(self) -> bool:
        """Whether any plan has."""
        return bool(self._ran)

    @property
    def menu(self) -> Menu:
        """With what was measured last, for the next plan."""
        return self._ran[-1][1].menu

    def ran(self, plan: Plan, seconds: float) -> None:
        self._ran.append((seconds, plan))

    def fastest(self) -> tuple[float, Plan]:
        """Of those that ran."""
        return min(self._ran, key=lambda ran: ran[0])

    def choose(self, made: Plan) -> Plan:
        """The plan made anew, or the fastest so far, which is looked at once more: what was measured last may have been a moment of somebody else's,
        and then what it is predicted to take now is as wrong as it was before."""
        if self._ran and made.predicted.seconds > PROMISE * self.fastest()[0]:
            self.settled = self.corrections >= MOST_CORRECTIONS
            return self._with_what_is_known(self.fastest()[1], made.menu)
        return replace(made, corrections=self.corrections)

    def _with_what_is_known(self, plan: Plan, menu: Menu) -> Plan:
        """An earlier plan, predicted with what was measured since."""
        return as_measured(plan, with_budget(menu, plan.menu.problem.budget_bytes), self.corrections)


def _why_again(plan: Plan, looked_at: Plan, taken_seconds: float, cpu_seconds: float | None, least_seconds: Callable[[Menu], float] | None) -> str:
    """What is wrong with a plan, if it is enough to make it again."""
    taken, predicted = format_seconds(taken_seconds), plan.predicted
    if is_off(predicted, taken_seconds):
        return f"a step takes {taken} where {format_seconds(predicted.seconds)} were predicted"
    if cpu_seconds is not None and is_cpu_off(predicted, cpu_seconds):
        planned_seconds = predicted.busy_seconds()["cpu"]
        return f"updates on the CPU take {format_seconds(cpu_seconds)} where {format_seconds(planned_seconds)} were predicted"
    if least_seconds is None or (far := taken_seconds / least_seconds(looked_at.menu)) <= FAR:
        return ""
    was = predicted.seconds / least_seconds(plan.menu)
    return f"a step takes {taken}, {far - 1:.0%} more than no plan could beat" if far > (1 + NOTICED) * was else ""


def as_measured(plan: Plan, menu: Menu, corrections: int) -> Plan:
    """The same decisions, predicted with what was measured."""
    made, (kept_seconds, _) = image(menu, plan.program), keeping_everything(menu)
    return replace(
        plan,
        menu=menu,
        image=made,
        predicted=simulate(made.problem, made.schedule),
        keep_all_seconds=kept_seconds,
        corrections=corrections,
    )
