"""Activations planned around lasting state that is where it is: in what that leaves of the device, and with what it leaves of the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from ..errors import InfeasibleBudget, InvalidSchedule, OverCapacity
from ..ir import CallPlan, Menu, Phase, Placement, Problem, Program, When, check_schedule, peak_bytes
from ..units import exact_bytes, format_bytes
from .choose import FEW_IMAGES, Chosen, choose, keep_everything, predicted, sending, staying, with_budget
from .clock import Clock
from .image import Image, image, with_lasting
from .states import StateUnit, Takes, lighter, shared

CORRECTIONS = 3  # times that the room for activations is made smaller when a whole program turns out too large
LEAST_OF_THE_LINK = 0.02  # of its rate, where updates have it for themselves
PART_OF_THE_LINK = 0.5  # of what is left of it, for activations
States = frozenset[tuple[str, Placement]]


class Around:
    """`takes`: what whoever runs updates holds on the device for them all the time, and of host memory in all. What did not fit is remembered."""

    def __init__(
        self,
        menu: Menu,
        units: Sequence[StateUnit],
        when: When,
        tiers: Sequence[str],
        min_sent_bytes: int,
        takes: Takes,
        clock: Clock,
    ) -> None:
        self.menu, self.units, self.when = menu, units, when
        self.tiers, self.min_sent_bytes, self.takes, self.clock = tiers, min_sent_bytes, takes, clock
        self.host_bytes = menu.problem.machine.capacity("dram")
        self.busy = shared(menu.problem, update=when.update)  # the machine while both update
        self.overflows: dict[tuple[States, bool], int] = {}  # by states, and whether activations are sent: bytes of host memory that they lack
        self.short: set[States] = set()  # states that leave the device too little room if all activations stay there
        self.least_bytes: int | None = None
        self.lacks: dict[str, int] = {}  # below the device: what a plan would have taken of a tier
        self._last: tuple[Mapping[int, CallPlan], Image] | None = None
        self._less = {True: 0, False: 0}  # by whether activations are sent: how much less room the last ones had than was thought

    def planned(
        self, states: Mapping[str, Placement], tiers: Sequence[str], images: int = FEW_IMAGES, part: float = PART_OF_THE_LINK
    ) -> Chosen | None:
        """The fastest that was found in what these states leave of the budget. What is sent has that part of what is left of the link."""
        self.clock.tick()
        passing_bytes, host_bytes = self.takes(states) if states else (0, 0)
        light = lighter(self.menu, states, self.when.update)
        if tiers and states:
            left = self._with_what_is_left_of_the_link(light.problem, states, part)
            room_below = max(0, self.host_bytes - host_bytes)
            light = replace(light, problem=replace(left, machine=left.machine.with_capacity("dram", room_below)))
        budget = self.menu.problem.budget_bytes - passing_bytes
        room = budget - (self._passing_bytes(light, states) if states else 0)
        if budget <= 0:
            return None
        menu, thought = with_budget(self.menu, budget), room
        room -= self._less[bool(tiers)]
        for _ in range(CORRECTIONS):
            if room <= 0:
                return None
            within = replace(light, problem=light.problem.with_budget(room))
            try:
                inner = self._worth_an_image(within, tiers, images)
            except InfeasibleBudget as error:
                self._needs(self.menu.problem.budget_bytes - room + (error.least_bytes or 0))
                if 0 < len(tiers) < len(self.tiers):  # kept off a busy disk: more of the state there leaves more of the rest
                    self.overflows[frozenset(states.items()), True] = max(1, (error.least_bytes or 0) - room)
                if not tiers:
                    self.short.add(frozenset(states.items()))
                return None
            found, smaller = list[Chosen](), list[int]()
            for program, inner_bytes in inner:
                made = image(menu, replace(program, states=states, **self.when._asdict()) if states else program)
                try:
                    check_schedule(made.problem, made.schedule)
                except OverCapacity as error:
                    if error.tier != made.problem.device_tier:
                        self.lacks[error.tier] = error.needed_bytes
                        if error.tier == "dram":
                            self.overflows[frozenset(states.items()), bool(tiers)] = error.needed_bytes - self.host_bytes
                        continue
                    smaller.append(min(room, inner_bytes) - (error.needed_bytes - budget))
                except InvalidSchedule:
                    continue
                else:
                    found.append(predicted(made, self.menu.problem.budget_bytes))
            if found:
                self._less[bool(tiers)] = thought - room
            if found or not smaller:
                return min(found, key=lambda chosen: chosen.seconds, default=None)
            room = max(smaller)
        return None

    def with_activations_of(self, states: Mapping[str, Placement], other: Chosen) -> Chosen | None:
        """These states with what was planned around others, if that fits."""
        self.clock.tick()
        passing, host = self.takes(states)
        if host > self.host_bytes or passing >= self.menu.problem.budget_bytes:
            return None
        bare = self._bare(other.program)
        bare = replace(bare, problem=bare.problem.with_budget(self.menu.problem.budget_bytes - passing))
        made = with_lasting(bare, states, self.when)
        try:
            check_schedule(made.problem, made.schedule)
        except InvalidSchedule:
            return None
        return predicted(made, self.menu.problem.budget_bytes)

    def refuse(self) -> NoReturn:
        """Nothing was found, for all that is known of why."""
        problem, least = self.menu.problem, self.least_bytes
        budget = format_bytes(problem.budget_bytes)
        if self.lacks or least is None:
            tier, nbytes = min(self.lacks.items(), default=("dram", 0))
            asked = f"{format_bytes(nbytes)} of {tier}" if nbytes else f"more {tier}"
            raise InfeasibleBudget(
                f"no plan was found for a budget of {budget}: what would have to leave the device needs {asked}, and "
                f"{format_bytes(problem.machine.capacity(tier))} may be used; allow more with host=, or name a disk with nvme='DIR:200GiB'"
            )
        raise InfeasibleBudget(
            f"budget {budget} is below {format_bytes(least)}, what this step needs with everything recomputed and moved away that can be; use at "
            f"least {exact_bytes(least)}, a smaller batch, or fewer trainable parameters",
            least_bytes=least,
        )

    def _worth_an_image(self, menu: Menu, tiers: Sequence[str], images: int) -> list[tuple[Program, int]]:
        """Programs for activations alone, and the bytes that they come to."""
        if tiers and images == FEW_IMAGES and (found := sending(menu, tiers, self.min_sent_bytes)):
            return found
        if not tiers and (stays := staying(menu)) is not None:
            return [stays]
        chosen = choose(menu, tiers=tiers, min_sent_bytes=self.min_sent_bytes, images=images)
        return [(chosen.program, chosen.peak_bytes)]

    def _with_what_is_left_of_the_link(self, problem: Problem, states: Mapping[str, Placement], part: float) -> Problem:
        """Activations leave in forward and come back in backward. Updates after backward have the way out in forward, those in backward the way
        in, and parameters that live elsewhere come in both: what they carry is taken off the rate. A forward or backward that waits for updates
        lasts as long as they do."""
        machine, device = self.busy.machine, problem.device_tier
        out, into = (device, "dram"), ("dram", device)
        during = {out: 0.0, into: 0.0}
        for op in problem.graph.ops:
            if op.phase in (Phase.FORWARD, Phase.BACKWARD):
                during[out if op.phase is Phase.FORWARD else into] += problem.costs.op_seconds.get((op.id, machine.device.name), 0.0)
        placed = [(unit, states[unit.path]) for unit in self.units if unit.path in states]
        state = sum(unit.state_bytes for unit, place in placed if place.update == "streamed")
        coming = sum(unit.gradient_bytes for unit, place in placed if place.update == "streamed" and place.gradients == "host")
        coming += sum(unit.parameter_bytes for unit, place in placed if place.update == "cpu" and place.parameters == "device")
        parameters = sum(unit.parameter_bytes for unit, place in placed if place.parameters != "device")
        on_cpu = sum(self.busy.costs.op_seconds.get((op, "cpu"), 0.0) for unit, place in placed if place.update == "cpu" for op in unit.updates)
        after = self.when.update == "after"
        carried = {out: state if after else 0, into: parameters + (0 if after else state)}
        lasts = max(on_cpu, (state + coming) / machine.link(*into).bytes_per_second)
        left = {}
        for way, waits in ((out, after), (into, not after)):
            free = max(during[way], lasts if waits else 0.0) - carried[way] / machine.link(*way).bytes_per_second
            left[way] = min(1.0, max(LEAST_OF_THE_LINK, free / max(during[way], 1e-9)))
        return replace(problem, machine=problem.machine.with_rates(lambda link, _, rate: rate * part * left.get((link.src, link.dst), 1.0)))

    def _passing_bytes(self, light: Menu, states: Mapping[str, Placement]) -> int:
        """What passes through the device at its fullest moment, as far as that can be told with everything kept."""
        whole, without = with_lasting(self._kept, states, self.when), image(light, keep_everything(self.menu))
        device = whole.problem.device_tier
        return max(0, peak_bytes(whole.problem, whole.schedule)[device] - peak_bytes(without.problem, without.schedule)[device])

    @cached_property
    def _kept(self) -> Image:
        return image(self.menu, keep_everything(self.menu))

    def _needs(self, nbytes: int) -> None:
        self.least_bytes = nbytes if self.least_bytes is None else min(self.least_bytes, nbytes)

    def _bare(self, program: Program) -> Image:
        """Of what is planned for activations alone: many states are looked at with the same."""
        if self._last is None or self._last[0] is not program.calls:
            self._last = program.calls, image(self.menu, replace(program, states={}))
        return self._last[1]
