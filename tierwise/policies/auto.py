"""auto: where updates run, where their state lives, what leaves and what is computed again, tried out together on the simulator.

Paper    none: Tierwise's own.
Idea     the processors and links of a machine idle at different times. Updates can run on the cpu under the device's work, their state can be in the
         host's memory and come when it is used, gradients can go with their update, and only then do activations have to be sent or made again.
Rule     a plan is a few numbers: the order (updates at the end, or each behind its gradient), how much of the updates the cpu does, how much state is
         streamed, how many activations are sent (first those whose copies the links hide), and by what rule the rest is dropped until all
         fits. Each number is moved up and down, by less and less, as long as the simulated step gets shorter. Other policies' plans for the same
         step, and for the best reshaped one, are the floor.
Differs  nothing lossy is used. An update may run before backward is over: what happens to gradients before it must be in the graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ..errors import BadInput, InfeasibleBudget, InvalidSchedule, MissingTier, OverCapacity, RecomputeLimit, TierwiseError
from ..ir import Phase, Problem, Schedule, check_schedule, peak_bytes
from ..simulate import lower_bound_seconds, step_seconds
from ..units import format_bytes
from . import capuchin, g10
from ._gaps import Gap, build, device_bytes
from ._lasting import movable
from ._nodes import Nodes, evict_in_order, runs_of, schedule_of
from ._reshaped import Reshaped, evenly, own_state, updates_first
from ._runtime import least_on_demand
from ._sent import WithSent, placed, sendable
from ._stages import FIRST_ANSWERS

DECIDES = "all of it: order, place of updates and state, swap or recompute"
FIDELITY = "ours"
EXECUTABLE = "simulated only: it runs updates between the ops of backward; what runs on tensors is chosen from what regions can do (lower/choose.py)"
EXACTNESS = "exact if what happens to gradients before the update is in the graph"

SWAPPING = (capuchin.plan, g10.plan)
SWAPPING_QUICKLY = (partial(capuchin.plan, feedback_rounds=0), g10.plan)
BETTER = 1 - 1e-6  # of the seconds so far, to be worth another round
TURN_SHARE = 0.9  # of the time or tries, for turning knobs
FLOOR_SHARE, SLOW_OPS = 0.7, 200  # until when others are asked about steps for which they may take seconds
SLOW = 0.08  # of the time, for one try
EVERYTHING = 1e9  # more seconds of the cpu than all updates take
FIRST_SHARE, FIRST_OF_LARGE = 0.4, 0.7  # of the time or tries, for the first guesses
MOST, MOST_OF_LARGE = 0.95, 0.8  # of the time, for the search: the answer is judged afterwards, which takes longer the larger a step is
CPU_STEPS, STREAM_STEPS = (0.2, 0.1, 0.05, 0.025), (0.25, 0.125, 0.06, 0.03)
LITTLE = 0.05  # of the budget: what a plan may be too large by and is made again in that much less, and a fifth of this
LIGHT = 0.03  # of the budget: state that is not worth moving for its bytes; a tenth of it of the step, updates not worth it for their time
HEAVY = 0.2  # of the budget: state that matters more than activations
LEAST_SHARE = 0.1  # of a link, that activations may always count on
FEW_OPS = 600  # up to which every op is a node of its own when activations are dropped; beyond, while knobs are turned, runs of ops are
NODES = 300
TIGHT = 0.8  # of the budget: with more than this taken by what lasts, little else has room
MOST_OF_THE_CPU = 0.65  # of all updates, for the cpu, where the rest is streamed
MANY_OPS = 2500  # beyond, policies that swap op by op take longer than all the rest, and are asked only if there is no other plan
SMALL = 24  # ops, of a step small enough for integer programs
SMALL_SECONDS = 2.0  # for each of them
SMALL_TRIES = 36  # what is found in a step so small is found soon
# Quick, and each the best of others somewhere: tried as they are, if there is time. The first two move state, the third activations.
FLOOR = ("superoffload", "ratel", "autoswap", "deeptm", "g10", "checkmate", "rockmate", "tf_swap", "poet")
# For budgets at which nothing of the above has a plan; by how little memory they do with, and how soon they say so.
LAST_RESORTS = (
    "oc_dnn",
    "dragon",
    "cachedarrays",
    "autotm",
    "sentinel",
    "patrickstar",
    "deeptm",
    "zero_infinity",
    "tflms",
    "dtr",
    "layrub",
    "swapadvisor",
)


def plan(problem: Problem, *, plan_seconds: float = 10.0, max_tries: int = 0, tier: str = "dram", processor: str = "cpu") -> Schedule:
    """The best plan found in `plan_seconds` of the processor, or after `max_tries` plans if that is given, which alone makes two searches equal."""
    if plan_seconds <= 0 or max_tries < 0:
        raise BadInput(f"plan_seconds is {plan_seconds:g} and max_tries {max_tries}; give more than 0 seconds, and 0 tries for no such limit")
    if (lacking := _lacking_bytes(problem)) > 0 and tier in problem.machine.tier_named:  # nobody need be asked
        there = problem.machine.capacity(tier)
        raise OverCapacity(0, f"what lasts does not fit anywhere by {format_bytes(lacking)}", tier=tier, needed_bytes=there + lacking)
    search = _Search(problem, tier, processor, math.inf if max_tries else plan_seconds, max_tries or math.inf)
    search.run()
    if search.best is None:
        raise InfeasibleBudget(
            f"no plan within {format_bytes(problem.budget_bytes)} was found, by any of {len(search.asked) + 1} policies",
            least_bytes=search.least_bytes,
        )
    return replace(search.best, notes=tuple(search.notes()))


def _lacking_bytes(problem: Problem) -> int:
    """By how much parameters and optimizer state are more than the budget and all other tiers together."""
    elsewhere = sum(tier.capacity_bytes for tier in problem.machine.tiers if tier.name != problem.device_tier)
    return problem.graph.lasting_bytes - problem.budget_bytes - elsewhere


@dataclass(frozen=True, slots=True)
class Knobs:
    """What is tried."""

    early: bool = False  # updates run right behind their gradients, not at the end
    cpu: float = 0.0  # updates on the cpu, in seconds of the cpu as a share of the step
    during: bool = False  # they run as their gradients arrive, not under the next forward
    away: bool = False  # the parameters they update live elsewhere, too
    streamed: float = 0.0  # the share of the other updates' state that lives elsewhere and comes when it is used
    window: float = 0.05  # of the budget, for such state ahead of its use
    sent: int = 0  # activations that leave and return
    dear: bool = True  # of these, first the dearest to compute again; else the longest idle
    rule: int = 0  # by which of FIRST_ANSWERS the rest is dropped; beyond them, which of SWAPPING does as it likes
    fine: bool = True  # op by op; and who swaps may look at what it did


class _Search:
    """The shortest step so far, and what was tried."""

    def __init__(self, problem: Problem, tier: str, processor: str, seconds: float, tries: float) -> None:
        self.problem, self.tier, self.processor = problem, tier, processor
        self.began, self.seconds_limit, self.max_tries = time.process_time(), seconds, tries
        self.last_try = 0.0  # seconds that one took
        self.slow: set[int] = set()  # rules that take too long to be tried again and again
        self.best: Schedule | None = None
        self.best_seconds = math.inf
        self.best_knobs: Knobs | None = None
        self.made_by = ""
        self.tried: dict[Knobs, float] = {}
        self.asked: list[str] = []  # other policies
        self.least_bytes: int | None = None
        links, device = problem.machine.link_between, problem.device_tier
        self.ops, self.large = 0, False
        self.can_send = (device, tier) in links and (tier, device) in links
        self._shapes: dict[tuple[bool, tuple[int, ...], bool, bool, tuple[int, ...], int], _Shape] = {}
        self._simulated: dict[tuple[_Shape, int, bool, int, bool], float] = {}

    # -- the order of things ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        everything = build(self.problem)
        if peak_bytes(self.problem, everything)[self.problem.device_tier] <= self.problem.budget_bytes:
            self.offer(everything, "everything is kept")
        self.ops = len(Reshaped(self.problem, self._early).places)
        self.large, is_small = self.ops > MANY_OPS, len(self.problem.graph.ops) <= SMALL
        if is_small:
            self.max_tries = min(self.max_tries, SMALL_TRIES)
        starts = self._try_starts()
        if is_small:
            self._solve()
        found = self._try_op_by_op(starts)
        self._ask_first()
        for start in found[:1]:
            self._turn(start)
        self._ask_others()
        for start in found[1:2]:
            self._turn(start)
        if self.best is None:
            self._last_resorts()

    def _try_starts(self) -> list[Knobs]:
        """Those that fit, the best first."""
        fine, share = self.ops <= FEW_OPS, FIRST_OF_LARGE if self.large else FIRST_SHARE
        starts = [replace(knobs, fine=fine) for knobs in self._starts()]
        for knobs in sorted(starts, key=self._is_tight) if self.large else starts:
            if not (self.is_over(share) if self.best is not None else self.is_spent()):
                self.seconds(knobs)
        if self.best is None:
            last = [replace(knobs, fine=fine) for knobs in self._last_starts()]
            for knobs in last:
                if not self.is_spent():
                    self.seconds(knobs)
            starts += last
        return self._fitting(starts)

    def _try_op_by_op(self, starts: Sequence[Knobs]) -> Sequence[Knobs]:
        """The best of these with every op a node of its own, by each rule; and all that fit, the best first."""
        if self.ops <= FEW_OPS or self.large or not starts:
            return starts
        for rule in range(len(FIRST_ANSWERS)):
            if not self.is_over():
                self.seconds(replace(starts[0], fine=True, rule=rule))
        return self._fitting(self.tried)

    def _fitting(self, tried: Iterable[Knobs]) -> list[Knobs]:
        return sorted((knobs for knobs in tried if self.tried.get(knobs, math.inf) < math.inf), key=self.tried.__getitem__)

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of what may be spent is spent, or would be with another try and whoever judges the answer."""
        return self.is_spent(share, reserved=2 * self.last_try if share == 1.0 else 0.0)

    def is_spent(self, share: float = 1.0, reserved: float = 0.0) -> bool:
        """Whether this share of it is, with so many seconds more."""
        spent = time.process_time() - self.began + reserved
        return (
            spent > share * (MOST_OF_LARGE if self.large else MOST) * self.seconds_limit
            or len(self._simulated) + len(self.asked) >= share * self.max_tries
        )

    @cached_property
    def bound(self) -> float:
        return lower_bound_seconds(self.problem)

    def worth_more(self) -> bool:
        """Whether there may be anything left to gain."""
        return self.best_seconds > self.bound * 1.002

    def _starts(self) -> Iterator[Knobs]:
        """What is good somewhere, the best of it first."""
        swapping = len(FIRST_ANSWERS)
        yield Knobs()
        if self.can_send and not self.large:
            yield Knobs(rule=swapping)
        yield Knobs(early=True)
        if not self.can_send:
            return
        heavy = self._state_bytes > LIGHT * self.problem.budget_bytes
        if heavy and self.large and self._movable:
            yield Knobs(early=True, cpu=0.4, streamed=0.6)
        if self._movable and (heavy or self._update_share > LIGHT / 10):
            for cpu in (0.5, 0.2, 0.8):
                yield Knobs(early=True, cpu=cpu)
                yield Knobs(early=True, cpu=cpu, during=True)
        if heavy:
            for streamed in (1.0, 0.6, 0.3):
                yield Knobs(early=True, streamed=streamed)
                if self._movable:
                    yield Knobs(early=True, cpu=0.4, streamed=streamed)
            if self._movable:
                yield Knobs(early=True, cpu=EVERYTHING, during=True)
                yield Knobs(early=True, cpu=EVERYTHING, during=True, away=True)
                if self.large:
                    yield Knobs(early=True, cpu=round(MOST_OF_THE_CPU * self._cpu_share, 3), during=True, away=True, streamed=1.0)
                else:
                    yield Knobs(early=True, cpu=EVERYTHING, during=True, away=True, rule=swapping)
        if not self.large:
            yield Knobs(early=True, rule=swapping)

    def _last_starts(self) -> Iterator[Knobs]:
        """What does with little memory, if nothing else has fitted."""
        if self.can_send:
            last = len(FIRST_ANSWERS) + len(SWAPPING) - 1
            yield Knobs(early=True, rule=last)
            yield Knobs(early=True, streamed=1.0, rule=last)

    def _is_tight(self, knobs: Knobs) -> bool:
        """Whether what lasts leaves so little room that a plan is long in the making, and seldom found."""
        return self._shape(knobs).reshaped.stays_bytes > TIGHT * self.problem.budget_bytes

    def _turn(self, knobs: Knobs, *, coarse: bool = True) -> None:
        """Move one number at a time, first by much, then by less, while the step gets shorter."""
        here = self.seconds(knobs)
        for level in range(len(CPU_STEPS)) if coarse else (len(CPU_STEPS) - 1,):
            improved = True
            while improved and self.worth_more():
                improved = False
                for turned in self._neighbours(knobs, level):
                    if self.is_over(TURN_SHARE):
                        return
                    if (there := self.seconds(turned)) < here * BETTER:
                        knobs, here, improved = turned, there, True

    def _neighbours(self, at: Knobs, level: int) -> Iterator[Knobs]:
        if self.can_send:
            count = len(self._shape(at).sendable(at.dear))
            step = max(1, count >> (level + 2))
            for sent in (at.sent + step, at.sent - step):
                if 0 <= sent <= count:
                    yield replace(at, sent=sent)
            if at.sent:
                yield replace(at, dear=not at.dear)
        swapping = len(SWAPPING) - 1 if self.can_send and not self.large else 0  # the last is for where nothing else fits
        for rule in range(len(FIRST_ANSWERS) + swapping):
            if rule != at.rule and level < 2 and rule not in self.slow:
                yield replace(at, rule=rule)
        if self.can_send and self._movable:
            now = min(at.cpu, self._cpu_share)
            for cpu in (now + CPU_STEPS[level], now - CPU_STEPS[level]):
                if 0 <= cpu <= max(1.2, self._cpu_share):
                    yield replace(at, cpu=round(cpu, 3))
            if at.cpu:
                yield replace(at, during=not at.during)
                yield replace(at, away=not at.away)
        if self.can_send and self._state_bytes:
            for streamed in (at.streamed + STREAM_STEPS[level], at.streamed - STREAM_STEPS[level]):
                if 0 <= streamed <= 1:
                    yield replace(at, streamed=round(streamed, 3))
            if at.streamed:
                yield replace(at, window=at.window * 2)
                yield replace(at, window=at.window / 2)
        yield replace(at, early=not at.early)

    # -- one try ------------------------------------------------------------------------------------------------------------------

    def seconds(self, knobs: Knobs) -> float:
        if knobs not in self.tried:
            shape = self._shape(knobs)
            if knobs.rule < len(FIRST_ANSWERS) and shape.reshaped.stays_bytes > self.problem.budget_bytes:
                self.tried[knobs] = math.inf  # what lasts stays where it is, whatever is dropped
                return math.inf
            what = (shape, knobs.sent, knobs.dear or not knobs.sent, knobs.rule, knobs.fine)
            if what not in self._simulated:
                began = time.process_time()
                self._simulated[what] = self._simulate(shape, knobs)
                took = time.process_time() - began
                if took > SLOW * self.seconds_limit:
                    self.slow.add(knobs.rule)
                if knobs.rule < len(FIRST_ANSWERS) or knobs.rule not in self.slow:  # what is not tried again says nothing of others
                    self.last_try = took
            self.tried[knobs] = self._simulated[what]
        return self.tried[knobs]

    def _simulate(self, shape: _Shape, knobs: Knobs) -> float:
        """Once more in less, if what the planner does not know of, such as gradients that wait, is a little too much. By how much more is left out
        is no matter of these alone: what is dropped goes a node at a time."""
        is_over = self.is_spent if self.best is not None else lambda: False
        less = 0
        for _ in range(2):
            schedule = None
            try:
                schedule = shape.plan(knobs, is_over, less)
                return math.inf if schedule is None else self.offer(schedule, "", knobs)
            except (InvalidSchedule, InfeasibleBudget, OverCapacity, RecomputeLimit):
                over = 0 if schedule is None else self._over_bytes(schedule)
                if not 0 < over < LITTLE * self.problem.budget_bytes:
                    break
                less = over + int(LITTLE / 5 * self.problem.budget_bytes)
        return math.inf

    def _over_bytes(self, schedule: Schedule) -> int:
        """What it takes more than there is; less than nothing if it is not that what is wrong with it."""
        try:
            return peak_bytes(self.problem, schedule)[self.problem.device_tier] - self.problem.budget_bytes
        except InvalidSchedule:
            return -1

    def offer(self, schedule: Schedule, made_by: str, knobs: Knobs | None = None) -> float:
        """How long the schedule takes; if that is the shortest so far and the judge has nothing against it, it is the answer so far."""
        seconds = step_seconds(self.problem, schedule)
        if seconds < self.best_seconds:
            check_schedule(self.problem, schedule)
            self.best, self.best_seconds, self.made_by = schedule, seconds, made_by
            self.best_knobs = knobs or self.best_knobs
        return seconds

    def _shape(self, knobs: Knobs) -> _Shape:
        """Knobs that come to the same have one shape."""
        graph = self.problem.graph
        left = knobs.cpu * self.problem.op_starts[-1]
        moved: list[int] = []
        for op in self._movable if knobs.cpu else ():
            left -= self.problem.costs.op_seconds[op, self.processor]
            if left < 0:
                break
            moved.append(op)
        others = [op for op in self._updates if op not in set(moved)] if knobs.streamed else []
        streamed = evenly(graph, others, knobs.streamed * self._state_of(others))
        window = max(int(knobs.window * self.problem.budget_bytes), max((self._state_of([op]) for op in streamed), default=0)) if streamed else 0
        order = self._early if knobs.early else tuple(range(len(graph.ops)))
        key = (order == self._early, tuple(moved), knobs.during and bool(moved), knobs.away and bool(moved), streamed, window)
        if key not in self._shapes:
            self._shapes[key] = _Shape(
                Reshaped(
                    self.problem, order, tuple(moved), streamed, "backward" if knobs.during else "after", self.tier, self.processor, window,
                    lane_share=max(LEAST_SHARE, 1 - self._busy(moved, streamed)),
                    parameters_away=knobs.away,
                ),
                self.tier,
            )  # fmt: skip
        return self._shapes[key]

    def _busy(self, moved: Sequence[int], streamed: Sequence[int]) -> float:
        """The share of the step for which one direction of the link is taken."""
        if not self.can_send:
            return 0.0
        graph = self.problem.graph
        brought = self._state_of(streamed) + sum(graph.storages[s].nbytes for op in moved for s in graph.ops[op].reads)
        return self.problem.machine.copy_seconds(brought, self.tier, self.problem.device_tier) / max(self.problem.op_starts[-1], 1e-12)

    # -- what there is ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _early(self) -> tuple[int, ...]:
        return updates_first(self.problem.graph)

    @cached_property
    def _updates(self) -> list[int]:
        """In the order in which their gradients come."""
        return [op for op in self._early if self.problem.graph.ops[op].phase is Phase.UPDATE]

    @cached_property
    def _movable(self) -> list[int]:
        if self.processor not in self.problem.machine.processor_named:
            return []
        can = set(movable(self.problem, self.processor))
        return [op for op in self._updates if op in can]

    @cached_property
    def _cpu_share(self) -> float:
        """What all that the cpu can update takes it, of the step."""
        return sum(self.problem.costs.op_seconds[op, self.processor] for op in self._movable) / max(self.problem.op_starts[-1], 1e-12)

    @cached_property
    def _state_bytes(self) -> int:
        return self._state_of(self._updates)

    @cached_property
    def _update_share(self) -> float:
        seconds = self.problem.device_seconds
        return sum(seconds[op] for op in self._updates) / (sum(seconds) or 1.0)

    def _state_of(self, updates: Sequence[int]) -> int:
        return sum(self._state_by_update[op] for op in updates)

    @cached_property
    def _state_by_update(self) -> dict[int, int]:
        graph = self.problem.graph
        return {op: sum(graph.storages[s].nbytes for s in own_state(graph, op)) for op in self._updates}

    # -- other policies -----------------------------------------------------------------------------------------------------------

    def _ask_first(self) -> None:
        """Those who know best about what there is most of."""
        names = FLOOR[:2] if self._state_bytes > HEAVY * self.problem.budget_bytes else FLOOR[2:3]
        for name in () if self.large else names:
            if self.worth_more() and not self.is_over(FLOOR_SHARE):
                self.ask(name)

    def _ask_others(self) -> None:
        share = FLOOR_SHARE if self.ops > SLOW_OPS else 1.0
        for name in () if self.large else FLOOR:
            if name not in self.asked and not self.is_over(share) and (self.best is None or self.worth_more()):
                self.ask(name)

    def ask(self, name: str, **options: float | str) -> None:
        """Another policy's plan for the same step."""
        from . import load

        module = load(name)
        machine = self.problem.machine
        needs: set[str] = getattr(module, "REQUIRES", set())
        if any(need not in machine.tier_named and need not in machine.processor_named for need in needs) or (
            self.tier in needs and not self.can_send
        ):
            return
        if name in ("checkmate", "poet", "swapadvisor", "autotm") and not options:
            options = {"time_limit_seconds": max(0.5, min(3.0, self.began + self.seconds_limit - time.process_time()))}
        self.asked.append(name)
        try:
            self.offer(module.plan(self.problem, **options), f"{name}'s plan")
        except (InfeasibleBudget, OverCapacity) as error:
            self._learn_least(error)
        except (InvalidSchedule, MissingTier, RecomputeLimit):
            pass

    def _learn_least(self, error: TierwiseError) -> None:
        least = getattr(error, "least_bytes", None)
        if least is not None and least > self.problem.budget_bytes:
            self.least_bytes = min(least, self.least_bytes or least)

    def _solve(self) -> None:
        for name in ("checkmate", "poet"):
            if self.best is None or self.worth_more():
                self.ask(name, solver="exact", time_limit_seconds=SMALL_SECONDS)
        for name in ("oc_dnn", "autotm", "swapadvisor"):
            if self.best is None or self.worth_more():
                self.ask(name)

    def _last_resorts(self) -> None:
        """No limit in time: any plan is better than none."""
        for name in (*FLOOR, *LAST_RESORTS):
            if self.best is None and name not in self.asked:
                self.ask(name)
        if self.best is None and self.can_send and (least := least_on_demand(self.problem)) > self.problem.budget_bytes:
            self.least_bytes = min(least, self.least_bytes or least)  # demand paging can do that, if there is room for all else

    def notes(self) -> Iterator[str]:
        gap = self.best_seconds / self.bound - 1 if self.bound else 0.0
        yield f"at most {gap:.1%} above the bound, after {len(self._simulated)} plans of its own and {len(self.asked)} of others"
        if self.made_by:
            yield self.made_by


