"""Activations and lasting state in one budget: which regions' state leaves the device, where it is updated, and what is left for activations.

State leaves from the end of the model on: the next forward needs the first layers first, so theirs is updated soonest, on the device. How many
regions, how many of them without their parameters, how their updates are shared between the cpu and the link, and for how many of those that come to
the device gradients wait there, are four numbers. A linear program of a few lines (bound.py) says near which of them to begin (seeds.py). Quick looks
at these and at what is near (looks.py) choose the few that are tried out (tries.py): activations are planned in what is left (around.py), and the
whole program is judged and simulated. Then what is near the best is (descent.py), and what sends activations (senders.py). Where the host has cores
to spare, other processes look and plan, many at a time (helpers.py). Two resources decide: a cpu that updates, and a link that carries gradients and
parameters besides activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from ..errors import InfeasibleBudget
from ..ir import Menu, Placement, Program, When, peak_bytes
from ..ir.placement import FEW_IN_FLIGHT, IN_FLIGHT, region_of
from .around import Around
from .bound import Bound, least_seconds
from .chance import Chance
from .choose import FEW_IMAGES, IMAGES, Chosen, choose, keeping_everything
from .clock import Clock, no_search_for_garbage
from .compact import compact
from .descent import Descent
from .detail import Detail, comes_and_goes
from .facts import Facts
from .helpers import Helpers, Lesson, helpers, spare
from .image import image
from .looks import Looks
from .seeds import Seeds
from .senders import Senders
from .splits import Split, Splits
from .states import StateUnit, Takes, state_units
from .tries import BOTH, Tries, above_disk

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVES = (0.0, 0.5, 1.0)
GRID = 4  # numbers of regions whose state leaves that are put in order
FIRST_SPLITS = 6  # so many of the best are tried before what is near the best of them
CORRECTIONS = 3  # times that host memory is made smaller when a whole program turns out too large
GOOD_ENOUGH = 1.01  # of the time that keeping everything takes: nothing that moves state can gain more than the rest
LITTLE = 0.05  # of the budget: lasting state of less than this is not worth moving where activations alone fit
WORTH_IT = 0.95  # moving state must gain this much over leaving it: it takes host memory, and predictions are better for what stays
OUT_OF_REACH = 1.03  # of what the linear program promises: so near to it no plan comes that moves state
AS_GOOD = 1.01  # of the least that the linear program finds
OUT_OF_SIGHT = 1.02  # of the best plan's time: what is near it is not better
NEAR = 1.02  # of what no plan could beat: what is left to gain is not worth looking for
WORTH_HELP = 3.0  # seconds of planning: other processes take half a second to start
QUICK_SHARE = 0.8  # of the time, for a plan that nobody looks at in detail; what is left is for what comes before and after
SEARCHED_SHARE, DETAILED_SHARE, DRAWN_SHARE = 0.75, 0.8, 0.95  # of the time: until there is one, was looked at in detail, and was changed by chance
SEARCHED_BY_MANY, DETAILED_BY_MANY = 0.4, 0.5  # the same where others look, too: by then they have looked at what is near the best
TIMELY_SHARE = 0.85  # of the time, until other times for parameters and gradients are tried
LOOKS_SHARE, LOOKED_AT = 0.25, 4  # of the time for quick looks at splits; and how many of the best by these are planned
WORTH_PLANNING = 1.04  # of the best look: plans are about as far apart as looks are
SETTLED_SHARE = 0.65  # of the time, until activations are sent
DESCENT_SHARE = 0.85  # of the time for all of that, until other parts of the link are tried
OTHER_PARTS = (1.0, 0.25)  # of what is left of the link, for activations
WAITING_SHARE = 25  # of the budget, one part in so many for gradients that wait: where there is room, compute waits for fewer of their updates
AHEAD = (2, 1)  # regions before theirs that parameters are on their way: the first of these that fits


@no_search_for_garbage()
def choose_jointly(
    menu: Menu,
    *,
    update: str = "after",
    tiers: Sequence[str] = ("dram",),
    min_sent_bytes: int = 0,
    seconds: float = 10.0,
    tries: int | None = None,
    explained: bool = True,
    detailed: bool = True,
    fixed: Mapping[str, Placement] | None = None,
    known: Program | None = None,
    takes: Takes = lambda states: (0, 0),
) -> Chosen:
    """The fastest program found in so many seconds, or `tries`, which alone make two searches equal; more than those only to find one at all.
    `fixed`: state is already where these say. `known`: one that is to be beaten. `takes`: what whoever runs updates holds on the device for them all
    the time, and of host memory in all. `explained`: it says how far it is from what no plan could beat. `detailed`: what is best is looked at with
    all updates one by one."""
    whole = menu
    if menu.homes:
        menu = compact(menu)
    units = state_units(menu.problem.graph, menu.homes)
    if not units:
        return _explained(menu, choose(menu, tiers=tiers, min_sent_bytes=min_sent_bytes), update, takes)
    clock, seconds = Clock(tries is not None), seconds if tries is None else tries
    began = clock.now()
    takes = _remembering(takes)
    in_flight = _in_flight(menu, units)
    many = spare() if tries is None and fixed is None and seconds >= WORTH_HELP else 0
    searched, looked_at = (SEARCHED_BY_MANY, DETAILED_BY_MANY) if many else (SEARCHED_SHARE, DETAILED_SHARE)
    deadline = began + (searched if detailed and fixed is None else QUICK_SHARE) * seconds
    for _ in range(CORRECTIONS + 1):
        with helpers(many) as others:
            begin = partial(_Search, menu, whole, units, tiers, min_sent_bytes, deadline, takes, clock, others)
            search, found = _searched(begin, When(update, AHEAD[0], in_flight), fixed, IMAGES if detailed else FEW_IMAGES)
            missing = _missing_host_bytes(whole, found) if fixed is None and "nvme" in tiers else 0
            if missing <= 0 and detailed:
                detail = Detail(whole, takes, clock, others, compact=menu)
                found = detail.first(found, search.tries.near(found), began + looked_at * seconds)
                until = began + TIMELY_SHARE * seconds
                found = detail.in_time(detail.where_they_come_anyway(found, until) if fixed is None else found, until)
                if known is not None:
                    found = detail.faster(found, known)
                if fixed is None:
                    found = Chance(whole, detail, clock, others).better(found, began + DRAWN_SHARE * seconds)
                    found = detail.in_time(found, began + seconds)
                found = detail.truly(found)
        if missing <= 0:
            break
        machine = menu.problem.machine
        menu = replace(menu, problem=replace(menu.problem, machine=machine.with_capacity("dram", machine.capacity("dram") - 2 * missing)))
    return _explained(menu, found, update, takes) if explained else found


def _searched(search: Callable[[When], _Search], when: When, fixed: Mapping[str, Placement] | None, images: int) -> tuple[_Search, Chosen]:
    """With parameters that come early; and later, which takes less memory, if there is time left or else no plan."""
    found: list[tuple[_Search, Chosen]] = []
    for ahead in AHEAD:
        if found and (found[0][0].tries.is_over() or not comes_and_goes(found[0][1].program)):
            break
        one = search(when._replace(ahead=ahead))
        try:
            found.append((one, one.run() if fixed is None else one.where_they_are(fixed, images)))
        except InfeasibleBudget:
            if not found and ahead == AHEAD[-1]:
                raise
    return min(found, key=lambda one: one[1].seconds)


def _in_flight(menu: Menu, units: Sequence[StateUnit]) -> int:
    """Regions whose gradients may wait on the device, to begin with."""
    regions = {call.module for call in menu.problem.graph.calls}
    nbytes = Counter[str]()
    for unit in units:
        nbytes[region_of(unit.path, regions)] += unit.gradient_bytes
    room = menu.problem.budget_bytes / WAITING_SHARE
    return min(max(round(room / max(1, *nbytes.values())), FEW_IN_FLIGHT), IN_FLIGHT)


def _remembering(takes: Takes) -> Takes:
    """To be asked again and again: whoever knows looks at all parameters of a model."""
    known: dict[frozenset[tuple[str, Placement]], tuple[int, int]] = {}

    def asked(states: Mapping[str, Placement]) -> tuple[int, int]:
        key = frozenset(states.items())
        if key not in known:
            known[key] = takes(states)
        return known[key]

    return asked


def _missing_host_bytes(menu: Menu, found: Chosen) -> int:
    """Updates one by one pass through host memory otherwise than those of a module at once."""
    made = image(menu, found.program)
    return peak_bytes(made.problem, made.schedule)["dram"] - menu.problem.machine.capacity("dram")


def _explained(menu: Menu, chosen: Chosen, update: str, takes: Takes) -> Chosen:
    least = least_seconds(menu, update, takes)
    above = max(0.0, chosen.seconds / least - 1)
    return replace(
        chosen, program=replace(chosen.program, words=(f"at most {above:.1%} above what no plan of these regions could beat in this memory",))
    )


class _Search:
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
        count = len(self.units)
        numbers = sorted({round(share * count) for share in SHARES})
        alone = self.tries.at(Split()) if self.looks.resident_bytes({}) < self.menu.problem.budget_bytes else None
        movable = sum(unit.state_bytes + unit.parameter_bytes + unit.gradient_bytes for unit in self.units)
        if alone is None and self.around.least_bytes is not None and self.around.least_bytes - self.menu.problem.budget_bytes > movable:
            self.around.refuse()
        if alone is not None and movable < LITTLE * self.menu.problem.budget_bytes:
            return self._closer(alone)
        if alone is not None and alone.seconds <= GOOD_ENOUGH * keeping_everything(self.menu)[0]:
            return alone
        if alone is not None and alone.seconds * WORTH_IT <= self._line.least() * OUT_OF_REACH:
            return self._closer(alone)
        self.others.learn(Lesson(self.menu, self.whole, self.when, tuple(self.tiers), self.min_sent_bytes))
        promising = [*self._seeds] or self._promising
        self._begin_to_send()
        looked_at = self._looked_at(promising)
        if not looked_at:
            self._begin_barely(promising)
            if self.tries.best() is None and not self.tries.may_fit(Split(count, count)):  # nothing is lighter than that
                self.tries.at(Split())  # which says what is needed
                self.around.refuse()
        seconds = self.looks.seconds
        near = [split for split in looked_at if seconds[split] <= seconds[looked_at[0]] * WORTH_PLANNING]
        first = {split.state: split for split in reversed(near)}  # those with as much state elsewhere are much alike
        promising = sorted(first.values(), key=seconds.__getitem__)[:LOOKED_AT] or promising
        if looked_at:
            self._plan_without_sending(promising)
        if self.others:
            self._sent_by_others()
        else:
            self._send()
        if self.tries.best() is None:
            for split in promising:
                self.tries.at(replace(split, held=0.0), (True,))
        for streamed in (self.balance, 0.0):  # what passes through the device takes room there, too
            if self.tries.best() is None:
                self.tries.at(Split(count, 0, streamed))
                for parameters in reversed(numbers[1:]):
                    self.tries.at(Split(count, parameters, streamed))
        if self.tries.best() is None and self.tries.at(Split()) is None:  # which says what is needed
            self.around.refuse()
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
        best = self.tries.found()[1]
        if alone is not None and best.seconds > alone.seconds * WORTH_IT:
            best = alone
        return self._closer(best)

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
