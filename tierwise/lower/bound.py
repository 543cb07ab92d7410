"""What no program of a menu can beat in its memory: a linear program over shares of calls, of bytes that leave, and of state that lives elsewhere.

A step is forward, backward and the updates behind it. As forward turns to backward, every call's saved values are somewhere: as a choice that saves
less and computes more; below the device, where forward's part of the link has carried them and from where backward's brings them; or there. So they
are when the first of the calls that are most alike goes back, whose own are there, with its workspace, its parameters and those of the next one. Each
part lasts at least as long as its compute; what the link carries each way, and what the cpu updates, fits into the step, and with updates after
backward into what is not backward. No module is updated between its forward and its backward, so that around the turn the cpu has nothing to do. How
fast both are depends on how they share the updates: a linear program for each range of that, of which the one with the least time is divided again.
What host memory has no room for is on the disk, which reads and writes it once in a step. Shares of a call and perfect overlap make all of that
easier than it is.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir import ON_DEVICE, Choice, Menu, Phase, Placement, Role
from ..policies._milp import Program
from .choose import hull, keep_everything, with_budget
from .image import Image, image
from .states import OTHERS_AFTER, StateUnit, shares, state_units, streaming_seconds

BUDGET = 10.0  # what the budget is in the linear program, where bytes shall be of the size of seconds
NARROW = 1 / 64  # a range of how updates are shared that is not divided again
SPANS = 4  # modules that are asked how long nothing is updated: those for which that is longest
LOOKS, SAFE = 8, 1.001  # rates that are looked at in a range; and what may be between these
Terms = dict[int, float]
Takes = Callable[[Mapping[str, Placement]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Mix:
    """Of the seconds that all updates elsewhere would take alone, between these shares are the cpu's. Then the cpu has at most this part of its rate,
    and the link these of its own, either way, for state and for others."""

    least: float
    most: float
    cpu: float = 1.0
    out: float = 1.0
    into: float = 1.0
    others_out: float = 1.0
    others_in: float = 1.0


def mix_between(least: float, most: float, update: str) -> Mix:
    found = [shares(part, 1 - part, update) for part in (least + (most - least) * look / LOOKS for look in range(LOOKS + 1))]
    cpu, out, into = (SAFE * max(rates) for rates in zip(*found, strict=True))
    others = OTHERS_AFTER if update == "after" else 0.0
    return Mix(least, most, cpu, out, into, max(out, others), max(into, others))


def least_seconds(menu: Menu, update: str = "after", takes: Takes | None = None) -> float:
    """Seconds of a step below which no program of the menu can get within its budget; infinite if none fits by this count. `takes`: what whoever runs
    updates holds on the device for them all the time."""
    facts = Facts.of(menu)
    if takes is None or not facts.units:
        return _least_seconds(menu, update, facts)
    # Modules of one size, of which most state is. Whoever moves one of them has that much less memory; who moves none moves little.
    state = Counter[int]()
    for unit in facts.units:
        state[unit.parameter_bytes] += unit.state_bytes
    size, nbytes = state.most_common(1)[0]
    alike = [(unit.path, home) for unit in facts.units if unit.parameter_bytes == size for home in menu.homes[unit.path] if home != ON_DEVICE]
    least = min((takes({path: home})[0] for path, home in alike), default=0)
    lighter = with_budget(menu, max(1, menu.problem.budget_bytes - least))
    some = _least_seconds(lighter, update, facts)
    return min(some, _least_seconds(menu, update, facts, moved=1 - nbytes / max(1, state.total()))) if least else some


def _least_seconds(menu: Menu, update: str, facts: Facts, moved: float = 1.0) -> float:
    """With so much of the state elsewhere at most."""
    homes = [home for found in menu.homes.values() for home in found]
    alone = Bound(menu, update, facts=facts, moved=moved)
    if any(home.state == "nvme" for home in homes) or all(home.update == "device" for home in homes):
        return alone.least()  # updates of what comes from a disk have their own pace
    on_cpu, streamed, _ = alone.shares
    nowhere_else = alone.lines.solve(fixed={on_cpu: 0.0, streamed: 0.0}).objective
    ranges = [(0.0, 0.0, 1.0)]  # by what is promised, the whole first
    while ranges[0][0] < nowhere_else:
        promised, least, most = heapq.heappop(ranges)
        if most - least <= NARROW:
            return promised
        middle = (least + most) / 2
        for part in ((least, middle), (middle, most)):
            heapq.heappush(ranges, (Bound(menu, update, mix_between(*part, update), facts=facts, moved=moved).least(), *part))
    return nowhere_else


@dataclass(frozen=True, slots=True)
class Facts:
    """What the lines are made of, by a step that keeps everything."""

    units: list[StateUnit]
    outside: dict[Phase, float]
    turn: tuple[int, int, int]
    back: tuple[int, int, int]
    classes: list[tuple[int, tuple[Choice, ...], int]]
    spans: list[tuple[float, float]]

    @classmethod
    def of(cls, menu: Menu) -> Facts:
        made = image(menu, keep_everything(menu))
        units = state_units(menu.problem.graph, menu.homes)
        return cls(
            units, _outside_seconds(menu, made), _at_the_turn(menu, made), _going_back(menu, made), _classes(menu, made), _spans(menu, made, units)
        )


class Bound:
    """The lines, each as its name says, with the three parts of the step in seconds and everything else in parts of the budget or shares. Without a
    mix the machine has its rates whoever is beside."""

    def __init__(self, menu: Menu, update: str, mix: Mix | None = None, *, facts: Facts | None = None, moved: float = 1.0) -> None:
        self.menu, self.lines, self.facts = menu, Program(), facts or Facts.of(menu)
        self.unit = BUDGET / max(1, menu.problem.budget_bytes)
        self.forward, self.backward, self.rest = (self.lines.variable(upper=math.inf, cost=1.0) for _ in range(3))
        self.whole: Terms = dict.fromkeys((self.forward, self.backward, self.rest), -1.0)
        self.not_backward: Terms = {self.forward: -1.0, self.rest: -1.0}
        machine, device, parts = menu.problem.machine, menu.problem.device_tier, mix or Mix(0.0, 1.0)
        self.out_rate = self.unit * parts.others_out * max((link.bytes_per_second for link in machine.links if link.src == device), default=0.0)
        self.in_rate = self.unit * parts.others_in * max((link.bytes_per_second for link in machine.links if link.dst == device), default=0.0)
        self.memory: Terms = {}  # at the turn
        self.back: Terms = {}  # as a call goes back
        self.compute: dict[Phase, Terms] = {Phase.FORWARD: {self.forward: -1.0}, Phase.BACKWARD: {self.backward: -1.0}}
        self.left = self._activations()
        self._states(update, parts, moved)
        if mix is not None:
            self._share(mix)
        for phase, terms in self.compute.items():
            self._below(terms, -self.facts.outside[phase])

    def least(self) -> float:
        return self.lines.solve().objective

    def best_shares(self) -> tuple[float, float, float] | None:
        """In the least time, of the state: on the cpu, streamed; and of the parameters: elsewhere. None: nothing fits."""
        found = self.lines.solve()
        if not math.isfinite(found.objective):
            return None
        on_cpu, streamed, elsewhere = (found.values[share] for share in self.shares)
        return on_cpu, streamed, elsewhere

    def with_shares(self, on_cpu: float, streamed: float, elsewhere: float) -> float:
        """The same with so much of the state updated there, and so much of the parameters elsewhere; infinite if that cannot be."""
        return self.lines.solve(fixed=dict(zip(self.shares, (on_cpu, streamed, elsewhere), strict=True))).objective

    def _below(self, terms: Terms, limit: float) -> None:
        self.lines.constrain(terms.items(), upper=limit)

    def _activations(self) -> int:
        """Choices and what leaves; the variable of that."""
        lines = self.lines
        held, activations, saved = (self.unit * nbytes for nbytes in self.facts.turn)
        self.held = held
        left = lines.variable(upper=activations + saved)
        still = lines.variable(upper=activations + saved)  # of this, as that call goes back, whose own is there
        self.memory[left] = self.back[still] = -1.0
        of_saved: Terms = {left: 1.0}
        of_others: Terms = {still: 1.0}
        for count, choices, when in self.facts.classes:
            parts = [lines.variable(upper=count) for _ in choices]
            lines.constrain([(part, 1.0) for part in parts], lower=count, upper=count)
            for part, choice in zip(parts, choices, strict=True):
                self.compute[Phase.FORWARD][part], self.compute[Phase.BACKWARD][part] = choice.forward_seconds, choice.backward_seconds
                self.memory[part], of_saved[part] = self.unit * choice.saved_bytes, -self.unit * choice.saved_bytes
                of_others[part] = -self.unit * choice.saved_bytes * (when > 0)
                self.back[part] = self.unit * ((when >= 0) * choice.saved_bytes + (when == 0) * (choice.backward_workspace_bytes or 0))
        self._below(of_saved, activations)  # what left was there: saved, or held besides
        self._below(of_others, self.unit * self.facts.back[2])
        self._below({still: 1.0, left: -1.0}, 0.0)
        self._below({left: 1.0, self.forward: -self.out_rate}, 0.0)
        return left

    def _states(self, update: str, parts: Mix, moved: float) -> None:
        """Shares of all lasting state: updated on the cpu, streamed, and parameters that live elsewhere; of the state at most so much."""
        menu, lines, problem = self.menu, self.lines, self.menu.problem
        units, homes = self.facts.units, [home for found in menu.homes.values() for home in found]
        state, gradients = self.unit * sum(unit.state_bytes for unit in units), self.unit * sum(unit.gradient_bytes for unit in units)
        parameters = self.unit * sum(unit.parameter_bytes for unit in units)
        self.cpu_seconds = sum(problem.costs.op_seconds.get((op, "cpu"), 0.0) for unit in units for op in unit.updates)
        updating = sum(problem.costs.op_seconds[op, problem.machine.device.name] for unit in units for op in unit.updates)
        on_cpu = lines.variable(upper=float(any(home.update == "cpu" for home in homes)))
        streamed = lines.variable(upper=float(any(home.update == "streamed" for home in homes)))
        elsewhere = lines.variable(upper=float(any(home.parameters != "device" for home in homes)))
        self.shares = on_cpu, streamed, elsewhere
        self._below({on_cpu: 1.0, streamed: 1.0}, moved)
        budget = self.unit * problem.budget_bytes
        self._below({**self.memory, on_cpu: -state, streamed: -state, elsewhere: -parameters}, budget - self.held)
        held, running, _ = (self.unit * nbytes for nbytes in self.facts.back)
        away = lines.variable(upper=parameters - running)  # what the call that runs reads is there, and what the next one will
        self._below({away: 1.0, elsewhere: -parameters}, 0.0)
        self._below({**self.back, on_cpu: -state, streamed: -state, away: -1.0}, budget - held)
        self._on_disk({on_cpu: state, streamed: state, elsewhere: parameters})
        self._below({self.rest: -1.0, on_cpu: -updating, streamed: -updating}, -updating - self.facts.outside[Phase.UPDATE])
        goes, comes = state * parts.others_out / parts.out, state * parts.others_in / parts.into  # as long as so many bytes of others
        self._carried({self.left: 1.0, on_cpu: gradients, streamed: goes}, self.whole, self.out_rate)
        self._carried({self.left: 1.0, streamed: comes, elsewhere: 2 * parameters}, self.whole, self.in_rate)
        # What the cpu has made comes, be it for the next forward or for good; and what lives elsewhere once more, for backward.
        self._carried({self.left: 1.0, on_cpu: parameters, elsewhere: parameters, streamed: comes}, self.whole, self.in_rate)
        self._carried({self.left: 1.0, elsewhere: parameters}, {self.backward: -1.0}, self.in_rate)
        self._below({on_cpu: self.cpu_seconds / parts.cpu, **self.whole}, 0.0)
        if update == "after":  # nothing is updated before all gradients are there, and all of it before the next backward
            self._below({on_cpu: self.cpu_seconds / parts.cpu, **self.not_backward}, 0.0)
            self._carried({self.left: 1.0, streamed: goes}, self.not_backward, self.out_rate)
            self._carried({streamed: comes}, self.not_backward, self.in_rate)
        else:  # an update beside backward takes its time from it
            self.compute[Phase.BACKWARD][streamed] = updating
            for later, seconds in self.facts.spans:  # and none is under way from its module's forward to its backward
                self._below({on_cpu: self.cpu_seconds / parts.cpu, **self.whole}, later / parts.cpu - seconds)

    def _on_disk(self, below: Terms) -> None:
        """Of what lives below the device, host memory has so much, and the rest is read and written in every step."""
        machine = self.menu.problem.machine
        ways = [machine.link_between.get(way) for way in (("nvme", "dram"), ("dram", "nvme"))]
        known = [link for link in ways if link is not None]
        disk = self.lines.variable(upper=self.unit * machine.capacity("nvme") if len(known) == 2 else 0.0)
        if "dram" in machine.tier_named:
            self._below({**below, disk: -1.0}, self.unit * machine.capacity("dram"))
        for lane in sorted({lane for link in known for lane in link.lanes}):
            busy = sum(1 / (self.unit * link.lanes[lane]) for link in known if lane in link.lanes)
            self._below({disk: busy, **self.whole}, 0.0)

    def _share(self, mix: Mix) -> None:
        problem = self.menu.problem
        stream_seconds = sum(streaming_seconds(problem, problem.graph.ops[op]) for unit in self.facts.units for op in unit.updates)
        on_cpu, streamed, _ = self.shares
        self._below({on_cpu: (mix.least - 1) * self.cpu_seconds, streamed: mix.least * stream_seconds}, 0.0)
        self._below({on_cpu: (1 - mix.most) * self.cpu_seconds, streamed: -mix.most * stream_seconds}, 0.0)

    def _carried(self, terms: Terms, part: Terms, rate: float) -> None:
        """So much fits through the link in a part of the step."""
        self._below({**terms, **{variable: rate * seconds for variable, seconds in part.items()}}, 0.0)


def _at_the_turn(menu: Menu, made: Image) -> tuple[int, int, int]:
    """Bytes held besides what calls save, at the fullest moment when every call has saved and none has gone back; of these, activations; and what
    calls save at most."""
    graph, coarse = made.problem.graph, made.coarse
    both = [call for call in coarse.forward if call in coarse.backward]
    saved = sum(menu.choices[graph.calls[call].region][0].saved_bytes for call in both)
    first, last = max((coarse.forward[call] for call in both), default=-1), min((coarse.backward[call] for call in both), default=len(graph.ops))
    between = range(first + 1, last) or range(max(first, 0), max(first, 0) + 1)
    calls = {*coarse.forward.values(), *coarse.backward.values()}
    held = {op: graph.live_bytes[op] - saved - (graph.ops[op].workspace_bytes if op in calls else 0) for op in between}
    turn = max(held, key=held.__getitem__)
    lasting = sum(storage.nbytes for storage in graph.storages if storage.lasting or storage.role is Role.INPUT)
    return held[turn], max(0, held[turn] - lasting), saved


def _calls_back(made: Image) -> tuple[list[int], int]:
    """Calls in the order in which they go back, and the place of the first one of those that are most alike."""
    backward = made.coarse.backward
    both = sorted((call for call in made.coarse.forward if call in backward), key=backward.__getitem__)
    regions = [made.problem.graph.calls[call].region for call in both]
    counts = Counter(regions)
    return both, regions.index(max(counts, key=counts.__getitem__)) if both else 0


def _going_back(menu: Menu, made: Image) -> tuple[int, int, int]:
    """Bytes held besides what calls save as that one goes back, without its workspace; of parameters that it reads and that come for the next one;
    and of what is held besides that it does not touch."""
    graph, (calls, place) = made.problem.graph, _calls_back(made)
    if not calls:
        return 0, 0, 0
    op = made.coarse.backward[calls[place]]
    saved = sum(menu.choices[graph.calls[call].region][0].saved_bytes for call in calls[place:])
    read = {storage for call in calls[place : place + 2] for storage in graph.ops[made.coarse.backward[call]].reads}
    running = sum(unit.parameter_bytes for unit in state_units(graph, menu.homes) if read & {*unit.parameters})
    of_calls = {*made.coarse.saved.values()}
    idle = [s for s in graph.storages if not s.lasting and s.id not in of_calls and (uses := graph.uses[s.id]) and uses[0] < op < uses[-1]]
    untouched = sum(s.nbytes for s in idle if op not in graph.uses[s.id] and s.role is not Role.INPUT)
    return graph.live_bytes[op] - saved - graph.ops[op].workspace_bytes, running, untouched


def _classes(menu: Menu, made: Image) -> list[tuple[int, tuple[Choice, ...], int]]:
    """How many calls a class has, its choices worth having, with the seconds of the step's ops where a choice has none, and whether they go back
    before a certain one (-1), are it (0), or come after it (1)."""
    calls, place = _calls_back(made)
    seconds, coarse, graph = made.problem.device_seconds, made.coarse, made.problem.graph
    counts = Counter((graph.calls[call].region, (number > place) - (number < place)) for number, call in enumerate(calls))
    own = {graph.calls[call].region: (seconds[coarse.forward[call]], seconds[coarse.backward[call]]) for call in calls}
    found = []
    for (region, when), count in counts.items():
        there, back = own[region]
        timed = tuple(choice if choice.seconds else replace(choice, forward_seconds=there, backward_seconds=back) for choice in menu.choices[region])
        found.append((count, timed if when == 0 else hull(timed), when))
    return found


def _spans(menu: Menu, made: Image, units: Sequence[StateUnit]) -> list[tuple[float, float]]:
    """For a few modules, the least time from where all of their parameters are in use to the first of their gradients that is complete, in which none
    of them can be updated; and what the cpu would take for those of the others that can."""
    graph, fine, costs = made.problem.graph, menu.problem.graph, menu.problem.costs.op_seconds
    forward, backward = made.coarse.forward, made.coarse.backward
    seconds = {op.id: made.problem.device_seconds[op.id] for op in graph.ops if op.phase is not Phase.UPDATE}
    for call, back in backward.items():
        choices = menu.choices[graph.calls[call].region]
        seconds |= {forward[call]: min(c.forward_seconds for c in choices), back: min(c.backward_seconds for c in choices)}
    number = {storage.name: storage.id for storage in graph.storages}

    def known(storages: Iterable[int]) -> list[int]:
        return [number[fine.storages[s].name] for s in storages]

    within: list[tuple[int, int]] = []
    for unit in units:
        gradients = known(s for op in unit.updates for s in fine.ops[op].reads if not fine.storages[s].lasting)
        complete = [max((op for op in graph.writers[s] if op in seconds), default=-1) for s in gradients]
        within.append((max(graph.uses[s][0] for s in known(unit.parameters)), min(complete, default=-1)))
    on_cpu = [sum(costs.get((op, "cpu"), 0.0) for op in unit.updates) for unit in units]
    found = []
    for first, last in within:
        others = sum(cost for cost, (start, end) in zip(on_cpu, within, strict=True) if not (start <= first and last <= end))
        found.append((others, sum(seconds[op] for op in range(first, last + 1))))
    return sorted((span for span in found if span[1] > span[0]), key=lambda span: span[0] - span[1])[:SPANS]


def _outside_seconds(menu: Menu, made: Image) -> dict[Phase, float]:
    """Of the device, by part of the step, outside of calls and without updates that could be elsewhere."""
    graph, seconds = made.problem.graph, made.problem.device_seconds
    calls = {op for call, op in (*made.coarse.forward.items(), *made.coarse.backward.items()) if call in made.coarse.backward}
    moving = {op for unit in state_units(graph, menu.homes) for op in unit.updates}
    found = dict.fromkeys(Phase, 0.0)
    for op in graph.ops:
        if op.id not in calls and op.id not in moving:
            found[op.phase] += seconds[op.id]
    return found
