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
from dataclasses import astuple, dataclass, replace
from functools import partial

from ..errors import InfeasibleBudget
from ..ir import Menu, Placement, Program, When, peak_bytes
from ..ir.placement import FEW_IN_FLIGHT, IN_FLIGHT, region_of
from .bound import least_seconds
from .chance import Chance
from .choose import FEW_IMAGES, IMAGES, Chosen, choose
from .clock import Clock, no_search_for_garbage
from .compact import compact
from .detail import Detail, comes_and_goes
from .helpers import helpers, spare
from .image import image
from .search import Search
from .states import StateUnit, Takes, state_units

CORRECTIONS = 3  # times that host memory is made smaller when a whole program turns out too large
WORTH_HELP = 3.0  # seconds of planning: other processes take half a second to start
WAITING_SHARE = 25  # of the budget, one part in so many for gradients that wait: where there is room, compute waits for fewer of their updates
AHEAD = (2, 1)  # regions before theirs that parameters are on their way: the first of these that fits


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time: until there is a plan, the best ones were looked at in detail, other times for parameters and gradients were tried, changes were
    drawn, and all is over."""

    searched: float
    detailed: float
    timely: float = 0.85
    drawn: float = 0.95
    over: float = 1.0

    def moments(self, began: float, seconds: float) -> Shares:
        """On the clock."""
        return Shares(*(began + share * seconds for share in astuple(self)))


ALONE, TOGETHER = Shares(0.75, 0.8), Shares(0.4, 0.5)  # others have looked at what is near the best by then
QUICKLY = Shares(0.8, 0.8)  # nobody looks at it in detail, or state stays where it is


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
    takes = _remembering(takes)
    in_flight = _in_flight(menu, units)
    many = spare() if tries is None and fixed is None and seconds >= WORTH_HELP else 0
    shares = QUICKLY if fixed is not None or not detailed else TOGETHER if many else ALONE
    until = shares.moments(clock.now(), seconds)
    for _ in range(CORRECTIONS + 1):
        with helpers(many) as others:
            begin = partial(Search, menu, whole, units, tiers, min_sent_bytes, until.searched, takes, clock, others)
            search, found = _searched(begin, When(update, AHEAD[0], in_flight), fixed, IMAGES if detailed else FEW_IMAGES)
            missing = _missing_host_bytes(whole, found) if fixed is None and "nvme" in tiers else 0
            if missing <= 0 and detailed:
                detail = Detail(whole, takes, clock, others, compact=menu)
                found = detail.first(found, search.tries.near(found), until.detailed)
                chance = Chance(whole, detail, clock, others) if fixed is None else None
                found = _nearby(found, detail, chance, until, known)
                found = detail.truly(found)
        if missing <= 0:
            break
        machine = menu.problem.machine
        menu = replace(menu, problem=replace(menu.problem, machine=machine.with_capacity("dram", machine.capacity("dram") - 2 * missing)))
    return _explained(menu, found, update, takes) if explained else found


def _nearby(found: Chosen, detail: Detail, chance: Chance | None, until: Shares, known: Program | None) -> Chosen:
    """The best of what is like it, by other times and by changes that are drawn, or the known one. Without chance: state stays where it is."""
    if chance is not None:
        found = detail.where_they_come_anyway(found, until.timely)
    found = detail.in_time(found, until.timely)
    if known is not None:
        found = detail.faster(found, known)
    return found if chance is None else detail.in_time(chance.better(found, until.drawn), until.over)


def _searched(search: Callable[[When], Search], when: When, fixed: Mapping[str, Placement] | None, images: int) -> tuple[Search, Chosen]:
    """With parameters that come early; and later, which takes less memory, if there is time left or else no plan."""
    found: list[tuple[Search, Chosen]] = []
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