class _Shape:
    """One way to ask about the step, and plans of its activations."""

    def __init__(self, reshaped: Reshaped, tier: str) -> None:
        self.reshaped, self.tier = reshaped, tier
        self.step = reshaped.step
        self._orders: dict[bool, list[Gap]] = {}

    def sendable(self, dear: bool) -> list[Gap]:
        if dear not in self._orders:
            self._orders[dear] = sendable(self.reshaped.problem, dear_first=dear)
        return self._orders[dear]

    def plan(self, knobs: Knobs, is_over: Callable[[], bool], less_bytes: int = 0) -> Schedule | None:
        """The schedule of the step itself, or None if it does not fit, or not before time is over."""
        problem, back = self.reshaped.problem, self.reshaped.back
        if less_bytes:
            problem = problem.with_budget(problem.budget_bytes - less_bytes)
        if knobs.sent and (sent := placed(problem, self.sendable(knobs.dear), knobs.sent, self.tier, lanes=self.reshaped.lane_share)):
            inner = WithSent(problem, sent, self.tier)
            problem, back = inner.problem, lambda schedule: self.reshaped.back(inner.back(schedule))
        place = knobs.rule - len(FIRST_ANSWERS)
        swapping = SWAPPING if knobs.fine else SWAPPING_QUICKLY
        schedule = _dropped(problem, knobs, is_over) if place < 0 else swapping[place](problem)
        if schedule is None or max(device_bytes(problem, schedule), default=0) > problem.budget_bytes:
            return None
        return back(schedule)


def _dropped(problem: Problem, knobs: Knobs, is_over: Callable[[], bool]) -> Schedule | None:
    """Everything kept while there is room; then what the rule says is dropped, and made again when it is read."""
    everything = build(problem)
    if max(device_bytes(problem, everything), default=0) <= problem.budget_bytes:
        return everything
    ops = range(len(problem.graph.ops))
    nodes = Nodes(problem, [range(op, op + 1) for op in ops] if knobs.fine else runs_of(problem, NODES, only_forward=True), only_forward=True)
    free = problem.budget_bytes - problem.graph.lasting_bytes
    stages = evict_in_order(nodes, free, FIRST_ANSWERS[knobs.rule](nodes), is_over)
    return None if stages is None else schedule_of(problem, nodes.computes(stages))
