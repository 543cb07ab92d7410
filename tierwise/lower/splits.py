"""Where lasting state is, by four numbers: how many regions' state leaves the device, how many of these leave their parameters, too, which share of
their updates passes through the device, and for which share of these gradients wait there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ..ir import ON_DEVICE, Menu, Placement
from ..ir.placement import stated
from .states import StateUnit

FIRST, MOST_USES = 2, 4  # units at the beginning, and uses in a step: whose parameters leave last
ROUNDED = 1e-9  # less than what is due
HOST_SHARE = 0.9  # of host memory for state; the rest is for what passes through it


@dataclass(frozen=True, slots=True)
class Split:
    """How much leaves: numbers of units from the end of the model."""

    state: int = 0
    parameters: int = 0
    streamed: float = 0.0  # share of the updates that are away
    held: float = 0.0  # share of these whose gradients wait for them on the device, if they may: the first ones, whose gradients come last

    def changed(self, change: Change, count: int) -> Split | None:
        """None: so many units do not have that."""
        state = self.state + change.state
        parameters = self.parameters + change.parameters
        found = Split(state, parameters if change.parameters else min(parameters, state), self.streamed + change.streamed / count, self.held)
        return found if found.is_of(count) else None

    def is_of(self, count: int) -> bool:
        """Whether it can be one of so many units."""
        return 0 <= self.parameters <= self.state <= count and 0 <= self.streamed <= 1 and 0 <= self.held <= 1

    def shares_of(self, count: int) -> tuple[float, float, float]:
        """Of so many units: updated on the cpu, streamed, and with parameters elsewhere."""
        away = self.state / count
        return away * (1 - self.streamed), away * self.streamed, self.parameters / count

    def leaves_less_room_than(self, other: Split) -> bool:
        """On the device; what passes through it takes room there, too."""
        less = self.state <= other.state and self.parameters <= other.parameters and self.held >= other.held
        return less and (self.streamed > 0 or other.streamed == 0)


@dataclass(frozen=True, slots=True)
class Change:
    """Of a split, in units."""

    state: int = 0
    parameters: int = 0
    streamed: int = 0


def changes(step: int, exchange: int) -> list[Change]:
    """Of each number by so many units, and of two that leave the device as full as it is: so many parameters weigh as much as one unit's state."""
    return [Change(streamed=step), Change(parameters=step), Change(-step, exchange * step), Change(step)]


def changes_together(step: int, exchange: int) -> list[Change]:
    """One with another."""
    states = (Change(), Change(-step, exchange * step), Change(step, -exchange * step), Change(step))
    sizes = (-step, 0, step)
    return [Change(one.state, one.parameters + parameters, streamed) for one in states for parameters in sizes for streamed in sizes]


