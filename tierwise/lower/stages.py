"""The bound of bound.py told call by call, for updates in backward: a line for each moment at which a call begins, instead of two in a step.

A stage is from the beginning of one call of a region to that of the next. Shares of each module's state are updated on the cpu or streamed, in stages
behind its backward and before its next forward; what the cpu has made comes after that; parameters that live elsewhere are there for their backward,
and one call earlier and one later, as they come and go; activations come back before theirs. In every stage the cpu has that stage's time, and the
link that much of its rate. In every stage of backward all of that has room, with gradients that wait on the device: of what is updated there until
backward is over, of what is streamed until its state has come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..ir import Choice, Graph, Menu, Phase, Role
from ..ir.placement import region_of
from ..policies._lasting import PASSING_BYTES
from .bound import Bound, Mix, Terms, best_lines, least_seconds
from .choose import keep_everything
from .facts import Facts, timed, untouched_bytes
from .image import Image, image
from .states import StateUnit, Takes, state_units

MOST = 4000  # modules times stages: beyond that it takes longer than a plan


def least_seconds_by_stages(menu: Menu, update: str = "after", takes: Takes | None = None) -> float:
    """Seconds of a step below which no program of the menu can get within its budget: as least_seconds, and closer, with updates in backward."""
    if update != "backward" or not menu.homes:
        return least_seconds(menu, update, takes)
    menu = _of_whole_regions(menu)
    course = Course.of(menu)
    if not course.windows or len(course.windows) * len(course.stages) > MOST:
        return least_seconds(menu, update, takes)
    return least_seconds(menu, update, takes, partial(_least, course))


def _of_whole_regions(menu: Menu) -> Menu:
    """Without homes of parts: a share of a region is as good as any of its parts."""
    regions = {call.module for call in menu.problem.graph.calls} & menu.homes.keys()
    return replace(menu, homes={path: homes for path, homes in menu.homes.items() if region_of(path, regions) == path})


def _least(course: Course, menu: Menu, update: str, facts: Facts, moved: float = 1.0) -> float:
    def closer(mix: Mix) -> float:
        return Stages(menu, mix, facts, course, moved).least()

    return best_lines(menu, update, facts, moved, closer)[0]


@dataclass(frozen=True, slots=True)
class Stage:
    """From the beginning of a call, or of the step, to that of the next."""

    op: int
    call: int | None
    is_back: bool
    outside_seconds: float  # of the device with what is behind the call
    is_next: bool  # whether nothing is between it and the call before


@dataclass(frozen=True, slots=True)
class Window:
    """Of one module, by stage."""

    complete: int  # in which the first of its gradients is
    streams: int  # from which on its state may be on its way
    updates: tuple[int, ...]  # in which it may be updated
    last: int  # with the op of backward that reads its parameters last
    is_last_call: bool  # which is a call
    waits: bool  # whether an update on the device is behind all of backward
    made_bytes_per_second: float  # of its parameters, by the cpu alone, at least
    waiting: float  # bytes of its gradients for one of its state, at most


@dataclass(frozen=True, slots=True)
class Held:
    """As a call goes back: what is there besides what calls save, parameters and state of modules and gradients that were complete before; and what
    of it nobody touches then."""

    nbytes: int
    idle_bytes: int


@dataclass(frozen=True, slots=True)
class Course:
    """What the lines are made of, by the image of a step that keeps everything."""

    stages: list[Stage]
    windows: list[Window]
    held: dict[int, Held]  # by stage of backward
    choices: dict[int, tuple[Choice, ...]]  # of each call, with seconds

    @classmethod
    def of(cls, menu: Menu) -> Course:
        made, units = image(menu, keep_everything(menu)), state_units(menu.problem.graph, menu.homes)
        stages, stage_of = _stages(made)
        windows, held = _windows(menu, made, units, stages, stage_of), _held(menu, made, units, stages, stage_of)
        return cls(stages, windows, held, {call: timed(menu, made, call) for call in made.coarse.backward})

    @property
    def turn(self) -> int:
        """The stage with which backward's calls begin."""
        return next((number for number, stage in enumerate(self.stages) if stage.is_back), len(self.stages))


