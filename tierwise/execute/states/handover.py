"""From one set of homes to another in the midst of a training, module by module: no more than one module is in neither.

What stays as it is, state of the same parameters in the same place and in chunks of the same size, is taken over as it lies. Everything else leaves
for host memory that nobody plans, gives its room back, and goes to its new home as it would have gone there at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .updates import Stored


@dataclass(eq=False, slots=True)
class Group:
    """Homes that have parameters in common."""

    before: list[Stored] = field(default_factory=list)
    after: list[Stored] = field(default_factory=list)

    @property
    def more_bytes(self) -> int:
        """On the device."""
        return sum(map(_on_device, self.after)) - sum(map(_on_device, self.before))


def groups_of(before: Sequence[Stored], after: Sequence[Stored]) -> list[Group]:
    """In an order in which the device never has to hold much more than before or after."""
    group_of: dict[int, Group] = {}  # by parameter
    for home, is_old in [*((home, True) for home in before), *((home, False) for home in after)]:
        group = Group()
        for other in dict.fromkeys(group_of[id(slot.parameter)] for slot in home.unit.slots if id(slot.parameter) in group_of):
            group.before += other.before
            group.after += other.after
        (group.before if is_old else group.after).append(home)
        group_of |= {id(slot.parameter): group for member in (*group.before, *group.after) for slot in member.unit.slots}
    return list(_in_turns([*dict.fromkeys(group_of.values())]))


def _in_turns(groups: Sequence[Group]) -> Iterator[Group]:
    """Those that come to the device as soon as others have left it, the largest first."""
    by_size = sorted(groups, key=lambda group: group.more_bytes)
    leave, come = [group for group in by_size if group.more_bytes <= 0], [group for group in reversed(by_size) if group.more_bytes > 0]
    more = 0
    while leave or come:
        fits = next((group for group in come if more + group.more_bytes <= 0), None)
        chosen = fits or (leave.pop(0) if leave else come[0])
        if chosen in come:
            come.remove(chosen)
        more += chosen.more_bytes
        yield chosen


def _on_device(home: Stored) -> int:
    unit, place = home.unit, home.unit.placement
    state = home.row_count * unit.numel * home.dtype.itemsize if unit.trained and place.state == "device" else 0
    return state + unit.nbytes * (place.parameters == "device")


def taken_over(group: Group) -> list[Stored]:
    """New homes whose state was that of an old one, and is theirs now."""
    found = []
    for home in group.after:
        old = next((other for other in group.before if _is_same(other, home)), None)
        if old is not None:
            home.chunks, old.chunks = old.chunks, None
            home.arrays, old.arrays = old.arrays, None
            for mine, theirs in zip(home.unit.slots, old.unit.slots, strict=True):
                mine.steps = theirs.steps
            found.append(home)
    return found


def _is_same(old: Stored, new: Stored) -> bool:
    """In the same place, cut alike, and there at all."""
    return _layout(old) == _layout(new) and (old.chunks is not None or old.arrays is not None)


def _layout(home: Stored) -> tuple[object, ...]:
    unit = home.unit
    slots = [(id(slot.parameter), slot.offset, slot.group) for slot in unit.slots]
    return unit.placement, unit.dtype, unit.numel, unit.chunk_elements, slots, home.names, home.dtype, home.has_master
