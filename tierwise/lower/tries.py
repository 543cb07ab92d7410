"""What was planned for splits, each with and without activations that are sent, and whether there is time for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ..ir import INPUTS, CallPlan, Menu, Placement
from .around import Around
from .choose import Chosen, keep_everything, recompute_everything
from .clock import Clock
from .helpers import Helpers, Taken
from .splits import Split, Splits
from .states import StateUnit, Takes

CLEARLY = 0.99  # of another plan's time
DETAILED = 1.04  # of the best plan's time: what is looked at in detail
BOTH = (False, True)  # activations stay or are made again; or some are sent, too


class Tries:
    def __init__(
        self,
        menu: Menu,
        units: Sequence[StateUnit],
        around: Around,
        splits: Splits,
        tiers: Sequence[str],
        takes: Takes,
        clock: Clock,
        deadline: float,
    ) -> None:
        self.menu, self.units, self.around, self.splits, self.tiers, self.takes = menu, units, around, splits, tiers, takes
        self.clock, self.began, self.deadline = clock, clock.now(), deadline
        self.tried: dict[tuple[Split, bool], Chosen | None] = {}
        self.borrowed: dict[Split, Chosen] = {}  # with activations that were planned for another split
        self._too_large_with: dict[Split, list[Mapping[int, CallPlan]]] = {}  # activations
        self._by_states: dict[tuple[frozenset[tuple[str, Placement]], bool], Chosen | None] = {}  # and whether activations are sent
        self._on_busy_disk: dict[frozenset[tuple[str, Placement]], Chosen | None] = {}  # with activations sent there, where nothing else was found
        self._too_large: list[Split] = []  # which leave the device too little room if all activations stay there

    def is_over(self) -> bool:
        return self.clock.now() > self.deadline

    def until(self, share: float, work: Callable[[], None]) -> None:
        """For that share of the time at most."""
        until, self.deadline = self.deadline, self.began + share * (self.deadline - self.began)
        work()
        self.deadline = until

    def at(self, split: Split, ways: Sequence[bool] = BOTH) -> Chosen | None:
        """With and without sending activations, or one of these."""
        for sends in ways if self.tiers else (False,):
            if (split, sends) in self.tried or (sends and self._keeps_everything(split)):
                continue
            if self.is_over() and self.best() is not None:
                break
            if not sends and any(split.leaves_less_room_than(other) for other in self._too_large):
                self.tried[split, sends] = None
                continue
            self.tried[split, sends] = self._planned(split, self.tiers if sends else ())
        found = [chosen for sends in BOTH if (chosen := self.tried.get((split, sends))) is not None]
        return min(found, key=lambda chosen: chosen.seconds) if found else None

    def at_all(self, wanted: Sequence[tuple[Split, bool]], others: Helpers) -> None:
        """Several at a time, each with activations that are sent or without, where there is somebody else to plan them."""
        asked: list[tuple[Split, bool, Taken]] = []
        for split, sends in dict.fromkeys(wanted) if others and not self.is_over() else ():
            states = self.splits.states(split) if (split, sends) not in self.tried else None
            if states and (taken := self.takes(states))[1] <= self.around.host_bytes:
                asked.append((split, sends, taken))
        for (split, sends, _), chosen in zip(asked, others.plan(asked) or (), strict=False):
            is_known = "nvme" not in self.tiers if chosen is None else chosen.program.states == self.splits.states(split)
            if is_known:  # otherwise host memory was short, and updates take something else
                self.tried[split, sends] = chosen
                self.clock.tick()

    def barely(self, split: Split) -> Chosen | None:
        """A split with all activations made again, from inputs that are sent. None: it does not fit, and hardly would with others that are sent."""
        return self.with_activations_of(split, self._least) if self.tiers else None

    @cached_property
    def _least(self) -> Chosen:
        made = recompute_everything(self.menu)
        calls = {call: replace(plan, sent=(INPUTS,), tier=self.tiers[0]) for call, plan in made.calls.items()}
        return Chosen(replace(made, calls=calls), math.inf, 0, 0)

    def may_fit(self, split: Split) -> bool:
        """Whether there is a plan for it, be it a good one or not; or there might be with more host memory."""
        return any(self.at(split, (sends,)) is not None for sends in BOTH) or bool(self.around.lacks)

    def with_activations_of(self, split: Split, other: Chosen) -> Chosen | None:
        """A split with what was planned for another one's activations, if that fits."""
        states = self.splits.states(split)
        for known in (other, self.borrowed.get(split)):
            if known is not None and known.program.states == states and known.program.calls == other.program.calls:
                return known
        found = self.around.with_activations_of(states, other) if states else None
        if found is not None:
            self.borrowed[split] = found
        return found

    def knows(self, split: Split, other: Chosen) -> bool:
        """Whether it was looked at with what was planned for another one's activations."""
        known = self.borrowed.get(split)
        return other.program.calls in ([known.program.calls] if known is not None else self._too_large_with.get(split, []))

    def looked_at(self, split: Split, other: Chosen, found: Chosen | None) -> None:
        """With that; None: there is no room for it."""
        self.clock.tick()
        if found is not None:
            self.borrowed[split] = found
        else:
            self._too_large_with.setdefault(split, []).append(other.program.calls)

    def best_split(self) -> Split:
        return self.found()[0]

    def found(self) -> tuple[Split, Chosen]:
        found = self.best()
        assert found is not None
        return found

    def sends(self, split: Split) -> bool:
        """Whether what was found for it is clearly better with activations that are sent; such plans take longer to make."""
        stays, sent = (self.tried.get((split, sends)) for sends in BOTH)
        return sent is not None and (stays is None or sent.seconds < CLEARLY * stays.seconds)

    def best(self, ways: Sequence[bool] = BOTH) -> tuple[Split, Chosen] | None:
        """Of all, or of those with or without activations that are sent."""
        known = [(split, chosen) for split, chosen in self._known() if ways == BOTH or chosen.program.sends in ways]
        found = [(chosen.seconds, number, split, chosen) for number, (split, chosen) in enumerate(known)]
        return min(found)[2:] if found else None

    def near(self, best: Chosen) -> list[Chosen]:
        """Others that come near the best, the fastest first."""
        known = [chosen for _, chosen in self._known() if chosen is not best]
        return sorted((chosen for chosen in known if chosen.seconds <= best.seconds * DETAILED), key=lambda chosen: chosen.seconds)

    def _known(self) -> list[tuple[Split, Chosen]]:
        known = [*((split, chosen) for (split, _), chosen in self.tried.items()), *self.borrowed.items()]
        return [(split, chosen) for split, chosen in known if chosen is not None]

    def _keeps_everything(self, split: Split) -> bool:
        """Whether no activation is recomputed without sending any: then there is nothing to gain."""
        chosen = self.tried.get((split, False))
        return chosen is not None and chosen.program.calls == keep_everything(self.menu).calls

    def _planned(self, split: Split, tiers: Sequence[str]) -> Chosen | None:
        short, found = 0, list[Chosen | None]()
        for _ in self.units:
            states = self.splits.states(split, short)
            if states is None:
                break
            host = self.takes(states)[1] if states else 0
            if host <= self.around.host_bytes:
                key = frozenset(states.items()), bool(tiers)
                above = above_disk(states, tiers)
                if key not in self._by_states:  # splits whose numbers come to the same
                    self._by_states[key] = self.around.planned(states, above)
                    if key[0] in self.around.short:
                        self._too_large.append(split)
                chosen, missing = self._by_states[key], self.around.overflows.get(key, 0)
                if chosen is None and not found and len(above) < len(tiers):  # to a busy disk, or with more of the state there
                    if key[0] not in self._on_busy_disk:
                        self._on_busy_disk[key[0]] = self.around.planned(states, tiers)
                    found.append(self._on_busy_disk[key[0]])
                found.append(chosen)
                if not missing or "nvme" not in self.menu.problem.machine.tier_named:
                    break
                short += missing  # what passes through host memory was not counted, or activations have no room there
                continue
            self.around.lacks["dram"] = host
            short += host - self.around.host_bytes
        return min((chosen for chosen in found if chosen is not None), key=lambda chosen: chosen.seconds, default=None)


def above_disk(states: Mapping[str, Placement], tiers: Sequence[str]) -> tuple[str, ...]:
    """Where activations had better go: not to a disk that is busy with state all the time."""
    busy = any(place.state == "nvme" for place in states.values())
    return tuple(tier for tier in tiers if not (busy and tier == "nvme"))