def _stages(made: Image) -> tuple[list[Stage], dict[int, int]]:
    """And by op, its stage."""
    graph, seconds, coarse = made.problem.graph, made.problem.device_seconds, made.coarse
    begins = {op: (call, False) for call, op in coarse.forward.items() if call in coarse.backward}
    begins |= {op: (call, True) for call, op in coarse.backward.items()}
    found: list[Stage] = []
    stage_of: dict[int, int] = {}
    before: int | None = None
    for op in graph.ops:
        if op.phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        call, is_back = begins.get(op.id, (None, False))
        if call is not None or not found:
            found.append(Stage(op.id, call, is_back, 0.0, bool(found) and before == found[-1].op and found[-1].call is not None))
        if call is None:
            found[-1] = replace(found[-1], outside_seconds=found[-1].outside_seconds + seconds[op.id])
        stage_of[op.id] = len(found) - 1
        before = op.id
    return found, stage_of


def _gradients(graph: Graph, unit: StateUnit) -> list[str]:
    return [graph.storages[s].name for op in unit.updates for s in graph.ops[op].reads if not graph.storages[s].lasting]


def _windows(menu: Menu, made: Image, units: Sequence[StateUnit], stages: Sequence[Stage], stage_of: dict[int, int]) -> list[Window]:
    graph, fine, count = made.problem.graph, menu.problem.graph, len(stages)
    numbered = {storage.name: storage.id for storage in graph.storages}
    last_op = max(stage_of)
    found = []
    for unit in units:
        uses = [[op for op in graph.uses[numbered[fine.storages[s].name]] if op in stage_of] for s in unit.parameters]
        gradients = [numbered[name] for name in _gradients(fine, unit)]
        written = [[op for op in graph.writers[s] if op in stage_of] for s in gradients]
        if not all(uses) or not gradients or not all(written):
            return []
        first, done, last = max(ops[0] for ops in uses), min(ops[-1] for ops in written), min(ops[-1] for ops in uses)
        needed, complete = stage_of[first], stage_of[done]
        before = needed if stages[needed].op == first else needed + 1
        may = tuple(range(count)) if needed == complete else (*range(complete, count), *range(before))
        waits = all(graph.uses[s][-1] > last_op for s in gradients)
        is_call = stages[stage_of[last]].op == last
        found.append(Window(complete, complete, may, stage_of[last], is_call, waits, _made_bytes_per_second(menu, unit), _waiting(fine, unit)))
    return [replace(window, streams=_on_its_way(number, units, found)) for number, window in enumerate(found)]


def _on_its_way(number: int, units: Sequence[StateUnit], windows: Sequence[Window]) -> int:
    """As early as the one before it is complete; or one before that, as long as what lies between is little."""
    before = sorted((window.complete, unit.state_bytes) for window, unit in zip(windows, units, strict=True) if unit is not units[number])
    at, nbytes = windows[number].complete, 0
    for complete, size in reversed([one for one in before if one[0] <= at]):
        at, nbytes = complete, nbytes + size
        if nbytes > PASSING_BYTES:
            break
    return at


def _made_bytes_per_second(menu: Menu, unit: StateUnit) -> float:
    graph, costs = menu.problem.graph, menu.problem.costs.op_seconds
    rates = []
    for op in unit.updates:
        made = {*graph.ops[op].mutates, *graph.ops[op].writes}
        nbytes = sum(graph.storages[s].nbytes for s in made if graph.storages[s].role is Role.PARAM)
        if (cost := costs.get((op, "cpu"), 0.0)) > 0:
            rates.append(nbytes / cost)
    return min(rates, default=0.0)


def _waiting(graph: Graph, unit: StateUnit) -> float:
    shares = []
    for op in unit.updates:
        state = sum(graph.storages[s].nbytes for s in graph.ops[op].mutates if graph.storages[s].role is Role.OPTIMIZER_STATE)
        gradients = sum(graph.storages[s].nbytes for s in graph.ops[op].reads if not graph.storages[s].lasting)
        shares.append(gradients / max(1, state))
    return max(shares)


def _held(menu: Menu, made: Image, units: Sequence[StateUnit], stages: Sequence[Stage], stage_of: dict[int, int]) -> dict[int, Held]:
    graph, coarse = made.problem.graph, made.coarse
    of_units = sum(unit.state_bytes + unit.parameter_bytes for unit in units)
    gradients = {name for unit in units for name in _gradients(menu.problem.graph, unit)}
    written = {s.id: max((op for op in graph.writers[s.id] if op in stage_of), default=None) for s in graph.storages if s.name in gradients}
    found = {}
    for number, stage in enumerate(stages):
        if not stage.is_back:
            continue
        op = graph.ops[stage.op]
        saved = sum(menu.choices[graph.calls[call].region][0].saved_bytes for call, back in coarse.backward.items() if back >= op.id)
        complete = sum(graph.storages[s].nbytes for s, last in written.items() if last is not None and last < op.id)
        nbytes = graph.live_bytes[op.id] - saved - op.workspace_bytes - of_units - complete
        found[number] = Held(nbytes, untouched_bytes(made, op.id, Role.INPUT, Role.GRAD))
    return found


