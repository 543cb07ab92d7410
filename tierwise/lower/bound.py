"""What no program of a menu can beat in its memory: a linear program over shares of calls, of bytes that leave, and of state that lives elsewhere.

A step is forward, backward and the updates behind it. As forward turns to backward, every call's saved values are somewhere: as a choice that saves
less and computes more; below the device, where forward's part of the link has carried them and from where backward's brings them; or there. Each
part lasts at least as long as its compute; what the link carries each way, and what the cpu updates, fits into the step, and with updates after
backward into what is not backward. Shares of a call, perfect overlap and no workspace of calls make all of that easier than it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from ..ir import Choice, Menu, Phase, Role
from ..policies._milp import Program
from .choose import hull, keep_everything
from .image import Image, image
from .states import state_units

GB = 1e-9  # bytes in the linear program are of the size of its seconds
Terms = dict[int, float]


def least_seconds(menu: Menu, update: str = "after") -> float:
    """Seconds of a step below which no program of the menu can get within its budget; infinite if none fits by this count."""
    return Bound(menu, update).least()


class Bound:
    """The lines, each as its name says, with the three parts of the step in seconds and everything else in gigabytes or shares."""

    def __init__(self, menu: Menu, update: str) -> None:
        self.menu, self.lines = menu, Program()
        self.made = image(menu, keep_everything(menu))
        self.outside = _outside_seconds(menu, self.made)
        self.forward, self.backward, self.rest = (self.lines.variable(upper=math.inf, cost=1.0) for _ in range(3))
        self.whole: Terms = dict.fromkeys((self.forward, self.backward, self.rest), -1.0)
        self.not_backward: Terms = {self.forward: -1.0, self.rest: -1.0}
        machine, device = menu.problem.machine, menu.problem.device_tier
        self.out_rate = GB * max((link.bytes_per_second for link in machine.links if link.src == device), default=0.0)
        self.in_rate = GB * max((link.bytes_per_second for link in machine.links if link.dst == device), default=0.0)
        self.memory: Terms = {}
        self.left = self._activations()
        self._states(update)

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
        held, activations, saved = (GB * nbytes for nbytes in _at_the_turn(self.menu, self.made))
        self.held = held
        left = lines.variable(upper=activations + saved)
        self.memory[left] = -1.0
        compute: dict[Phase, Terms] = {Phase.FORWARD: {self.forward: -1.0}, Phase.BACKWARD: {self.backward: -1.0}}
        of_saved: Terms = {left: 1.0}
        for count, choices in _classes(self.menu, self.made):
            shares = [lines.variable(upper=count) for _ in choices]
            lines.constrain([(share, 1.0) for share in shares], lower=count, upper=count)
            for share, choice in zip(shares, choices, strict=True):
                compute[Phase.FORWARD][share], compute[Phase.BACKWARD][share] = choice.forward_seconds, choice.backward_seconds
                self.memory[share], of_saved[share] = GB * choice.saved_bytes, -GB * choice.saved_bytes
        self._below(of_saved, activations)  # what left was there: saved, or held besides
        for phase, terms in compute.items():
            self._below(terms, -self.outside[phase])
        self._below({left: 1.0, self.forward: -self.out_rate}, 0.0)
        return left

    def _states(self, update: str) -> None:
        """Shares of all lasting state: updated on the cpu, streamed, and parameters that live elsewhere."""
        menu, lines, problem = self.menu, self.lines, self.menu.problem
        units, homes = state_units(problem.graph, menu.homes), [home for found in menu.homes.values() for home in found]
        state, gradients = GB * sum(unit.state_bytes for unit in units), GB * sum(unit.gradient_bytes for unit in units)
        parameters = GB * sum(unit.parameter_bytes for unit in units)
        cpu_seconds = sum(problem.costs.op_seconds.get((op, "cpu"), 0.0) for unit in units for op in unit.updates)
        updating = sum(problem.costs.op_seconds[op, problem.machine.device.name] for unit in units for op in unit.updates)
        on_cpu = lines.variable(upper=float(any(home.update == "cpu" for home in homes)))
        streamed = lines.variable(upper=float(any(home.update == "streamed" for home in homes)))
        elsewhere = lines.variable(upper=float(any(home.parameters != "device" for home in homes)))
        self.shares = on_cpu, streamed, elsewhere
        self._below({on_cpu: 1.0, streamed: 1.0}, 1.0)
        self._below({**self.memory, on_cpu: -state, streamed: -state, elsewhere: -parameters}, GB * problem.budget_bytes - self.held)
        self._below({self.rest: -1.0, on_cpu: -updating, streamed: -updating}, -updating - self.outside[Phase.UPDATE])
        self._carried({self.left: 1.0, on_cpu: gradients, streamed: state}, self.whole, self.out_rate)
        self._carried({self.left: 1.0, streamed: state, elsewhere: 2 * parameters}, self.whole, self.in_rate)
        self._carried({self.left: 1.0, on_cpu: parameters, streamed: state}, self.whole, self.in_rate)
        self._carried({self.left: 1.0, elsewhere: parameters}, {self.backward: -1.0}, self.in_rate)
        self._below({on_cpu: cpu_seconds, **self.whole}, 0.0)
        if update == "after":  # nothing is updated before all gradients are there, and all of it before the next backward
            self._below({on_cpu: cpu_seconds, **self.not_backward}, 0.0)
            self._carried({self.left: 1.0, streamed: state}, self.not_backward, self.out_rate)
            self._carried({streamed: state}, self.not_backward, self.in_rate)

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


def _classes(menu: Menu, made: Image) -> list[tuple[int, tuple[Choice, ...]]]:
    """How many calls a class has, and its choices worth having, with the seconds of the step's ops where a choice has none."""
    counts: dict[int, int] = defaultdict(int)
    own: dict[int, tuple[float, float]] = {}
    seconds = made.problem.device_seconds
    for call in made.coarse.forward:
        region = made.problem.graph.calls[call].region
        if call in made.coarse.backward:
            counts[region] += 1
            own[region] = seconds[made.coarse.forward[call]], seconds[made.coarse.backward[call]]
    found = []
    for region, count in counts.items():
        forward, backward = own[region]
        timed = (choice if choice.seconds else replace(choice, forward_seconds=forward, backward_seconds=backward) for choice in menu.choices[region])
        found.append((count, hull(tuple(timed))))
    return found


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
