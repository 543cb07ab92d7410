"""Where lasting state is to be, searched for by splits (splits.py): a first plan from the most promising of them, then what is near the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ..ir import Menu, Placement, When
from .around import Around
from .bound import Bound, least_seconds
from .choose import IMAGES, Chosen, keeping_everything
from .clock import Clock
from .descent import Descent
from .facts import Facts
from .helpers import Helpers, Lesson
from .looks import Looks
from .seeds import Seeds
from .senders import Senders
from .splits import Split, Splits
from .states import StateUnit, Takes
from .tries import BOTH, Tries, above_disk

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVES = (0.0, 0.5, 1.0)
GRID = 4  # numbers of regions whose state leaves that are put in order
FIRST_SPLITS = 6  # so many of the best are tried before what is near the best of them
GOOD_ENOUGH = 1.01  # of the time that keeping everything takes: nothing that moves state can gain more than the rest
LITTLE = 0.05  # of the budget: lasting state of less than this is not worth moving where activations alone fit
WORTH_IT = 0.95  # moving state must gain this much over leaving it: it takes host memory, and predictions are better for what stays
OUT_OF_REACH = 1.03  # of what the linear program promises: so near to it no plan comes that moves state
AS_GOOD = 1.01  # of the least that the linear program finds
OUT_OF_SIGHT = 1.02  # of the best plan's time: what is near it is not better
NEAR = 1.02  # of what no plan could beat: what is left to gain is not worth looking for
LOOKS_SHARE, LOOKED_AT = 0.25, 4  # of the time for quick looks at splits; and how many of the best by these are planned
WORTH_PLANNING = 1.04  # of the best look: plans are about as far apart as looks are
SETTLED_SHARE = 0.65  # of the time, until activations are sent
DESCENT_SHARE = 0.85  # of the time for all of that, until other parts of the link are tried
OTHER_PARTS = (1.0, 0.25)  # of what is left of the link, for activations


class Search:
    def __init__(
        self,
        menu: Menu,
        whole: Menu,
        units: list[StateUnit],
        tiers: Sequence[str],
        min_sent_bytes: int,
        deadline: float,
        takes: Takes,
        clock: Clock,
        others: Helpers,
        when: When,
    ) -> None:
        self.others, self.when, self.update, self.takes = others, when, (update := when.update), takes
        self.menu, self.whole, self.units, self.tiers, self.min_sent_bytes = menu, whole, units, tiers, min_sent_bytes
        self.around = Around(menu, units, when, tiers, min_sent_bytes, takes, clock)
        self.splits = Splits(menu, units, self.around.lacks, update)
        self.tries = Tries(menu, units, self.around, self.splits, tiers, takes, clock, deadline)
        self.may_hold = update == "after" and any((h.update, h.gradients) == ("streamed", "device") for homes in menu.homes.values() for h in homes)
        self.balance = self._balance()
        self.looks = Looks(menu, units, self.splits, when, takes)
        self.facts = Facts.of(menu)
        self.descent = Descent(self.tries, others)
        self.senders = Senders(self.tries, self.descent)

    def _balance(self) -> float:
        """The share of updates that go through the device when the cpu and the link are done with theirs at the same time."""
        machine, seconds = self.around.busy.machine, self.around.busy.costs.op_seconds
        updates = [op for unit in self.units for op in unit.updates]
        on_cpu = sum(seconds.get((op, "cpu"), 0.0) for op in updates)
        coming = [unit.state_bytes + unit.gradient_bytes * (self.update == "after" and not self.may_hold) for unit in self.units]
        on_link = sum(machine.copy_seconds(nbytes, "dram", self.menu.problem.device_tier) for nbytes in coming)
        return on_cpu / (on_cpu + on_link) if on_cpu + on_link else 0.0

    def run(self) -> Chosen:
        alone = self._activations_alone()
        if alone is not None and (enough := self._without_moving(alone)) is not None:
            return enough
        self.others.learn(Lesson(self.menu, self.whole, self.when, tuple(self.tiers), self.min_sent_bytes))
        promising = self._begin([*self._seeds] or self._promising)
        self._improve(promising)
        best = self.tries.found()[1]
        if alone is not None and best.seconds > alone.seconds * WORTH_IT:
            best = alone
        return self._closer(best)

    def _activations_alone(self) -> Chosen | None:
        """With all state where it was; None if that does not fit."""
        alone = self.tries.at(Split()) if self.looks.resident_bytes({}) < self.menu.problem.budget_bytes else None
        if alone is None and self.around.least_bytes is not None and self.around.least_bytes - self.menu.problem.budget_bytes > self._movable_bytes:
            self.around.refuse()
        return alone

    def _without_moving(self, alone: Chosen) -> Chosen | None:
        """What to answer where state is not worth moving; None where it may be."""
        if self._movable_bytes < LITTLE * self.menu.problem.budget_bytes:
            return self._closer(alone)
        if alone.seconds <= GOOD_ENOUGH * keeping_everything(self.menu)[0]:
            return alone
        if alone.seconds * WORTH_IT <= self._line.least() * OUT_OF_REACH:
            return self._closer(alone)
        return None

    @cached_property
    def _movable_bytes(self) -> int:
        return sum(unit.state_bytes + unit.parameter_bytes + unit.gradient_bytes for unit in self.units)

    def _begin(self, promising: Sequence[Split]) -> Sequence[Split]:
        """A first plan, from the most promising splits; and those of them that are worth more."""
        self._begin_to_send()
        looked_at = self._looked_at(promising)
        if looked_at:
            seconds = self.looks.seconds
            near = [split for split in looked_at if seconds[split] <= seconds[looked_at[0]] * WORTH_PLANNING]
            first = {split.state: split for split in reversed(near)}  # those with as much state elsewhere are much alike
            promising = sorted(first.values(), key=seconds.__getitem__)[:LOOKED_AT]
            self._plan_without_sending(promising)
        else:
            self._begin_barely(promising)
            count = len(self.units)
            if self.tries.best() is None and not self.tries.may_fit(Split(count, count)):  # nothing is lighter than that
                self.tries.at(Split())  # which says what is needed
                self.around.refuse()
        if self.others:
            self._sent_by_others()
        else:
            self._send()
        if self.tries.best() is None:
            self._begin_anywhere(promising)
        return promising

    def _begin_anywhere(self, promising: Sequence[Split]) -> None:
        for split in promising:
            self.tries.at(replace(split, held=0.0), (True,))
        count = len(self.units)
        numbers = sorted({round(share * count) for share in SHARES})
        for streamed in (self.balance, 0.0):  # what passes through the device takes room there, too
            if self.tries.best() is None:
                self.tries.at(Split(count, 0, streamed))
                for parameters in reversed(numbers[1:]):
                    self.tries.at(Split(count, parameters, streamed))
        if self.tries.best() is None and self.tries.at(Split()) is None:  # which says what is needed
            self.around.refuse()

    def _improve(self, promising: Sequence[Split]) -> None:
        self.tries.until(DESCENT_SHARE, self._descend)
        self._divide_the_link()
        for split in promising if True in self._ways() else ():  # with the time that is left
            self.tries.at(split, (True,))
        for streamed in (0.0, self.balance):
            split = self.tries.best_split()
            self.tries.at(replace(split, streamed=streamed), (self.tries.sends(split),))
        self._descend()
        for split in self._promising if not self.tries.is_over() else ():  # far from all of that
            self.tries.at(split)
        self._descend()

    @cached_property
    def _promising(self) -> list[Split]:
        """By what the linear program makes of them on a machine whose host memory is shared, the best first: all over, few of each."""
        count = len(self.units)
        line = self._line
        shares = sorted({*HALVES, self.balance})
        found: list[tuple[float, int, Split]] = []
        for state in sorted({round(part * count / GRID) for part in range(1, GRID + 1)} - {0}):
            for parameters in sorted({round(share * state) for share in HALVES}):
                seconds = {streamed: line.with_shares(*Split(state, parameters, streamed).shares_of(count)) for streamed in shares}
                least = min(seconds.values())
                # Of each pair of numbers of regions one share: of those that are as good by these lines, the one that leaves cpu and link some time.
                as_good = [streamed for streamed in shares if seconds[streamed] <= least * AS_GOOD]
                streamed = min(as_good, key=lambda share: abs(share - self.balance))
                found.append((least, len(found), Split(state, parameters, streamed, float(self.may_hold))))
        found.sort()
        best = [split for least, _, split in found if least < float("inf")]
        # Parameters that come and go hold compute up in more ways than these lines know, so they come second.
        return [
            *[split for split in best if not split.parameters][:FIRST_SPLITS],
            *[split for split in best if split.parameters][: FIRST_SPLITS // 2],
        ]

    @cached_property
    def _line(self) -> Bound:
        """The linear program in what the device has besides, on a machine whose host memory is shared."""
        return Bound(replace(self.menu, problem=self.around.busy.with_budget(self._room)), self.update, facts=self.facts)

    @cached_property
    def _room(self) -> int:
        """For state and activations."""
        return max(1, self.menu.problem.budget_bytes - self._besides_bytes)

    @cached_property
    def _seeds(self) -> dict[Split, bool]:
        """And whether activations are sent in them."""
        return Seeds(self.menu, self.splits, self.facts, self.update, float(self.may_hold)).within(self._room, self.tries.is_over)

    def _plan_without_sending(self, splits: Sequence[Split]) -> None:
        self.tries.at_all([(split, False) for split in splits], self.others)
        for split in splits:
            if self.tries.at(split, (False,)) is None and split.held:
                self.tries.at(replace(split, held=0.0), (False,))
        if self.tries.best() is not None:
            self.tries.until(SETTLED_SHARE, self._exchange)

    def _begin_barely(self, splits: Sequence[Split]) -> None:
        """With the first of these, or else with all parameters elsewhere, in which calls keep nothing on the device: that takes a tenth of the time
        of a plan of activations."""
        for split in splits:
            if any(self.tries.barely(one) is not None for one in (split, replace(split, parameters=split.state))):
                return

    def _send(self) -> None:
        """With activations sent, where the linear programs send some."""
        for split in self._sending_seeds:
            found = None if self.tries.is_over() and self.tries.best() is not None else self.senders.near(split)
            if found is not None and self._is_out_of_sight(found[1]):
                return

    @property
    def _sending_seeds(self) -> list[Split]:
        return [split for split, sends in self._seeds.items() if sends]

    def _begin_to_send(self) -> None:
        seeds = {split: states for split in self._sending_seeds if (states := self.splits.states(split))} if self.others and self.tiers else {}
        self.others.begin_to_send((split, self.takes(states)) for split, states in seeds.items())

    def _sent_by_others(self) -> None:
        """What they have found, with what updates of these states take."""
        for split, found in self.others.sent(self.tries.deadline - self.tries.clock.now()):
            states = self.splits.states(split)
            self.tries.tried[split, True] = found if self._is_out_of_sight(found) else self.around.with_activations_of(states or {}, found)
        if (sent := self.tries.best((True,))) is not None and not self._is_out_of_sight(sent[1]):
            self._exchange_from(*sent)

    def _is_out_of_sight(self, chosen: Chosen) -> bool:
        best = self.tries.best()
        return best is not None and chosen.seconds > OUT_OF_SIGHT * best[1].seconds

    def _ways(self) -> Sequence[bool]:
        """With and without activations that are sent; without, where others have found that it is far better."""
        sent = self.tries.best((True,))
        return (False,) if self.others and sent is not None and self._is_out_of_sight(sent[1]) else BOTH

    def _looked_at(self, seeds: Sequence[Split]) -> list[Split]:
        """What a quick look at these and at what is near the best of them finds, the best first."""
        until = self.tries.began + LOOKS_SHARE * (self.tries.deadline - self.tries.began)
        looks = self.looks
        looks.at_all(seeds, self.others)
        for seed in seeds:
            if self.tries.clock.now() < until or not looks.seconds:
                self._look(seed)
        if not looks.seconds:  # nothing fits in which no activation leaves
            return []
        best = looks.best()[0]
        left = self._near(best)
        while left and self.tries.clock.now() < until:
            looks.at_all(left, self.others)
            split = self._look(left.pop(0))
            if split is not None and looks.seconds[split] < looks.seconds[best]:
                best, left = split, self._near(split)
        return looks.best()

    def _look(self, split: Split) -> Split | None:
        self.tries.clock.tick()
        return self.looks.at(split)

    def _near(self, split: Split) -> list[Split]:
        """Large changes before small ones."""
        count, found = len(self.units), []
        for change in (self.descent.grain * times for times in (-2, 2, -1, 1, -4, 4)):
            found += [
                replace(split, streamed=split.streamed + change / count),
                replace(split, parameters=split.parameters + change),
                replace(split, state=split.state + change, parameters=min(split.parameters, max(0, split.state + change))),
                replace(split, state=split.state - change, parameters=split.parameters + self.descent.exchange * change),
            ]
            if self.may_hold:
                found.append(replace(split, held=split.held + change / 8))
        return [one for one in found if one.is_of(count)]

    @cached_property
    def _besides_bytes(self) -> int:
        """What a call of a region takes while it runs, at least, and what updates take all the time: more than the linear program knows of."""
        least = (
            min(max(choice.forward_workspace_bytes or 0, choice.backward_workspace_bytes or 0) for choice in c) for c in self.menu.choices.values()
        )
        states = self.splits.states(Split(len(self.units), 0, self.balance))
        return max(least, default=0) + (self.takes(states)[0] if states else 0)

    def where_they_are(self, states: Mapping[str, Placement], images: int) -> Chosen:
        """Activations around state that stays where it is."""
        host = self.takes(states)[1]
        if host > self.around.host_bytes:
            self.around.lacks["dram"] = host
            self.around.refuse()
        found = [chosen for tiers in ((), self.tiers) if (chosen := self.around.planned(states, tiers, images)) is not None]
        if not found:
            self.around.refuse()
        return min(found, key=lambda chosen: chosen.seconds)

    def _divide_the_link(self) -> None:
        """The best so far with activations that count on less of the link: what is left of it on the whole may not be free when they want it."""
        split, best = self.tries.found()
        states = best.program.states
        tiers = above_disk(states, self.tiers) if True in self._ways() else ()
        for part in OTHER_PARTS if states and tiers else ():
            if self.tries.is_over():
                break
            found, known = self.around.planned(states, tiers, part=part), self.tries.tried.get((split, True))
            if found is not None and (known is None or found.seconds < known.seconds):
                self.tries.tried[split, True] = found

    def _closer(self, chosen: Chosen) -> Chosen:
        """The same states, and activations around them as well as it goes, if there is time left."""
        now = self.tries.clock.now()
        if now + (now - self.tries.began) > self.tries.deadline or chosen.seconds <= NEAR * least_seconds(self.menu, self.update, self.takes):
            return chosen
        states = chosen.program.states
        again = self.around.planned(states, above_disk(states, self.tiers) if chosen.program.sends else (), IMAGES)
        return chosen if again is None else min(chosen, again, key=lambda one: one.seconds)

    def _descend(self) -> None:
        """From the best so far: exchanges, then ever smaller changes of all numbers. Whether activations are sent, too, is
        asked of the best ones only: the link may have better things to do."""
        count = len(self.units)
        step = max(1, count // 8)
        while True:
            self._exchange()
            split = self.tries.best_split()
            self.tries.at(split, self._ways())
            sends = self.tries.sends(split)
            near = [one for change in (-step, step) for one in self._changed(split, change)]
            self.tries.at_all([(one, sends) for one in near], self.others)
            for one in near:
                if self.tries.at(one, (sends,)) is None and not sends and True in self._ways():  # too large without
                    self.tries.at(one, (True,))
            if self.tries.is_over():
                return
            if self.tries.best_split() == split:
                if step == 1:
                    return
                step = (step + 1) // 2 if step > 2 else 1

    def _changed(self, split: Split, change: int) -> list[Split]:
        """Each number by so many units."""
        count = len(self.units)
        state = min(max(split.state + change, 0), count)
        return [
            replace(split, state=state, parameters=min(split.parameters, state)),
            replace(split, parameters=min(max(split.parameters + change, 0), split.state)),
            replace(split, streamed=min(max(split.streamed + change / count, 0.0), 1.0)),
            *(replace(split, held=held) for held in HALVES if self.may_hold),
        ]

    def _exchange(self) -> None:
        """What is near the best so far with its activations, and the best of that with its own."""
        self._exchange_from(*self.tries.found())

    def _exchange_from(self, split: Split, best: Chosen) -> None:
        split, best = self.descent.settled(split, best)
        self.tries.at(split, (best.program.sends,))