class Stages(Bound):
    """The lines of the bound, and these."""

    def __init__(self, menu: Menu, mix: Mix, facts: Facts, course: Course, moved: float = 1.0) -> None:
        super().__init__(menu, "backward", mix, facts=facts, moved=moved)
        self.mix, self.course = mix, course
        self.lasts = [self._free() for _ in course.stages]
        self.parts = {call: [(self.lines.variable(), choice) for choice in choices] for call, choices in course.choices.items()}
        self.coming: list[Terms] = [{} for _ in course.stages]  # over the link, by stage
        self._compute()
        self._updates()
        self._parameters()
        self._come_back()
        for number in course.held:
            self._room(number)
        for number, terms in enumerate(self.coming):
            self._below({**terms, **{variable: self.in_rate * part for variable, part in self._time(number).items()}}, 0.0)

    def _free(self, most: float = math.inf) -> int:
        return self.lines.variable(upper=most)

    def _equal(self, terms: Terms) -> None:
        self.lines.constrain(terms.items(), lower=0.0, upper=0.0)

    def _time(self, stage: int) -> Terms:
        """Of a stage; updates on the device are behind the last."""
        return {self.lasts[stage]: -1.0} | ({self.rest: -1.0} if stage == len(self.lasts) - 1 else {})

    def _own(self, stage: Stage) -> Terms:
        """Seconds of its call."""
        parts = self.parts[stage.call] if stage.call is not None else ()
        return {part: choice.backward_seconds if stage.is_back else choice.forward_seconds for part, choice in parts}

    def _compute(self) -> None:
        for parts in self.parts.values():
            self.lines.constrain([(part, 1.0) for part, _ in parts], lower=1.0, upper=1.0)
        for variable, stage in zip(self.lasts, self.course.stages, strict=True):
            self._below({**self._own(stage), variable: -1.0}, -stage.outside_seconds)
        self._below({**self.whole, self.rest: 0.0, **dict.fromkeys(self.lasts, 1.0)}, 0.0)

    def _updates(self) -> None:
        """Shares of each module: on the cpu, streamed, and parameters elsewhere."""
        units, costs = self.facts.units, self.menu.problem.costs.op_seconds
        self.on_cpu, self.streamed, self.elsewhere = ([self._free(1.0) for _ in units] for _ in range(3))
        self.streaming: list[dict[int, int]] = []  # of each module by stage: state that comes
        working: list[Terms] = [{} for _ in self.lasts]
        at_once: dict[int, Terms] = defaultdict(dict)  # right behind the call that completes a gradient
        whole = {name: max(1.0, sum(getattr(unit, f"{name}_bytes") for unit in units)) for name in ("state", "parameter")}
        seconds = [sum(costs.get((op, "cpu"), 0.0) for op in unit.updates) for unit in units]
        shares: list[Terms] = [{share: -1.0} for share in self.shares]
        for number, (unit, window) in enumerate(zip(units, self.course.windows, strict=True)):
            on_cpu, streamed, elsewhere = self.on_cpu[number], self.streamed[number], self.elsewhere[number]
            self._below({on_cpu: 1.0, streamed: 1.0}, 1.0)
            shares[0][on_cpu] = seconds[number] / max(self.cpu_seconds, 1e-12)
            shares[1][streamed] = unit.state_bytes / whole["state"]
            shares[2][elsewhere] = unit.parameter_bytes / whole["parameter"]
            work = {stage: self._free() for stage in window.updates}
            made = {stage: self._free() for stage in window.updates}  # parameters that come
            coming = {stage: self._free() for stage in dict.fromkeys((*range(window.streams, window.complete), *window.updates))}
            for stage in window.updates:
                working[stage][work[stage]] = 1.0
                self.coming[stage][made[stage]] = 1.0
            for stage, variable in coming.items():
                self.coming[stage][variable] = self.mix.others_in / self.mix.into
            if len(window.updates) < len(self.lasts):
                at_once[window.complete][work[window.complete]] = 1.0
            self.streaming.append(coming)
            takes, parameters = seconds[number] / self.mix.cpu, self.unit * unit.parameter_bytes
            self._equal({**dict.fromkeys(work.values(), 1.0), on_cpu: -takes})
            self._equal({**dict.fromkeys(coming.values(), 1.0), streamed: -self.unit * unit.state_bytes})
            for share in (on_cpu, elsewhere):
                self._below({**dict.fromkeys(made.values(), -1.0), share: parameters}, 0.0)
            slowest = self.unit * window.made_bytes_per_second * self.mix.cpu
            for place in range(1, len(window.updates)):  # what is updated from a stage on comes from then on
                late = window.updates[place:]
                self._below({**{made[stage]: -1.0 for stage in late}, **{work[stage]: slowest for stage in late}}, 0.0)
        for terms, known in zip(shares, (self.cpu_seconds, whole["state"], whole["parameter"]), strict=True):
            if known > 0:
                self._equal(terms)
        for stage, terms in enumerate(working):
            self._below({**terms, **self._time(stage)}, 0.0)
        for stage, terms in at_once.items():
            self._below({**terms, **self._own(self.course.stages[stage]), self.lasts[stage]: -1.0}, 0.0)

    def _parameters(self) -> None:
        """What of each module is missing as a call goes back, and comes by then."""
        self.missing: dict[tuple[int, int], int] = {}  # by module and stage
        turn, stages = self.course.turn, self.course.stages
        for number, (unit, window) in enumerate(zip(self.facts.units, self.course.windows, strict=True)):
            nbytes = self.unit * unit.parameter_bytes
            there = window.last - int(window.is_last_call and stages[window.last].is_next)
            for stage in range(turn, there):
                self.missing[number, stage] = self._free(nbytes)
                self._below({self.missing[number, stage]: 1.0, self.elsewhere[number]: -nbytes}, 0.0)
            for stage in range(turn, there):
                comes = self._free()
                self.coming[stage][comes] = 1.0
                later = {self.missing[number, stage + 1]: -1.0} if stage + 1 < there else {}
                self._below({self.missing[number, stage]: 1.0, **later, comes: -1.0}, 0.0)

    def _come_back(self) -> None:
        """Activations that left in forward."""
        turn, count = self.course.turn, len(self.lasts)
        self.gone = {stage: self._free() for stage in range(turn, count)}
        for stage, gone in self.gone.items():
            comes = self._free()
            self.coming[stage][comes] = 1.0
            later = {self.gone[stage + 1]: -1.0} if stage + 1 < count else {}
            self._below({gone: 1.0, **later, comes: -1.0}, 0.0)
        if turn < count:
            self._below({self.gone[turn]: 1.0, self.left: -1.0}, 0.0)

    def _room(self, number: int) -> None:
        """As a call goes back."""
        stage, held, unit = self.course.stages[number], self.course.held[number], self.unit
        room = self.menu.problem.budget_bytes - held.nbytes
        terms: Terms = {self.gone[number]: -1.0}
        sent: Terms = {self.gone[number]: 1.0}
        for call in (other.call for other in self.course.stages[number:] if other.call is not None):  # those that have not gone back
            for part, choice in self.parts[call]:
                terms[part] = unit * (choice.saved_bytes + (choice.backward_workspace_bytes or 0) * (call == stage.call))
                if call != stage.call:
                    sent[part] = -unit * choice.saved_bytes
        self._below(sent, unit * held.idle_bytes)
        waits_elsewhere = self._may_wait_elsewhere
        for place, (module, window) in enumerate(zip(self.facts.units, self.course.windows, strict=True)):
            on_cpu, streamed, elsewhere = self.on_cpu[place], self.streamed[place], self.elsewhere[place]
            room -= module.state_bytes + module.parameter_bytes
            terms |= {on_cpu: -unit * module.state_bytes, streamed: -unit * module.state_bytes}
            lingers = stage.is_next and window.is_last_call and window.last == number - 1
            if (place, number) in self.missing:
                terms[self.missing[place, number]] = -1.0
            elif window.last < number and not lingers:
                terms[elsewhere] = -unit * module.parameter_bytes
            if window.complete >= number:
                continue
            gradients = module.gradient_bytes
            if window.waits:  # unless it is updated elsewhere
                room -= gradients
                terms[on_cpu] -= unit * gradients
                terms[streamed] -= unit * gradients
            if module.state_bytes and not waits_elsewhere:  # until the state has come
                terms[streamed] += unit * gradients
                for when, variable in self.streaming[place].items():
                    if window.streams <= when < number:
                        terms[variable] = -window.waiting
        self._below(terms, unit * room)

    @property
    def _may_wait_elsewhere(self) -> bool:
        """Gradients of what is streamed."""
        return any(home.update == "streamed" and home.gradients == "host" for homes in self.menu.homes.values() for home in homes)
