"""The last choice between programs that look about as fast: each update by itself, as it will be predicted, and as it would be on a host that is
slower than it was measured to be, as hosts are that others use, too. Of two plans that promise the same, the better one leaves everybody some
time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from ..errors import InvalidSchedule
from ..ir import Menu, Problem, Program, Schedule, check_schedule
from ..simulate import step_seconds
from .choose import Chosen, predicted
from .clock import Clock
from .helpers import Helpers, Taken
from .image import Image, image, with_lasting
from .states import BESIDE, Takes

FINALISTS, MOST_FINALISTS = 1, 6  # besides the best one: at least, and at most if there is time
SLOWER = 0.92  # of its rates: what one host has less of than another of its kind, or than a moment ago
CROWDED = 1.03  # such steps took 6 to 19% longer than first predicted (an H200, 3.2 G in 8 and 12 GB, three times), more than most
OTHERS_AHEAD = (1, 3)  # regions before theirs that parameters may be on their way, besides what was planned
OTHERS_IN_FLIGHT = (1, 2, 4, 6)  # regions whose gradients may wait on the device, likewise
PERIODS = 2  # of a step, the first without what one before it left to be done: as long as all that follow, in each of 293 that were looked at
FEW = 2  # activations that are looked at by turns: those of the best program, and of one that has others
AMPLE = 1 << 50  # bytes of a device
AS_GOOD = 1.0005  # of the best by a rough look: of what is better in detail nearly all is, of what is not one in five


class Looked(NamedTuple):
    """Seconds of a program."""

    seconds: float
    roughly: float = math.inf  # with updates of a module at once, on this host


def comes_and_goes(program: Program) -> bool:
    """Whether parameters do."""
    return any(place.parameters != "device" for place in program.states.values())


def streams(program: Program) -> bool:
    """Whether state passes through the device."""
    return any(place.update == "streamed" for place in program.states.values())


class Detail:
    """`takes`: what whoever runs updates holds on the device for them all the time. `others`: who may look at several at a time. `compact`: the menu
    as rough looks have it, which take less than half as long."""

    def __init__(self, menu: Menu, takes: Takes, clock: Clock, others: Helpers | None = None, compact: Menu | None = None) -> None:
        self._menu, self._takes, self._clock, self._others = menu, takes, clock, others
        self._rough = None if compact is None else Detail(compact, takes, clock)
        self._known: list[tuple[Program, float | None]] = []
        self._bare: list[tuple[Program, Image]] = []  # of the last few, without lasting state

    def first(self, best: Chosen, near: Sequence[Chosen], until: float) -> Chosen:
        """Of the best and those that come near it, which is fastest."""
        found: list[tuple[float, int, Chosen]] = []
        finalists = [best, *near[:MOST_FINALISTS]] if near else []
        self._look([chosen.program for chosen in finalists])
        for number, chosen in enumerate(finalists):
            if number > FINALISTS and self._clock.now() > until and not self._others:
                break
            if (seconds := self.seconds(chosen.program)) is not None:
                found.append((seconds, number, chosen))
        return min(found)[2] if found else best

    def where_they_come_anyway(self, chosen: Chosen, until: float) -> Chosen:
        """The same, with parameters in host memory that the cpu updates and sends in every step: those of the last such module, or of all of them. On
        the device they come as soon as they are made, and others wait; from there they come in time."""
        states = chosen.program.states
        made_there = [path for path, place in states.items() if (place.update, place.parameters) == ("cpu", "device")]
        there = {path: home for path in made_there if (home := replace(states[path], parameters="host")) in self._menu.homes[path]}
        if not there:
            return chosen
        programs = [replace(chosen.program, states={**states, **moved}) for moved in ({}, dict([*there.items()][-1:]), there)]
        return self._fastest(chosen, programs, until)

    def in_time(self, chosen: Chosen, until: float) -> Chosen:
        """The same, with parameters on their way as early, and with gradients of as many regions that wait, as is fastest."""
        if comes_and_goes(chosen.program):
            programs = [replace(chosen.program, ahead=ahead) for ahead in dict.fromkeys((chosen.program.ahead, *OTHERS_AHEAD))]
            chosen = self._fastest(chosen, programs, until)
        if streams(chosen.program):
            programs = [replace(chosen.program, in_flight=some) for some in dict.fromkeys((chosen.program.in_flight, *OTHERS_IN_FLIGHT))]
            chosen = self._fastest(chosen, programs, until)
        return chosen

    def faster(self, chosen: Chosen, known: Program) -> Chosen:
        """The known one, where it fits and takes less."""
        seconds, least = self.seconds(known), self.seconds(chosen.program)
        return self.predicted(known) if seconds is not None and (least is None or seconds < least) else chosen

    def _fastest(self, chosen: Chosen, programs: Sequence[Program], until: float) -> Chosen:
        """Of as many as there is time for."""
        if self._clock.now() > until:
            return chosen
        found: list[tuple[float, int]] = []
        self._look(programs)
        for number, program in enumerate(programs):
            if number and self._clock.now() > until and self._found(program) is None:
                break
            if (seconds := self.seconds(program)) is not None:
                found.append((seconds, number))
        return replace(chosen, program=programs[min(found)[1]]) if found else chosen

    def _look(self, programs: Sequence[Program]) -> None:
        """At all of them at a time, if there is somebody to do it."""
        unknown = [program for program in programs if self._found(program) is None]
        if self._others and len(unknown) > 1:
            found = self._others.seconds((program, self.taken(program)) for program in unknown)
            self._known += zip(unknown, found, strict=True) if found is not None else ()

    def taken(self, program: Program) -> Taken:
        return self._takes(program.states) if program.states else (0, 0)

    def takes_no_more(self, program: Program, taken: Taken) -> bool:
        """Than that of the device, and than there is of host memory."""
        device_bytes, host_bytes = self.taken(program)
        return device_bytes <= taken[0] and host_bytes <= self._menu.problem.machine.capacity("dram")

    def seconds(self, program: Program) -> float | None:
        """Between what it takes on this host and on a slower one. None: it does not fit."""
        if (found := self._found(program)) is None:
            self._clock.tick()
            found = program, self._seconds_if_below(program)
            self._known.append(found)
        return found[1]

    def _found(self, program: Program) -> tuple[Program, float | None] | None:
        """What is known of it."""
        return next((known for known in self._known if known[0] == program), None)

    def better(self, program: Program, than: Looked) -> Looked | None:
        """Of one that is drawn. Most are no better, as a rough look finds."""
        self._clock.tick()
        return self._looked(program, than)

    def looked(self, program: Program) -> Looked | None:
        """Roughly, too."""
        return self._looked(program, Looked(math.inf))

    def _looked(self, program: Program, than: Looked) -> Looked | None:
        roughly = math.inf
        if self._rough is not None:
            ready = self._rough._fitting(program, than.roughly * AS_GOOD)
            if ready is None or (roughly := _seconds(*ready, program)) > than.roughly * AS_GOOD:
                return None
        seconds = self._seconds_if_below(program, than.seconds)
        return None if seconds is None else Looked(seconds, roughly)

    def _seconds_if_below(self, program: Program, most: float = math.inf) -> float | None:
        """Between what it takes on this host and on a slower one. None: it does not fit, or takes at least so many."""
        ready = self._fitting(program)
        if ready is None or (seconds := _seconds(*ready, program)) >= most:  # on a slower host it takes longer still
            return None
        problem, schedule = ready
        seconds = mean((seconds, _seconds(_slower(problem), schedule, program)))
        return seconds if seconds < most else None

    def _fitting(self, program: Program, most: float = math.inf) -> tuple[Problem, Schedule] | None:
        """What it comes to, with the room there is while it runs; None: it does not fit, or takes more in any memory, which is found out sooner."""
        if self.taken(program)[1] > self._menu.problem.machine.capacity("dram"):
            return None
        made = self._image(program)
        try:
            if most < math.inf and _seconds(made.problem.with_budget(AMPLE), made.schedule, program) > most:
                return None
            check_schedule(made.problem, made.schedule)
        except InvalidSchedule:
            return None
        return made.problem.with_budget(self._menu.problem.budget_bytes), made.schedule

    def truly(self, chosen: Chosen) -> Chosen:
        """The same with what it comes to in detail, if it fits so."""
        return chosen if self.seconds(chosen.program) is None else self.predicted(chosen.program)

    def predicted(self, program: Program) -> Chosen:
        """What it comes to, of one that fits."""
        return predicted(self._image(program), self._menu.problem.budget_bytes)

    def _image(self, program: Program) -> Image:
        bare, budget_bytes = self._alone(program), self._menu.problem.budget_bytes - self.taken(program)[0]
        within = replace(bare, problem=bare.problem.with_budget(budget_bytes))
        return with_lasting(within, program.states, program.when)

    def _alone(self, program: Program) -> Image:
        """What is planned for activations, with all state in place."""
        alone = replace(program, states={}, ahead=1, in_flight=1)
        found = next((made for other, made in self._bare if other == alone), None)
        if found is None:
            found = image(self._menu, alone)
            self._bare = [(alone, found), *self._bare[: FEW - 1]]
        return found


def _seconds(problem: Problem, schedule: Schedule, program: Program) -> float:
    return step_seconds(problem, schedule, PERIODS) * (CROWDED if _is_crowded(program) else 1.0)


def _is_crowded(program: Program) -> bool:
    """Whether all that can be on its way in is: state, parameters and activations."""
    return streams(program) and comes_and_goes(program) and program.sends


def _slower(problem: Problem) -> Problem:
    """The same on a host with less of everything but its device."""
    ends = {problem.device_tier, "dram"}
    machine = problem.machine.with_rates(lambda link, _, rate: rate * SLOWER if {link.src, link.dst} == ends else rate)
    return replace(problem, machine=machine, costs=problem.costs.slowed(1 / SLOWER, "cpu", BESIDE))