class Splits:
    """`lacks`: by tier below the device, what a split would have taken of it."""

    def __init__(self, menu: Menu, units: Sequence[StateUnit], lacks: dict[str, int], update: str = "after") -> None:
        self.menu, self.units, self.lacks, self.update = menu, units, lacks, update

    def states(self, split: Split, short_bytes: int = 0) -> dict[str, Placement] | None:
        """By path, the placements of a split, with so much less of host memory; None if what leaves has no room where it goes."""
        count = len(self.units)
        machine = self.menu.problem.machine
        room = {
            "host": int(machine.capacity("dram") * HOST_SHARE) - short_bytes,
            "nvme": machine.capacity("nvme") if "nvme" in machine.tier_named else 0,
        }
        found = dict.fromkeys((unit.path for unit in self.units), ON_DEVICE)
        leaving = range(count - split.state, count)
        streams = self._streaming(split)
        # Parameters that the cpu updates are in host memory anyway; those of streamed updates would take the link once more. The turn from forward to
        # backward is the fullest moment, and then the first layers rest longest; but not the very first, which the next step begins with, nor what is
        # used again and again.
        restless = {place for place in leaving if place < FIRST or self.units[place].uses > MOST_USES}
        away = {*sorted(leaving, key=lambda place: (place in restless, streams[place], place))[: split.parameters]}
        passing = [place for place in leaving if streams[place]]
        held = {*passing[: round(split.held * len(passing))]}
        kept = self._kept_for_parameters(sorted(away), room["host"])
        room["host"] -= sum(kept.values())
        for place in leaving:
            unit = self.units[place]
            room["host"] += kept.get(place, 0)
            options = _options(tuple(self.menu.homes[unit.path]), unit.state_bytes > 0)
            updates = ("streamed", "cpu") if streams[place] else ("cpu", "streamed")
            waits = ("device", "host") if place in held else ("host", "device")
            chosen = self._fitting(options, updates, ("host", "nvme") if place in away else ("device",), waits, unit, room)
            stays = chosen is None or (chosen == ON_DEVICE and any(option.update != "device" for option in options))
            if stays:  # it was to leave
                self.lacks["dram"] = sum(other.state_bytes + other.gradient_bytes for other in self.units)
            if chosen is None:
                return None
            found[unit.path] = chosen
        return stated(found)

    def _kept_for_parameters(self, away: Sequence[int], room: int) -> dict[int, int]:
        """By unit, host memory that nothing else gets. A parameter on disk is read twice and written once in a step, state is read and written once:
        of what a byte of host memory spares the disk, a parameter's is the most."""
        found: dict[int, int] = {}
        for place in away:
            unit = self.units[place]
            if any(option.parameters == "host" for option in self.menu.homes[unit.path]) and unit.parameter_bytes <= room:
                found[place] = unit.parameter_bytes
                room -= unit.parameter_bytes
        return found

    def _streaming(self, split: Split) -> dict[int, bool]:
        """Whose updates pass through the device: that share of those that leave, evenly among them, where both ways are open to them. The first
        among them if updates run in backward, which ends with it: the next step begins with what it makes, and the device is quicker with one
        update than the cpu."""
        found: dict[int, bool] = {}
        leaving = range(len(self.units) - split.state, len(self.units))
        sizes = {place: self.units[place].state_bytes or self.units[place].parameter_bytes for place in leaving}
        first = next(iter(sizes.values()), 0)
        through = first * (1 - split.streamed / 2) if split.streamed and self.update == "backward" else 0.0
        for place, size in sizes.items():
            ways = {option.update for option in self.menu.homes[self.units[place].path]}
            through += split.streamed * size
            is_due = through >= size * (1 - ROUNDED)
            found[place] = "streamed" in ways and (is_due or "cpu" not in ways)
            if found[place] or is_due:
                through -= size
        return found

    def _fitting(
        self,
        options: tuple[Placement, ...],
        updates: tuple[str, ...],
        parameters: tuple[str, ...],
        waits: tuple[str, ...],
        unit: StateUnit,
        room: dict[str, int],
    ) -> Placement | None:
        """The first that has room."""
        for option in _in_order(options, updates, parameters, waits):
            taken = {"host": 0, "nvme": 0}
            if option.update != "device":
                taken[option.state] += unit.state_bytes
                # During backward gradients take turns where room is short; what they take then is known once all have their place.
                taken["host"] += unit.gradient_bytes * (option.gradients == "host" and self.update == "after")
            if option.parameters in taken:
                taken[option.parameters] += unit.parameter_bytes
            if all(taken[tier] <= room[tier] for tier in taken):
                for tier, nbytes in taken.items():
                    room[tier] -= nbytes
                return option
        return None


@cache  # a search asks for few of these, again and again
def _options(homes: tuple[Placement, ...], has_state: bool) -> tuple[Placement, ...]:
    """Of an update without state, as plain SGD's, nothing leaves unless its parameters do."""
    return tuple(option for option in homes if has_state or option.parameters != "device" or option == ON_DEVICE)


@cache
def _in_order(options: tuple[Placement, ...], updates: tuple[str, ...], parameters: tuple[str, ...], waits: tuple[str, ...]) -> tuple[Placement, ...]:
    """As wanted, with the state in host memory before the disk, then anything that is away, then the device."""
    order = [
        option
        for home in dict.fromkeys((*parameters, "device"))
        for update in updates
        for state in ("host", "nvme")
        for gradients in waits
        for option in options
        if (option.update, option.state, option.parameters, option.gradients) == (update, state, home, gradients)
    ]
    order += [option for option in options if option not in order and option.parameters in parameters]
    order += [option for option in options if option == ON_DEVICE]
    return tuple(order)
