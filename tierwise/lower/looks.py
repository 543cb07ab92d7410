"""Quick looks at splits of lasting state: what a step comes to with every call recomputed, less about what the room that is left would save.

A split that does not fit is looked at with more parameters elsewhere, as few as it takes: who asks names what stays and who updates the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from ..ir import ON_DEVICE, Menu, Placement, When, peak_bytes
from ..simulate import step_seconds
from .choose import hull, recompute_everything
from .helpers import Helpers
from .image import Image, image, with_lasting
from .splits import Split, Splits
from .states import StateUnit, Takes

TRIES = 6  # to make a split fit
LIKELY = 0.95  # of what the last look found beside lasting state: one that is near it takes that much, too


class Looks:
    """`takes`: what whoever runs updates holds on the device for them all the time, and of host memory in all."""

    def __init__(
        self,
        menu: Menu,
        units: Sequence[StateUnit],
        splits: Splits,
        when: When,
        takes: Takes,
    ) -> None:
        self.menu, self.units, self.splits, self.when, self.takes = menu, units, splits, when, takes
        self.seconds: dict[Split, float] = {}  # of those that fit
        self._fitting: dict[Split, Split | None] = {}
        self._beside = 0  # bytes of the device besides lasting state, in the last of these
        self._gains = _gains(menu)

    @cached_property
    def _bare(self) -> Image:
        return image(self.menu, recompute_everything(self.menu))

    def at(self, split: Split) -> Split | None:
        """The split, or the nearest lighter one, whose seconds are known then. None: it does not fit, nor what is a little lighter."""
        if split not in self._fitting:
            self._fitting[split] = self._fitted(split)
        return self._fitting[split]

    def at_all(self, splits: Iterable[Split], others: Helpers) -> None:
        """Several at a time, where there is somebody else to look at them."""
        asked = [split for split in splits if split not in self._fitting and self.splits.states(split)]
        found = others.glance((split, self.takes(self.splits.states(split) or {})) for split in asked) if others else None
        for split, answer in zip(asked, found or (), strict=False):
            self._fitting[split] = None if answer is None else answer[0]
            if answer is not None:
                self.seconds.setdefault(*answer)

    def best(self) -> list[Split]:
        """The fastest first."""
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def resident_bytes(self, states: Mapping[str, Placement]) -> int:
        """Of lasting state on the device all the time."""
        found = 0
        for unit in self.units:
            place = states.get(unit.path, ON_DEVICE)
            found += unit.state_bytes * (place.update == "device") + unit.parameter_bytes * (place.parameters == "device")
        return found

    def _fitted(self, split: Split) -> Split | None:
        problem, host_bytes = self.menu.problem, self.menu.problem.machine.capacity("dram")
        for _ in range(TRIES):
            states = self.splits.states(split)
            if split in self.seconds or not states:
                return split if states else None
            passing, host = self.takes(states)
            resident = self.resident_bytes(states)
            lacks = resident + int(LIKELY * self._beside) + passing - problem.budget_bytes
            if lacks <= 0 and host <= host_bytes:
                made = with_lasting(self._bare, states, self.when)
                peaks = peak_bytes(made.problem, made.schedule)
                peak, host = peaks[problem.device_tier], max(host, peaks["dram"])
                self._beside = peak - resident
                lacks = peak + passing - problem.budget_bytes
                if lacks <= 0 and host <= host_bytes:
                    seconds = step_seconds(made.problem.with_budget(problem.budget_bytes), made.schedule)
                    self.seconds[split] = seconds - self._saved_in(-lacks)
                    return split
            lighter = self._lighter(split, lacks)
            if host > host_bytes or lighter is None:
                return None
            split = lighter
        return None

    def _lighter(self, split: Split, nbytes: int) -> Split | None:
        """With about so much more of parameters elsewhere; state, where those are gone."""
        more = max(1, nbytes // max(1, *(unit.parameter_bytes for unit in self.units)))
        if split.parameters < split.state:
            return replace(split, parameters=min(split.state, split.parameters + more))
        if split.state < len(self.units):
            return replace(split, state=split.state + 1, parameters=split.parameters + 1)
        return None

    def _saved_in(self, nbytes: float) -> float:
        """Seconds of recomputation that so much memory saves, by half: where compute waits for updates they count for little."""
        seconds = 0.0
        for gain, size in self._gains:
            part = min(1.0, nbytes / size) if size else 1.0
            seconds += part * gain
            nbytes -= part * size
            if nbytes <= 0:
                break
        return seconds / 2


def _gains(menu: Menu) -> list[tuple[float, int]]:
    """Seconds that all calls of a class save by the next larger choice, and its bytes: what is worth most first."""
    calls = Counter(call.region for call in menu.problem.graph.calls)
    found = []
    for region, choices in menu.choices.items():
        for more, less in pairwise(hull(choices)):
            gain = less.forward_seconds + less.backward_seconds - more.forward_seconds - more.backward_seconds
            found.append((calls[region] * gain, calls[region] * (more.saved_bytes - less.saved_bytes)))
    return sorted(((gain, size) for gain, size in found if gain > 0), key=lambda one: -one[0] / max(1, one[1]))
