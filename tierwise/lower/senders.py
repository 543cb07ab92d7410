"""Splits with activations that are sent: one to begin with, and what is near it."""

from __future__ import annotations

from dataclasses import replace

from .choose import Chosen
from .descent import Descent
from .splits import Change, Split
from .tries import Tries


class Senders:
    def __init__(self, tries: Tries, descent: Descent) -> None:
        self._tries, self._descent = tries, descent
        self._fits = True  # what was asked for so far

    def near(self, split: Split) -> tuple[Split, Chosen] | None:
        """Where a split of the linear programs does not fit they count on memory that is not there: of it, and of all others, all parameters leave,
        and then as many come back as have room. None: it does not fit even so."""
        self._fits = self._fits and self._tries.barely(split) is not None and self._tries.at(split, (True,)) is not None
        split = split if self._fits else self._with_parameters_back(replace(split, parameters=split.state), split.parameters)
        found = self._tries.tried.get((split, True)) or self._tries.borrowed.get(split)
        if found is None:
            return None
        for step in (2 * self._descent.grain, self._descent.grain):  # what passes through the device has the link, too
            for change in (-step, step):
                split, found = self._descent.along(Change(streamed=change), split, found, set())
        return split, found

    def _with_parameters_back(self, split: Split, fewest: int) -> Split:
        """As few parameters elsewhere as that split's activations leave room for, but more than these."""
        found, most = self._tries.at(split, (True,)), split.parameters
        while found is not None and most - fewest > 1:
            middle = (fewest + most) // 2
            if self._tries.with_activations_of(replace(split, parameters=middle), found) is None:
                fewest = middle
            else:
                most = middle
        return replace(split, parameters=most)
