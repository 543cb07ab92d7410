"""Splits to begin with: whole numbers of modules near the shares that the linear programs have where they are free to choose.

One module more or less on the cpu is a thirtieth of its time. By how much a step gets longer with it, the linear program knows as well as a simulated
plan, and takes a hundredth of the time; so all numbers near its shares are put in order by it, each with as few parameters elsewhere as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..ir import Menu
from .bound import Best, best_lines, has_own_pace, with_updates
from .choose import with_budget
from .facts import Facts
from .splits import Split, Splits

LESS = {0.0: 2, 0.1: 2, 0.2: 1}  # of the memory, as whole plans know of more that takes some; and how many of the best in it
NEAR = 2  # modules more or fewer
ROUNDED = 1e-6  # what is a whole number
SENDS = 0.02  # of the memory: so much leaves where sending is of use


@dataclass(frozen=True, slots=True)
class Seeds:
    menu: Menu
    splits: Splits
    facts: Facts
    update: str
    held: float  # share of streamed updates whose gradients wait on the device

    def within(self, room: int, is_over: Callable[[], bool] = lambda: False) -> dict[Split, bool]:
        """In so much memory for state and activations, the most promising first, and whether activations are sent in it. If time is over, what
        there is by then."""
        found: dict[Split, bool] = {}
        for less, wanted in LESS.items():
            if found and is_over():
                break
            menu = with_budget(self.menu, max(1, int(room * (1 - less))))
            near = [(best.seconds, number, split, best) for number, (split, best) in enumerate(self._near(menu))]
            for *_, split, best in sorted(near, key=lambda one: one[:2])[:wanted]:
                found.setdefault(split, best.sent_bytes > SENDS * room)
        return found

    def _near(self, menu: Menu) -> list[tuple[Split, Best]]:
        count = len(self.facts.units)
        free = best_lines(menu, self.update, self.facts)[1].best()
        if free is None:
            return []
        away, streamed = (free.on_cpu + free.streamed) * count, free.streamed * count
        if has_own_pace(menu):
            return [(self._split(math.ceil(away - ROUNDED), free.elsewhere, streamed / max(away, ROUNDED)), free)]
        found = []
        for state in _whole(away, count):
            for passing in _whole(streamed, state):
                split = self._split(state, 1.0, passing / max(1, state))
                best = with_updates(menu, self.update, self.facts, *self._updated(split))
                if best is not None:
                    found.append((self._split(state, best.elsewhere, split.streamed), best))
        return found

    def _split(self, state: int, elsewhere: float, streamed: float) -> Split:
        return Split(state, min(state, math.ceil(elsewhere * len(self.facts.units) - ROUNDED)), streamed, self.held)

    def _updated(self, split: Split) -> tuple[float, float]:
        """Of all state, what is updated on the cpu and what passes through the device."""
        states, units = self.splits.states(split) or {}, self.facts.units
        whole = max(1, sum(unit.state_bytes for unit in units))
        parts = {"cpu": 0, "streamed": 0, "device": 0}
        for unit in units:
            if unit.path in states:
                parts[states[unit.path].update] += unit.state_bytes
        return parts["cpu"] / whole, parts["streamed"] / whole


def _whole(number: float, most: int) -> range:
    return range(max(0, math.floor(number) - NEAR + 1), min(most, math.ceil(number) + NEAR - 1) + 1)
