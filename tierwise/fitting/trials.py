"""Plans of one shape of step that have run, each with what its step took. A plan made anew must promise to be faster than the fastest of them, and
one that turns out slower gives way to it: measuring never makes a training slower."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Menu, peak_bytes
from ..lower import image, keep_everything
from ..simulate import simulate
from .plan import Plan

PROMISE = 0.98  # of the fastest step measured: what a plan must promise to be worth a change


class Trials:
    def __init__(self) -> None:
        self._ran: list[tuple[float, Plan]] = []
        self.corrections = 0  # how many times a plan was made again with what was measured
        self.settled = False  # nothing changes any more

    def ran(self, plan: Plan, seconds: float) -> None:
        self._ran.append((seconds, plan))

    def fastest(self) -> tuple[float, Plan]:
        """Of those that ran."""
        return min(self._ran, key=lambda ran: ran[0])

    def choose(self, made: Plan) -> Plan:
        """The plan made anew, or the fastest so far."""
        if self._ran and made.predicted.seconds > PROMISE * self.fastest()[0]:
            self.settled = True
            return replace(self.fastest()[1], corrections=self.corrections)
        return replace(made, corrections=self.corrections)


def as_measured(plan: Plan, menu: Menu, corrections: int) -> Plan:
    """The same decisions, predicted with what was measured."""
    made, kept = image(menu, plan.program), image(menu, keep_everything(menu))
    needed = peak_bytes(kept.problem, kept.schedule)[kept.problem.device_tier]
    return replace(
        plan,
        menu=menu,
        image=made,
        predicted=simulate(made.problem, made.schedule),
        keep_all_seconds=simulate(kept.problem.with_budget(max(1, needed)), kept.schedule).seconds,
        corrections=corrections,
    )
