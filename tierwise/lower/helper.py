"""A process that looks at placements for another one (helpers.py): `python -m tierwise.lower.helper`, told by pickles on stdin, answers on stdout.

("menu", menu, update, ahead)     what the next ones are about; no answer
("activations", chosen)           what is planned for activations, from now on; no answer
("states", states, passing)       the answer: what these come to with them, on a device that has so many bytes less; None if that does not fit
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, BinaryIO

from .around import Around
from .clock import Clock
from .states import state_units


def serve(told: BinaryIO, answers: BinaryIO) -> None:
    around: Around | None = None
    chosen: Any = None
    taken = [0]  # of the device, all the time
    while True:
        try:
            kind, *what = pickle.load(told)
        except EOFError:  # nobody asks any more
            return
        if kind == "menu":
            menu, update, ahead = what
            units = state_units(menu.problem.graph, menu.homes)
            around = Around(menu, units, update, (), 0, lambda states: (taken[0], 0), Clock(counts=True), ahead)
        elif kind == "activations":
            (chosen,) = what
        else:
            assert around is not None
            states, taken[0] = what
            pickle.dump(around.with_activations_of(states, chosen), answers)
            answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
