"""A process that plans for another one (helpers.py): `python -m tierwise.lower.helper`, told by pickles on stdin, answers on stdout,
of which the first says that it has started.

("menu", Lesson)                  what the next ones are about; no answer
("activations", chosen)           what is planned for activations, from now on; no answer
("states", states, taken)         the answer: what these come to with them, where so much is taken; None if that does not fit
("glance", split, taken)           the answer: it, or the nearest lighter one that fits, and about its seconds; None if none does
("split", (split, sends), taken)   the answer: what is planned for it, with activations that are sent or without; None if nothing fits
("sending", split, taken)         the answer: a split near it with activations that are sent, and what was planned for it; None if there is none
("program", program, taken)        the answer: its seconds with each update by itself; None if it does not fit
("drawn", (program, than), taken)  the answer: the same, and by a rough look; None if it does not fit, or is no better

`taken`: bytes of the device that updates hold all the time, and of host memory in all.
"""

from __future__ import annotations

import math
import pickle
import sys
from functools import cached_property
from typing import Any, BinaryIO

from ..ir import Placement, Program
from .around import Around
from .choose import Chosen
from .clock import Clock, no_search_for_garbage
from .descent import Descent
from .detail import Detail, Looked
from .helpers import Helpers, Lesson
from .looks import Looks
from .senders import Senders
from .splits import Split, Splits
from .states import state_units
from .tries import Tries


class _Planner:
    """Who knows a menu; `taken` is that of the question at hand."""

    def __init__(self, lesson: Lesson) -> None:
        self.lesson, self.taken = lesson, (0, 0)
        self.chosen: Chosen | None = None
        self.units = state_units(lesson.menu.problem.graph, lesson.menu.homes)
        self.clock = Clock(counts=True)
        self.around = Around(lesson.menu, self.units, lesson.when, lesson.tiers, lesson.min_sent_bytes, lambda states: self.taken, self.clock)

    def states(self, states: dict[str, Placement]) -> Chosen | None:
        assert self.chosen is not None
        return self.around.with_activations_of(states, self.chosen)

    def glance(self, split: Split) -> tuple[Split, float] | None:
        found = self._looks.at(split)
        return None if found is None else (found, self._looks.seconds[found])

    def split(self, split_and_way: tuple[Split, bool]) -> Chosen | None:
        split, sends = split_and_way
        return self._tries.at(split, (sends,))

    def sending(self, split: Split) -> tuple[Split, Chosen] | None:
        return self._senders.near(split)

    def program(self, program: Program) -> float | None:
        return self._detail.seconds(program)

    def drawn(self, program_and_than: tuple[Program, Looked]) -> Looked | None:
        return self._detail.better(*program_and_than)

    @cached_property
    def _detail(self) -> Detail:
        return Detail(self.lesson.whole, lambda states: self.taken, self.clock, compact=self.lesson.menu)

    @cached_property
    def _splits(self) -> Splits:
        return Splits(self.lesson.menu, self.units, self.around.lacks, self.lesson.when.update)

    @cached_property
    def _looks(self) -> Looks:
        return Looks(self.lesson.menu, self.units, self._splits, self.lesson.when, self.around.takes)

    @cached_property
    def _tries(self) -> Tries:
        around = self.around
        return Tries(self.lesson.menu, self.units, around, self._splits, self.lesson.tiers, around.takes, self.clock, math.inf)

    @cached_property
    def _senders(self) -> Senders:
        return Senders(self._tries, Descent(self._tries, Helpers(0)))


def serve(told: BinaryIO, answers: BinaryIO) -> None:
    planner: Any = None
    _say(None, answers)  # which says that it has started
    while True:
        try:
            kind, what, *taken = pickle.load(told)
        except EOFError:  # nobody asks any more
            return
        if kind == "menu":
            planner = _Planner(what)
        elif kind == "activations":
            planner.chosen = what
        else:
            (planner.taken,) = taken
            _say(getattr(planner, kind)(what), answers)


def _say(what: Any, answers: BinaryIO) -> None:
    pickle.dump(what, answers)
    answers.flush()


if __name__ == "__main__":
    with no_search_for_garbage():
        serve(sys.stdin.buffer, sys.stdout.buffer)
