"""From a split to what is near it and better, by ever smaller changes of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir import Placement
from .choose import Chosen
from .helpers import Helpers, Taken
from .splits import Change, Split, changes, changes_together
from .tries import Tries

FEW = 32  # units


class Descent:
    def __init__(self, tries: Tries, others: Helpers) -> None:
        self._tries, self._others = tries, others
        units = tries.units
        parameter_bytes = sum(unit.parameter_bytes for unit in units)
        self.grain = max(1, round(len(units) / FEW))  # units, of many of which one makes no difference
        self.exchange = round(sum(unit.state_bytes for unit in units) / parameter_bytes) if parameter_bytes else 0  # parameters for one unit's state

    def settled(self, split: Split, best: Chosen) -> tuple[Split, Chosen]:
        """By ever smaller changes of each number, and of two that leave the device as full as it is. One unit of many is a hundredth of the cpu's
        time, and where cpu and link have none left a step is longer by what they are out of balance."""
        step, looked_at = 2 * self.grain, {split}
        while step and not self._tries.is_over():
            before = split
            if self._others:
                split, best = self._best_of_all(split, best, step, looked_at)
            else:
                for change in (*changes(-step, self.exchange), *changes(step, self.exchange)):
                    split, best = self.along(change, split, best, looked_at)
            step = step if split != before else step // 2
        return split, best

    def _best_of_all(self, split: Split, best: Chosen, step: int, looked_at: set[Split]) -> tuple[Split, Chosen]:
        """Of all changes of that size, one with another, at a time."""
        tries = self._tries
        around = [split.changed(change, len(tries.units)) for change in changes_together(step, self.exchange)]
        near = [one for one in dict.fromkeys(around) if one is not None and one not in looked_at and not tries.knows(one, best)]
        asked: list[Split] = []

        def questions() -> Iterator[tuple[Mapping[str, Placement], Taken]]:
            """While others are looked at: whoever knows what updates take looks at all parameters of a model."""
            for one in near:
                if (placed := tries.splits.states(one)) and (taken := tries.takes(placed))[1] <= tries.around.host_bytes:
                    asked.append(one)
                    yield placed, taken

        found = self._others.look(questions(), best)
        looked_at.update(near if found is not None else ())
        before = best
        for one, chosen in zip(asked, found or (), strict=found is not None):
            tries.looked_at(one, before, chosen)
            if chosen is not None and chosen.seconds < best.seconds:
                split, best = one, chosen
        return split, best

    def along(self, change: Change, split: Split, best: Chosen, looked_at: set[Split]) -> tuple[Split, Chosen]:
        """As far as each is better than the one before."""
        while not self._tries.is_over():
            near = split.changed(change, len(self._tries.units))
            if near is None or near in looked_at:
                break
            looked_at.add(near)
            found = self._tries.with_activations_of(near, best)
            if found is None or found.seconds >= best.seconds:
                break
            split, best = near, found
        return split, best
