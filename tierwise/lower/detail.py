"""The last choice between programs that look about as fast: each update by itself, as it will be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import InvalidSchedule
from ..ir import Menu, Program, check_schedule
from ..simulate import simulate
from .choose import Chosen, with_budget
from .clock import Clock
from .image import image
from .states import Takes

FINALISTS, MOST_FINALISTS = 2, 12  # besides the best one: at least, and at most if there is time
OTHERS_AHEAD = (1, 3)  # regions before theirs that parameters may be on their way, besides what was planned


def comes_and_goes(program: Program) -> bool:
    """Whether parameters do."""
    return any(place.parameters != "device" for place in program.states.values())


class Detail:
    """`takes`: what whoever runs updates holds on the device for them all the time."""

    def __init__(self, menu: Menu, takes: Takes, clock: Clock) -> None:
        self._menu, self._takes, self._clock = menu, takes, clock

    def first(self, best: Chosen, near: Sequence[Chosen], until: float) -> Chosen:
        """Of the best and those that come near it, which is fastest."""
        found: list[tuple[float, int, Chosen]] = []
        for number, chosen in enumerate([best, *near[:MOST_FINALISTS]] if near else []):
            if number > FINALISTS and self._clock.now() > until:
                break
            if (seconds := self.seconds(chosen.program)) is not None:
                found.append((seconds, number, chosen))
        return min(found)[2] if found else best

    def in_time(self, chosen: Chosen) -> Chosen:
        """The same, with parameters on their way as early as is fastest."""
        if not comes_and_goes(chosen.program):
            return chosen
        programs = [replace(chosen.program, ahead=ahead) for ahead in dict.fromkeys((chosen.program.ahead, *OTHERS_AHEAD))]
        found = [(seconds, number) for number, program in enumerate(programs) if (seconds := self.seconds(program)) is not None]
        return replace(chosen, program=programs[min(found)[1]]) if found else chosen

    def seconds(self, program: Program) -> float | None:
        """None: it does not fit."""
        self._clock.tick()
        passing, _ = self._takes(program.states) if program.states else (0, 0)
        made = image(with_budget(self._menu, self._menu.problem.budget_bytes - passing), program)
        try:
            check_schedule(made.problem, made.schedule)
        except InvalidSchedule:
            return None
        return simulate(made.problem.with_budget(self._menu.problem.budget_bytes), made.schedule).seconds
