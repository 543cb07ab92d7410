"""Activations and lasting state in one budget: which regions' state leaves the device, where it is updated, and what is left for activations.

State leaves from the end of the model on: the next forward needs the first layers first, so theirs is updated soonest, on the device. How many
regions, how many of them without their parameters, how their updates are shared between the cpu and the link, and for how many of those that come to
the device gradients wait there, are four numbers. A linear program of a few lines (bound.py) puts hundreds of them in order in half
a second; the first of them are tried out: `choose` plans activations in what is left, and the whole program is judged and simulated. Then what is
near the best is. Two resources decide: a cpu that updates, and a link that carries gradients and parameters besides activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

from ..errors import InfeasibleBudget, InvalidSchedule, OverCapacity
from ..ir import CallPlan, Menu, Phase, Placement, Problem, Program, check_schedule, peak_bytes
from ..units import exact_bytes, format_bytes
from .bound import Bound, least_seconds
from .choose import FEW_IMAGES, IMAGES, Chosen, choose, keep_everything, keeping_everything, predicted, sending, staying, with_budget
from .clock import Clock
from .compact import compact
from .detail import Detail, comes_and_goes
from .facts import Facts
from .image import Image, image, with_lasting
from .looks import Looks
from .seeds import Seeds
from .splits import Split, Splits
from .states import StateUnit, Takes, lighter, shared, state_units

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVES = (0.0, 0.5, 1.0)
GRID = 4  # numbers of regions whose state leaves that are put in order
FIRST_SPLITS = 6  # so many of the best are tried before what is near the best of them
CORRECTIONS = 3  # times that the room for activations, or host memory, is made smaller when a whole program turns out too large
GOOD_ENOUGH = 1.01  # of the time that keeping everything takes: nothing that moves state can gain more than the rest
LITTLE = 0.05  # of the budget: lasting state of less than this is not worth moving where activations alone fit
WORTH_IT = 0.95  # moving state must gain this much over leaving it: it takes host memory, and predictions are better for what stays
OUT_OF_REACH = 1.03  # of what the linear program promises: so near to it no plan comes that moves state
AS_GOOD = 1.01  # of the least that the linear program finds
HOPELESS = 1.15  # of that
OUT_OF_SIGHT = 1.1  # of the best plan's time: what is near it is not better
CLEARLY = 0.99  # of another plan's time
NEAR = 1.02  # of what no plan could beat: what is left to gain is not worth looking for
LEAST_OF_THE_LINK = 0.02  # of its rate, where updates have it for themselves
EXCHANGES = (-2, -1, 1, 2)  # numbers of units whose state stays instead of parameters, and of those that are updated elsewhere
DETAILED = 1.04  # of the best plan's time: what is looked at in detail
SEARCHED_SHARE = 0.85  # of the time; what is left is for that
LOOKS_SHARE, LOOKED_AT = 0.5, 4  # of the time for quick looks at splits; and how many of the best by these are planned
WORTH_PLANNING = 1.04  # of the best look: plans are about as far apart as looks are
DESCENT_SHARE = 0.75  # of the time for all of that, until other parts of the link are tried
PART_OF_THE_LINK, OTHER_PARTS = 0.5, (1.0, 0.25)  # of what is left of it, for activations
BOTH = (False, True)  # activations stay or are made again; or some are sent, too
AHEAD = (2, 1)  # regions before theirs that parameters are on their way: the first of these that fits


def choose_jointly(
    menu: Menu,
    *,
    update: str = "after",
    tiers: Sequence[str] = ("dram",),
    min_sent_bytes: int = 0,
    seconds: float = 10.0,
    tries: int | None = None,
    explained: bool = True,
    fixed: Mapping[str, Placement] | None = None,
    takes: Takes = lambda states: (0, 0),
) -> Chosen:
    """The fastest program found in so many seconds, or `tries`, which alone make two searches equal; more than those only to find one at all.
    `fixed`: state is already where these say. `takes`: what whoever runs updates holds on the device for them all the time, and of host memory in
    all. `explained`: it says how far it is from what no plan could beat."""
    whole = menu
    if menu.homes:
        menu = compact(menu)
    units = state_units(menu.problem.graph, menu.homes)
    if not units:
        return _explained(menu, choose(menu, tiers=tiers, min_sent_bytes=min_sent_bytes), update, takes)
    clock, seconds = Clock(tries is not None), seconds if tries is None else tries
    began = clock.now()
    deadline = began + SEARCHED_SHARE * seconds
    takes = _remembering(takes)
    for _ in range(CORRECTIONS + 1):
        search, found = _searched(partial(_Search, menu, units, update, tiers, min_sent_bytes, deadline, takes, clock), fixed)
        missing = _missing_host_bytes(whole, found) if fixed is None and "nvme" in tiers else 0
        if missing <= 0:
            detail = Detail(whole, takes, clock)
            found = detail.in_time(detail.first(found, search.near(found), began + seconds))
            break
        machine = menu.problem.machine
        menu = replace(menu, problem=replace(menu.problem, machine=machine.with_capacity("dram", machine.capacity("dram") - 2 * missing)))
    return _explained(menu, found, update, takes) if explained else found


def _searched(search: Callable[[int], _Search], fixed: Mapping[str, Placement] | None) -> tuple[_Search, Chosen]:
    """With parameters that come early; and later, which takes less memory, if there is time left or else no plan."""
    found: list[tuple[_Search, Chosen]] = []
    for ahead in AHEAD:
        if found and (found[0][0].is_over() or not comes_and_goes(found[0][1].program)):
            break
        one = search(ahead)
        try:
            found.append((one, one.run() if fixed is None else one.around(fixed)))
        except InfeasibleBudget:
            if not found and ahead == AHEAD[-1]:
                raise
    return min(found, key=lambda one: one[1].seconds)


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


def _above_disk(states: Mapping[str, Placement], tiers: Sequence[str]) -> tuple[str, ...]:
    """Where activations had better go: not to a disk that is busy with state all the time."""
    busy = any(place.state == "nvme" for place in states.values())
    return tuple(tier for tier in tiers if not (busy and tier == "nvme"))


class _Search:
    def __init__(
        self,
        menu: Menu,
        units: list[StateUnit],
        update: str,
        tiers: Sequence[str],
        min_sent_bytes: int,
        deadline: float,
        takes: Takes,
        clock: Clock,
        ahead: int,
    ) -> None:
        self.clock, self.began, self.ahead = clock, clock.now(), ahead
        self.takes = takes
        self.menu, self.units, self.update = menu, units, update
        self.tiers, self.min_sent_bytes, self.deadline = tiers, min_sent_bytes, deadline
        self.tried: dict[tuple[Split, bool], Chosen | None] = {}
        self.borrowed: dict[Split, Chosen] = {}  # with activations that were planned for another split
        self.planned: dict[tuple[frozenset[tuple[str, Placement]], bool], Chosen | None] = {}  # by states, and whether activations are sent
        self.overflows: dict[tuple[frozenset[tuple[str, Placement]], bool], int] = {}  # of these, bytes of host memory that they lack
        self.on_busy_disk: dict[frozenset[tuple[str, Placement]], Chosen | None] = {}  # with activations sent there, where nothing else was found
        self.short: set[frozenset[tuple[str, Placement]]] = set()  # states that leave the device too little room if all activations stay there
        self.too_large: list[Split] = []  # the splits of these
        self.least_bytes: int | None = None
        self.lacks: dict[str, int] = {}  # below the device: what a plan would have taken of a tier
        self.host_bytes = menu.problem.machine.capacity("dram")
        self.splits = Splits(menu, units, self.lacks, update)
        self.busy = shared(menu.problem, update=update)  # the machine while both update
        self.may_hold = update == "after" and any((h.update, h.gradients) == ("streamed", "device") for homes in menu.homes.values() for h in homes)
        self.balance = self._balance()
        self.looks = Looks(menu, units, self.splits, update, takes, ahead)
        self.facts = Facts.of(menu)
        self.bare: tuple[Mapping[int, CallPlan], Image] | None = None
        parameter_bytes = sum(unit.parameter_bytes for unit in units)
        self.exchange = round(sum(unit.state_bytes for unit in units) / parameter_bytes) if parameter_bytes else 0  # parameters for one unit's state

    def _balance(self) -> float:
        """The share of updates that go through the device when the cpu and the link are done with theirs at the same time."""
        machine, seconds = self.busy.machine, self.busy.costs.op_seconds
        updates = [op for unit in self.units for op in unit.updates]
        on_cpu = sum(seconds.get((op, "cpu"), 0.0) for op in updates)
        coming = [unit.state_bytes + unit.gradient_bytes * (self.update == "after" and not self.may_hold) for unit in self.units]
        on_link = sum(machine.copy_seconds(nbytes, "dram", self.menu.problem.device_tier) for nbytes in coming)
        return on_cpu / (on_cpu + on_link) if on_cpu + on_link else 0.0

    def run(self) -> Chosen:
        count = len(self.units)
        numbers = sorted({round(share * count) for share in SHARES})
        alone = self._try(Split()) if self.looks.resident_bytes({}) < self.menu.problem.budget_bytes else None
        movable = sum(unit.state_bytes + unit.parameter_bytes + unit.gradient_bytes for unit in self.units)
        if alone is None and self.least_bytes is not None and self.least_bytes - self.menu.problem.budget_bytes > movable:
            self._refuse()
        if alone is not None and movable < LITTLE * self.menu.problem.budget_bytes:
            return self._closer(alone)
        if alone is not None and alone.seconds <= GOOD_ENOUGH * keeping_everything(self.menu)[0]:
            return alone
        if alone is not None and alone.seconds * WORTH_IT <= self._line.least() * OUT_OF_REACH:
            return self._closer(alone)
        promising = [*self._seeds] or self._promising()
        looked_at = self._looked_at(promising)
        if not looked_at and not self._may_fit(Split(count, count)):  # nothing is lighter than that
            self._try(Split())  # which says what is needed
            self._refuse()
        seconds = self.looks.seconds
        promising = [split for split in looked_at if seconds[split] <= seconds[looked_at[0]] * WORTH_PLANNING][:LOOKED_AT] or promising
        for split in promising:
            if self._try(split, (False,)) is None and split.held:
                self._try(replace(split, held=0.0), (False,))
        self._send()
        if self._best() is None:
            for split in promising:
                self._try(replace(split, held=0.0), (True,))
        for streamed in (self.balance, 0.0):  # what passes through the device takes room there, too
            if self._best() is None:
                self._try(Split(count, 0, streamed))
                for parameters in reversed(numbers[1:]):
                    self._try(Split(count, parameters, streamed))
        if self._best() is None and self._try(Split()) is None:  # which says what is needed
            self._refuse()
        until, self.deadline = self.deadline, self.began + DESCENT_SHARE * (self.deadline - self.began)
        self._descend()
        self.deadline = until
        self._divide_the_link()
        for split in promising:  # with the time that is left
            self._try(split, (True,))
        for streamed in (0.0, self.balance):
            split = self._best_split()
            self._try(replace(split, streamed=streamed), (self._sends(split),))
        self._descend()
        found = self._best()
        assert found is not None
        best = found[1]
        if alone is not None and best.seconds > alone.seconds * WORTH_IT:
            best = alone
        return self._closer(best)

    def _may_fit(self, split: Split) -> bool:
        """Whether there is a plan for it, be it a good one or not; or there might be with more host memory."""
        return any(self._planned(split, tiers) is not None for tiers in ((), self.tiers)) or bool(self.lacks)

    def _promising(self) -> list[Split]:
        """By what the linear program makes of them on a machine whose host memory is shared, the best first; where it has no shares of its own."""
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
        return Bound(replace(self.menu, problem=self.busy.with_budget(self._room)), self.update, facts=self.facts)

    @cached_property
    def _room(self) -> int:
        """For state and activations."""
        return max(1, self.menu.problem.budget_bytes - self._besides_bytes)

    @cached_property
    def _seeds(self) -> dict[Split, bool]:
        """And whether activations are sent in them."""
        return Seeds(self.menu, self.splits, self.facts, self.update, float(self.may_hold)).within(self._room)

    def _send(self) -> None:
        """With activations sent, where the linear programs send some. Where one of these does not fit they count on memory that is not there: of it,
        and of all others, all parameters leave, and then as many come back as have room."""
        fits = True
        for split in [split for split, sends in self._seeds.items() if sends]:
            fits = fits and self._try(split, (True,)) is not None
            split = split if fits else self._with_parameters_back(replace(split, parameters=split.state), split.parameters)
            found = self.tried.get((split, True)) or self.borrowed.get(split)
            if found is None:
                continue
            # One update more or less that passes through the device is a twentieth of the step, where cpu and link have no time left.
            near = [chosen.seconds for one in self._streamed_near(split) if (chosen := self._with_activations_of(one, found)) is not None]
            best = self._best()
            if best is not None and min([found.seconds, *near]) > best[1].seconds * OUT_OF_SIGHT:
                return

    def _with_parameters_back(self, split: Split, fewest: int) -> Split:
        """As few parameters elsewhere as that split's activations leave room for, but more than these."""
        found, most = self._try(split, (True,)), split.parameters
        while found is not None and most - fewest > 1:
            middle = (fewest + most) // 2
            if self._with_activations_of(replace(split, parameters=middle), found) is None:
                fewest = middle
            else:
                most = middle
        return replace(split, parameters=most)

    def _looked_at(self, seeds: Sequence[Split]) -> list[Split]:
        """What a quick look at these and at what is near the best of them finds, the best first."""
        until = self.began + LOOKS_SHARE * (self.deadline - self.began)
        looks = self.looks
        for seed in seeds:
            if self.clock.now() < until or not looks.seconds:
                self._look(seed)
        if not looks.seconds:  # nothing fits in which no activation leaves
            return []
        best = looks.best()[0]
        left = self._near(best)
        while left and self.clock.now() < until:
            split = self._look(left.pop(0))
            if split is not None and looks.seconds[split] < looks.seconds[best]:
                best, left = split, self._near(split)
        return looks.best()

    def _look(self, split: Split) -> Split | None:
        self.clock.tick()
        return self.looks.at(split)

    def _near(self, split: Split) -> list[Split]:
        """Large changes before small ones."""
        count, found = len(self.units), []
        for change in (-2, 2, -1, 1, -4, 4):
            found += [
                replace(split, streamed=split.streamed + change / count),
                replace(split, parameters=split.parameters + change),
                replace(split, state=split.state + change, parameters=min(split.parameters, max(0, split.state + change))),
                replace(split, state=split.state - change, parameters=split.parameters + self.exchange * change),
            ]
            if self.may_hold:
                found.append(replace(split, held=split.held + change / 8))
        return [one for one in found if one.is_of(count)]

    def _bare(self, program: Program) -> Image:
        """Of what is planned for activations alone: many splits are looked at with the same."""
        if self.bare is None or self.bare[0] is not program.calls:
            self.bare = program.calls, image(self.menu, replace(program, states={}))
        return self.bare[1]

    @cached_property
    def _besides_bytes(self) -> int:
        """What a call of a region takes while it runs, at least, and what updates take all the time: more than the linear program knows of."""
        least = (
            min(max(choice.forward_workspace_bytes or 0, choice.backward_workspace_bytes or 0) for choice in c) for c in self.menu.choices.values()
        )
        states = self.splits.states(Split(len(self.units), 0, self.balance))
        return max(least, default=0) + (self.takes(states)[0] if states else 0)

    def around(self, states: Mapping[str, Placement]) -> Chosen:
        """Activations around state that stays where it is."""
        passing, host = self.takes(states)
        if host > self.host_bytes:
            self.lacks["dram"] = host
            self._refuse()
        found = [chosen for tiers in ((), self.tiers) if (chosen := self._with(states, passing, tiers, IMAGES)) is not None]
        if not found:
            self._refuse()
        return min(found, key=lambda chosen: chosen.seconds)

    def _divide_the_link(self) -> None:
        """The best so far with activations that count on less of the link: what is left of it on the whole may not be free when they want it."""
        best = self._best()
        assert best is not None
        split, states = best[0], best[1].program.states
        tiers = _above_disk(states, self.tiers)
        for part in OTHER_PARTS if states and tiers else ():
            if self.is_over():
                break
            found, known = self._with(states, self.takes(states)[0], tiers, part=part), self.tried.get((split, True))
            if found is not None and (known is None or found.seconds < known.seconds):
                self.tried[split, True] = found

    def _closer(self, chosen: Chosen) -> Chosen:
        """The same states, and activations around them as well as it goes, if there is time left."""
        now = self.clock.now()
        if now + (now - self.began) > self.deadline or chosen.seconds <= NEAR * least_seconds(self.menu, self.update, self.takes):
            return chosen
        states = chosen.program.states
        passing, _ = self.takes(states) if states else (0, 0)
        sends = any(plan.sent for plan in chosen.program.calls.values())
        again = self._with(states, passing, _above_disk(states, self.tiers) if sends else (), IMAGES)
        return chosen if again is None else min(chosen, again, key=lambda one: one.seconds)

    def _descend(self) -> None:
        """From the best so far: exchanges, then ever smaller changes of all numbers. Whether activations are sent, too, is
        asked of the best ones only: the link may have better things to do."""
        count = len(self.units)
        step = max(1, count // 8)
        while True:
            self._exchange()
            split = self._best_split()
            self._try(split)
            sends = self._sends(split)
            for change in (-step, step):
                state = min(max(split.state + change, 0), count)
                parameters = min(max(split.parameters + change, 0), split.state)
                streamed = min(max(split.streamed + change / count, 0.0), 1.0)
                for near in (
                    replace(split, state=state, parameters=min(split.parameters, state)),
                    replace(split, parameters=parameters),
                    replace(split, streamed=streamed),
                    *(replace(split, held=held) for held in HALVES if self.may_hold),
                ):
                    if self._try(near, (sends,)) is None and not sends:  # too large without
                        self._try(near, (True,))
            if self.is_over():
                return
            if self._best_split() == split:
                if step == 1:
                    return
                step = (step + 1) // 2 if step > 2 else 1

    def is_over(self) -> bool:
        return self.clock.now() > self.deadline

    def near(self, best: Chosen) -> list[Chosen]:
        """Others that come near the best, the fastest first."""
        known = [chosen for chosen in (*self.tried.values(), *self.borrowed.values()) if chosen is not None and chosen is not best]
        return sorted((chosen for chosen in known if chosen.seconds <= best.seconds * DETAILED), key=lambda chosen: chosen.seconds)

    def _exchange(self) -> None:
        """Ever better exchanges that leave the device as full as it is: parameters that leave for state that stays, or the other way round, and other
        shares of streamed updates. Each with the activations of the best, and the best of them with its own."""
        count = len(self.units)
        while self.clock.now() < self.deadline:
            found = self._best()
            assert found is not None
            split, best = found
            near = [Split(split.state - change, split.parameters + self.exchange * change, split.streamed, split.held) for change in EXCHANGES]
            fitting = [*(one for one in near if one.is_of(count)), *self._streamed_near(split)]
            seconds = {one: chosen.seconds for one in fitting if (chosen := self._with_activations_of(one, best)) is not None}
            if not seconds:
                return
            first = min(seconds, key=lambda one: seconds[one])
            self._try(first, (any(plan.sent for plan in best.program.calls.values()),))
            if self._best_split() == split:
                return

    def _streamed_near(self, split: Split) -> list[Split]:
        count = len(self.units)
        return [near for change in EXCHANGES if (near := replace(split, streamed=split.streamed + change / count)).is_of(count)]

    def _with_activations_of(self, split: Split, other: Chosen) -> Chosen | None:
        """A split with what was planned for another one's activations, if that fits."""
        states = self.splits.states(split)
        for known in (other, self.borrowed.get(split)):
            if known is not None and known.program.states == states and known.program.calls == other.program.calls:
                return known
        self.clock.tick()
        passing, host = self.takes(states) if states else (0, 0)
        if not states or host > self.host_bytes or passing >= self.menu.problem.budget_bytes:
            return None
        bare = self._bare(other.program)
        bare = replace(bare, problem=bare.problem.with_budget(self.menu.problem.budget_bytes - passing))
        made = with_lasting(bare, states, self.update, self.ahead)
        try:
            check_schedule(made.problem, made.schedule)
        except InvalidSchedule:
            return None
        self.borrowed[split] = predicted(made, self.menu.problem.budget_bytes)
        return self.borrowed[split]

    def _best_split(self) -> Split:
        found = self._best()
        assert found is not None
        return found[0]

    def _sends(self, split: Split) -> bool:
        """Whether what was found for it is clearly better with activations that are sent; such plans take longer to make."""
        stays, sent = (self.tried.get((split, sends)) for sends in BOTH)
        return sent is not None and (stays is None or sent.seconds < CLEARLY * stays.seconds)

    def _best(self) -> tuple[Split, Chosen] | None:
        known = [*((split, chosen) for (split, _), chosen in self.tried.items()), *self.borrowed.items()]
        found = [(chosen.seconds, number, split, chosen) for number, (split, chosen) in enumerate(known) if chosen is not None]
        return min(found)[2:] if found else None

    def _try(self, split: Split, ways: Sequence[bool] = BOTH) -> Chosen | None:
        """With and without sending activations, or one of these."""
        for sends in ways if self.tiers else (False,):
            if (split, sends) in self.tried or (sends and self._keeps_everything(split)):
                continue
            if self.is_over() and self._best() is not None:
                break
            if not sends and any(split.leaves_less_room_than(other) for other in self.too_large):
                self.tried[split, sends] = None
                continue
            self.tried[split, sends] = self._planned(split, self.tiers if sends else ())
        found = [chosen for sends in BOTH if (chosen := self.tried.get((split, sends))) is not None]
        return min(found, key=lambda chosen: chosen.seconds) if found else None

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
            passing, host = self.takes(states) if states else (0, 0)
            if host <= self.host_bytes:
                key = frozenset(states.items()), bool(tiers)
                above = _above_disk(states, tiers)
                if key not in self.planned:  # splits whose numbers come to the same
                    self.planned[key] = self._with(states, passing, above)
                    if key[0] in self.short:
                        self.too_large.append(split)
                chosen, missing = self.planned[key], self.overflows.get(key, 0)
                if chosen is None and not found and len(above) < len(tiers):  # to a busy disk, or with more of the state there
                    if key[0] not in self.on_busy_disk:
                        self.on_busy_disk[key[0]] = self._with(states, passing, tiers)
                    found.append(self.on_busy_disk[key[0]])
                found.append(chosen)
                if not missing or "nvme" not in self.menu.problem.machine.tier_named:
                    break
                short += missing  # what passes through host memory was not counted, or activations have no room there
                continue
            self.lacks["dram"] = host
            short += host - self.host_bytes
        return min((chosen for chosen in found if chosen is not None), key=lambda chosen: chosen.seconds, default=None)

    def _with(
        self, states: Mapping[str, Placement], passing_bytes: int, tiers: Sequence[str], images: int = FEW_IMAGES, part: float = PART_OF_THE_LINK
    ) -> Chosen | None:
        """Activations planned in what these states leave of the budget, with so much held all the time by whoever runs updates; what is sent has that
        part of what is left of the link."""
        self.clock.tick()
        light = lighter(self.menu, states, self.update)
        if tiers and states:
            left = self._with_what_is_left_of_the_link(light.problem, states, part)
            room_below = max(0, self.host_bytes - self.takes(states)[1])
            light = replace(light, problem=replace(left, machine=left.machine.with_capacity("dram", room_below)))
        budget = self.menu.problem.budget_bytes - passing_bytes
        room = budget - (self._passing_bytes(light, states) if states else 0)
        if budget <= 0:
            return None
        menu = with_budget(self.menu, budget)
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
                made = image(menu, replace(program, states=states, update=self.update, ahead=self.ahead) if states else program)
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
            if found or not smaller:
                return min(found, key=lambda chosen: chosen.seconds, default=None)
            room = max(smaller)
        return None

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
        after = self.update == "after"
        carried = {out: state if after else 0, into: parameters + (0 if after else state)}
        lasts = max(on_cpu, (state + coming) / machine.link(*into).bytes_per_second)
        left = {}
        for way, waits in ((out, after), (into, not after)):
            free = max(during[way], lasts if waits else 0.0) - carried[way] / machine.link(*way).bytes_per_second
            left[way] = min(1.0, max(LEAST_OF_THE_LINK, free / max(during[way], 1e-9)))
        return replace(problem, machine=problem.machine.with_rates(lambda link, _, rate: rate * part * left.get((link.src, link.dst), 1.0)))

    def _passing_bytes(self, light: Menu, states: Mapping[str, Placement]) -> int:
        """What passes through the device at its fullest moment, as far as that can be told with everything kept."""
        whole, without = with_lasting(self._kept, states, self.update, self.ahead), image(light, keep_everything(self.menu))
        device = whole.problem.device_tier
        return max(0, peak_bytes(whole.problem, whole.schedule)[device] - peak_bytes(without.problem, without.schedule)[device])

    @cached_property
    def _kept(self) -> Image:
        return image(self.menu, keep_everything(self.menu))

    def _needs(self, nbytes: int) -> None:
        self.least_bytes = nbytes if self.least_bytes is None else min(self.least_bytes, nbytes)

    def _refuse(self) -> NoReturn:
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
