"""From a program to faster ones near it by changes that are drawn: another home for one module's state, or for all parts of a region, two modules' or
regions' homes exchanged, a little more or less saved by a call, or two of these at once. If the step takes hardly longer with all calls saving as
little as they can, it begins there: where cpu and link decide, room on the device is for state.

Four numbers that say how much lives where (splits.py) leave open which modules these are, and a step whose cpu, link and device are all busy depends
on that: one change in ten to twenty is better, by up to a hundredth each, and no rule says which. So many are drawn as there is time for, each from
the best so far, and looked at as they will be predicted (detail.py); others look at several at a time. A number that begins anew with every search
draws them, so that two searches with as many tries are equal.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..ir import INPUTS, ON_DEVICE, CallPlan, Menu, Placement, Program
from ..ir.placement import region_of, stated
from .choose import Chosen
from .clock import Clock
from .detail import Detail, Looked, comes_and_goes
from .helpers import Helpers
from .states import state_units

HOMES, EXCHANGES, CHOICES = 0.3, 0.2, 0.2  # of all changes: in a full device most other homes do not fit, and exchanges always do
REGIONS, REGION_EXCHANGES = 0.12, 0.13  # and of all parts of a region at once: compute waits for all of them, so one alone may gain nothing
WAITS = 0.05  # and of when parameters come, or how many gradients wait: there are few of these
MOST_AHEAD, MOST_IN_FLIGHT = 3, 8  # regions
TWO_AT_ONCE = 0.25  # of the time: where one more of something asks for less of another
DRAWS_EACH = 5  # for each thing that could be changed: if so many are no better, one after another, no more are drawn
LEAST_GAIN = 1e-6  # of the time
AS_FAST = 1.005  # of the time with more saved by calls: what that leaves of the device is worth more, once it is used
AT_A_TIME_SECONDS = 2.0  # of others' work; less than whoever waits for them has patience for


class _Best:
    """And those before it, with what was found to be better than they are and has not been tried with it."""

    def __init__(self, program: Program, looked: Looked, paths: Sequence[str]) -> None:
        self.program, self.looked, self._paths = program, looked, paths
        self.draws = 0  # since it was found
        self.before = {looked: program}
        self.again: deque[Program] = deque()

    def heard(self, program: Program, than: Looked, looked: Looked | None) -> None:
        """Of what was drawn from the best at that time, how long it takes if that is less."""
        if looked is None or looked.seconds > (1 - LEAST_GAIN) * than.seconds:
            return
        if than != self.looked:
            self.again.append(_on_top(self.program, program, self.before[than], self._paths))
        if looked < self.looked:
            self.program, self.looked, self.draws = program, looked, 0
            self.before[looked] = program


class Chance:
    def __init__(self, menu: Menu, detail: Detail, clock: Clock, others: Helpers) -> None:
        self._menu, self._detail, self._clock, self._others = menu, detail, clock, others
        self._random = random.Random(0)
        units = state_units(menu.problem.graph, menu.homes)
        self._paths = [unit.path for unit in units]
        self._weights = [unit.state_bytes + unit.parameter_bytes for unit in units]  # what weighs next to nothing makes no difference
        regions = {call.module for call in menu.problem.graph.calls}
        of_region: dict[str, list[str]] = {}
        for path in self._paths:
            of_region.setdefault(region_of(path, regions), []).append(path)
        self._alone = {path: [path] for path in self._paths}
        self._parts = {path: of_region[region_of(path, regions)] for path in self._paths}  # with all others of its region
        self._calls = [call.id for call in menu.problem.graph.calls if len(menu.choices.get(call.region, ())) > 1]

    def better(self, chosen: Chosen, until: float) -> Chosen:
        """The best that was found by then."""
        may = chosen.program.states and any(self._weights) and self._clock.now() < until
        looked = self._detail.looked(chosen.program) if may else None
        if looked is None:
            return chosen
        best = _Best(chosen.program, looked, self._paths)
        lean, almost = self._lean(chosen.program), Looked(*(AS_FAST * seconds for seconds in looked))
        if lean != chosen.program and (lean_looked := self._detail.better(lean, almost)) is not None:
            best = _Best(lean, lean_looked, self._paths)
        while self._clock.now() < until and not self._is_settled(best):
            if self._others:
                self._look_together(best, min(until, self._clock.now() + AT_A_TIME_SECONDS))
            elif (program := next(self._draws(best, until), None)) is not None:
                best.heard(program, best.looked, self._detail.better(program, best.looked))
        return self._detail.predicted(best.program) if best.looked < looked else chosen

    def _look_together(self, best: _Best, until: float) -> None:
        """What updates take is about the same wherever most of them run, and finding it out keeps others waiting for the next draw: so it is asked of
        what is better only."""
        taken = self._detail.taken(best.program)

        def heard(program: Program, than: Looked, looked: Looked | None) -> None:
            if looked is not None and not self._detail.takes_no_more(program, taken):
                looked = self._detail.better(program, than)
            best.heard(program, than, looked)

        self._others.hear(((program, best.looked, taken) for program in self._draws(best, until)), heard)

    def _is_settled(self, best: _Best) -> bool:
        return best.draws > DRAWS_EACH * (len(self._paths) + len(self._calls))

    def _draws(self, best: _Best, until: float) -> Iterator[Program]:
        """Each from what is the best by then; what others found to be better than one before it comes on top of it."""
        while self._clock.now() < until and not self._is_settled(best):
            best.draws += 1
            program = best.again.popleft() if best.again else self._drawn(best.program)
            if program.states and program != best.program:
                yield program

    def _drawn(self, program: Program) -> Program:
        for _ in range(1 + (self._random.random() < TWO_AT_ONCE)):
            program = self._changed(program)
        return program

    def _lean(self, program: Program) -> Program:
        """With everything made again that can be."""
        calls = dict(program.calls)
        for call in self._calls:
            if call in calls:
                calls[call] = self._choosing(calls[call], call, -1)
        return replace(program, calls=calls)

    # -- changes ------------------------------------------------------------------------------------------------------------------------

    def _changed(self, program: Program) -> Program:
        kinds: dict[Callable[[Program], Program], float] = {
            partial(self._another_home, self._alone): HOMES,
            partial(self._exchange, self._alone): EXCHANGES,
        }
        if self._parts != self._alone:
            kinds |= {partial(self._another_home, self._parts): REGIONS, partial(self._exchange, self._parts): REGION_EXCHANGES}
        kinds |= {self._another_choice: CHOICES} if self._calls else {}
        kinds |= {self._another_wait: WAITS}
        (change,) = self._random.choices([*kinds], [*kinds.values()])
        return change(program)

    def _some(self, groups: Mapping[str, Sequence[str]]) -> Sequence[str]:
        """Of the groups that paths are in, one."""
        return groups[self._random.choices(self._paths, self._weights)[0]]

    def _homes(self, path: str, program: Program) -> list[Placement]:
        """Without the disk, unless something is there already."""
        has_disk = any("nvme" in (place.state, place.parameters) for place in program.states.values())
        return [home for home in self._menu.homes[path] if has_disk or "nvme" not in (home.state, home.parameters)]

    def _another_home(self, groups: Mapping[str, Sequence[str]], program: Program) -> Program:
        """One that not all of a group have."""
        paths = self._some(groups)
        there = {program.states.get(path, ON_DEVICE) for path in paths}
        others = [home for path in paths for home in self._homes(path, program) if there != {home}]
        if not others:
            return program
        home = self._random.choice(others)
        return _with_homes(program, {path: home for path in paths if home in self._menu.homes[path]}, self._paths)

    def _exchange(self, groups: Mapping[str, Sequence[str]], program: Program) -> Program:
        """Between two groups cut alike."""
        one, other = self._some(groups), self._some(groups)
        if len(one) != len(other):
            return program
        moved = {to: program.states.get(of, ON_DEVICE) for to, of in (*zip(one, other, strict=True), *zip(other, one, strict=True))}
        return _with_homes(program, moved, self._paths) if all(home in self._menu.homes[path] for path, home in moved.items()) else program

    def _another_choice(self, program: Program) -> Program:
        """The next one that saves more, or less."""
        call = self._random.choice(self._calls)
        if call not in program.calls:
            return program
        choices, plan = self._menu.choices[self._menu.problem.graph.calls[call].region], program.calls[call]
        place = [choice.name for choice in choices].index(plan.choice) + self._random.choice((-1, 1))
        if not 0 <= place < len(choices):
            return program
        return replace(program, calls={**program.calls, call: self._choosing(plan, call, place)})

    def _another_wait(self, program: Program) -> Program:
        """Parameters one region earlier or later, or gradients of one region more or fewer that wait."""
        change = self._random.choice((-1, 1))
        if self._random.random() < 0.5 and comes_and_goes(program):
            return replace(program, ahead=min(max(program.ahead + change, 1), MOST_AHEAD))
        return replace(program, in_flight=min(max(program.in_flight + change, 1), MOST_IN_FLIGHT))

    def _choosing(self, plan: CallPlan, call: int, place: int) -> CallPlan:
        """Another of its choices, of what is saved then the same is sent."""
        choice = self._menu.choices[self._menu.problem.graph.calls[call].region][place]
        saved = {INPUTS, *(value.name for value in choice.saved)}
        return replace(plan, choice=choice.name, sent=tuple(name for name in plan.sent if name in saved))


def _on_top(best: Program, changed: Program, given: Program, paths: Sequence[str]) -> Program:
    """The best one with what was changed in the given one."""
    moved = {path: home for path in paths if (home := changed.states.get(path, ON_DEVICE)) != given.states.get(path, ON_DEVICE)}
    calls = {call: plan for call, plan in changed.calls.items() if plan != given.calls[call]}
    ahead = changed.ahead if changed.ahead != given.ahead else best.ahead
    in_flight = changed.in_flight if changed.in_flight != given.in_flight else best.in_flight
    return _with_homes(replace(best, calls={**best.calls, **calls}, ahead=ahead, in_flight=in_flight), moved, paths)


def _with_homes(program: Program, homes: dict[str, Placement], paths: Sequence[str]) -> Program:
    """Of all paths, so that a part stays where it is when the rest of its region moves."""
    return replace(program, states=stated({**{path: program.states.get(path, ON_DEVICE) for path in paths}, **homes}))
