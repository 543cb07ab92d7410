"""What no program of a menu can beat in its memory: a linear program over shares of calls, of bytes that leave, and of state that lives elsewhere.

A step is forward, backward and the updates behind it. As forward turns to backward, every call's saved values are somewhere: as a choice that saves
less and computes more; below the device, where forward's part of the link has carried them and from where backward's brings them; or there. So they
are when the first of the calls that are most alike goes back, whose own are there, with its workspace, its parameters and those of the next one. Each
part lasts at least as long as its compute; what the link carries each way, and what the cpu updates, fits into the step, and with updates after
backward into what is not backward. No module is updated between its forward and its backward, so that around the turn the cpu has nothing to do. How
fast both are depends on how they share the updates: a linear program for each range of that, of which the one with the least time is divided again.
Copies have a little of the power that compute wants. What host memory has no room for is on the disk, which reads and writes it once in a step.
Shares of a call and perfect overlap make all of that easier than it is.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..ir import ON_DEVICE, Menu, Phase
from ..policies._milp import Program, Solution
from .choose import with_budget
from .facts import Facts
from .states import OTHERS_AFTER, Takes, shares

BUDGET = 10.0  # what the budget is in the linear program, where bytes shall be of the size of seconds
NARROW, EXACT = 1 / 64, 1e-6  # a range of how updates are shared that is not divided again; and what is none
LOOKS, SAFE = 8, 1.001  # rates that are looked at in a range; and what may be between these
Terms = dict[int, float]


class Best(NamedTuple):
    """The least seconds; then of the state: updated on the cpu, streamed; of the parameters: elsewhere; and what is below the device, of what calls
    save."""

    seconds: float
    on_cpu: float
    streamed: float
    elsewhere: float
    sent_bytes: float


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


def least_seconds(menu: Menu, update: str = "after", takes: Takes | None = None, least_of: Callable[..., float] | None = None) -> float:
    """Seconds of a step below which no program of the menu can get within its budget; infinite if none fits by this count. `takes`: what whoever runs
    updates holds on the device for them all the time. `least_of`: by other lines than these."""
    facts, least_of = Facts.of(menu), least_of or _least_seconds
    if takes is None or not facts.units:
        return least_of(menu, update, facts)
    # Modules of one size, of which most state is. Whoever moves one of them has that much less memory; who moves none moves little.
    state = Counter[int]()
    for unit in facts.units:
        state[unit.parameter_bytes] += unit.state_bytes
    size, nbytes = state.most_common(1)[0]
    alike = [(unit.path, home) for unit in facts.units if unit.parameter_bytes == size for home in menu.homes[unit.path] if home != ON_DEVICE]
    least = min((takes({path: home})[0] for path, home in alike), default=0)
    lighter = with_budget(menu, max(1, menu.problem.budget_bytes - least))
    some = least_of(lighter, update, facts)
    return min(some, least_of(menu, update, facts, moved=1 - nbytes / max(1, state.total()))) if least else some


def _least_seconds(menu: Menu, update: str, facts: Facts, moved: float = 1.0) -> float:
    """With so much of the state elsewhere at most."""
    return best_lines(menu, update, facts, moved)[0]


def has_own_pace(menu: Menu) -> bool:
    """Whether updates do not depend on who shares them: those of what comes from a disk."""
    return any(home.state == "nvme" for found in menu.homes.values() for home in found)


def best_lines(menu: Menu, update: str, facts: Facts, moved: float = 1.0, closer: Callable[[Mix], float] | None = None) -> tuple[float, Bound]:
    """The least seconds, and the lines of which these are. `closer`: what else is known of the least in a range of how updates are shared."""
    homes = [home for found in menu.homes.values() for home in found]
    alone = Bound(menu, update, facts=facts, moved=moved)
    if has_own_pace(menu) or all(home.update == "device" for home in homes):
        return alone.least(), alone
    on_cpu, streamed, _ = alone.shares
    nowhere_else = alone.lines.solve(fixed={on_cpu: 0.0, streamed: 0.0}).objective
    ranges = [(0.0, 0.0, 1.0, alone, False)]  # by what is promised, the whole first; no two begin at the same share
    while ranges[0][0] < nowhere_else:
        promised, least, most, lines, is_close = heapq.heappop(ranges)
        if most - least <= NARROW and (is_close or closer is None):
            return promised, lines
        if most - least <= NARROW and closer is not None:
            heapq.heappush(ranges, (max(promised, closer(mix_between(least, most, update))), least, most, lines, True))
            continue
        middle = (least + most) / 2
        for part in ((least, middle), (middle, most)):
            lines = Bound(menu, update, mix_between(*part, update), facts=facts, moved=moved)
            heapq.heappush(ranges, (lines.least(), *part, lines, False))
    return nowhere_else, Bound(menu, update, facts=facts, moved=0.0)


def with_updates(menu: Menu, update: str, facts: Facts, on_cpu: float, streamed: float) -> Best | None:
    """What there is in the least time with so much of the state updated there; None: that does not fit."""
    costs = menu.problem.costs.op_seconds
    alone = on_cpu * sum(costs.get((op, "cpu"), 0.0) for unit in facts.units for op in unit.updates)
    part = alone / max(alone + streamed * facts.streaming_seconds, 1e-12)
    return Bound(menu, update, mix_between(max(0.0, part - EXACT), min(1.0, part + EXACT), update), facts=facts).with_updates(on_cpu, streamed)


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

    def best(self) -> Best | None:
        """What there is in the least time. None: nothing fits."""
        return self._best(self.lines.solve())

    def with_updates(self, on_cpu: float, streamed: float) -> Best | None:
        """The same with so much of the state updated there."""
        return self._best(self.lines.solve(fixed={self.shares[0]: on_cpu, self.shares[1]: streamed}))

    def _best(self, found: Solution) -> Best | None:
        if not math.isfinite(found.objective):
            return None
        on_cpu, streamed, elsewhere = (found.values[share] for share in self.shares)
        return Best(found.objective, on_cpu, streamed, elsewhere, found.values[self.left] / self.unit)

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
        self._below(of_others, self.unit * self.facts.back.untouched)
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
        held, running = self.unit * self.facts.back.held, self.unit * self.facts.back.parameters
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
            self._beside_copies(
                {self.left: 1.0, on_cpu: gradients, streamed: state},
                {self.left: 1.0, streamed: state, elsewhere: 2 * parameters},
                {self.left: 1.0, on_cpu: parameters, elsewhere: parameters, streamed: state},
            )

    def _beside_copies(self, out: Terms, *into: Terms) -> None:
        """Compute and what copies take from it: of those into the device as much as any of these say."""
        links, device = self.menu.problem.machine.link_between, self.menu.problem.device_tier
        if not any(link.compute_share for link in links.values()):
            return
        together: Terms = defaultdict(float, self.whole)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for variable, seconds in self.compute[phase].items():
                together[variable] += max(0.0, seconds)
        for comes in into:
            terms = together.copy()
            for way, copied in (((device, "dram"), out), (("dram", device), comes)):
                if (link := links.get(way)) is not None:
                    for variable, nbytes in copied.items():
                        terms[variable] += link.compute_share * nbytes / (self.unit * link.bytes_per_second)
            self._below(terms, -self.facts.outside[Phase.FORWARD] - self.facts.outside[Phase.BACKWARD])

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
        on_cpu, streamed, _ = self.shares
        self._below({on_cpu: (mix.least - 1) * self.cpu_seconds, streamed: mix.least * self.facts.streaming_seconds}, 0.0)
        self._below({on_cpu: (1 - mix.most) * self.cpu_seconds, streamed: -mix.most * self.facts.streaming_seconds}, 0.0)

    def _carried(self, terms: Terms, part: Terms, rate: float) -> None:
        """So much fits through the link in a part of the step."""
        self._below({**terms, **{variable: rate * seconds for variable, seconds in part.items()}}, 0.0)
