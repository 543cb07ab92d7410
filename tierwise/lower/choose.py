"""The first planner over choices: cheap recomputation, then what the link carries for nothing, then dear recomputation.

For each region class only choices on the lower hull of (saved bytes, seconds) are of interest; going down it, each second buys fewer bytes. The
first calls of the step are idle the longest, so they are the ones that send what they save away; how many of them, and with which choice, is
tried out with the simulator, the others going down the hull until everything fits. What memory holds is a sum over calls, so whether a program
fits is a few additions; only what is simulated is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import InfeasibleBudget, InvalidSchedule
from ..ir import INPUTS, CallPlan, Choice, Copy, Graph, Menu, Program, Role, check_schedule, peak_bytes
from ..ir.program import EVERYTHING
from ..simulate import simulate
from ..units import exact_bytes, format_bytes
from .image import image, outside_storages

DISTANCES = ((1, 1), (2, 1), (2, 2), (4, 2))  # (release, fetch) to try, in calls
AS_FAST = 1.001  # programs so close are equals: of these the one that moves the fewest bytes
WORTH_SENDING = 200  # of the budget, the part above which tensors outside of regions are sent
TRIALS = 9  # numbers of sending calls to try between none and all, then again around the best


@dataclass(frozen=True, slots=True)
class Chosen:
    program: Program
    seconds: float
    peak_bytes: int
    sent_bytes: int


def keep_everything(menu: Menu) -> Program:
    """Every call with the choice that saves the most."""
    graph = menu.problem.graph
    return Program({call.id: CallPlan(menu.choices[call.region][0].name) for call in graph.calls if call.region in menu.choices}, "keep_all")


def choose(menu: Menu, *, tiers: Sequence[str] = ("dram",), min_sent_bytes: int = 0, on_trial: Callable[[], None] = lambda: None) -> Chosen:
    """The fastest program found within the menu's budget; `tiers` are where saved values may go, the fastest first, if they are large enough."""
    kept = _predicted(menu, keep_everything(menu))
    if kept is not None:
        return kept
    search = _Search(menu, tiers, min_sent_bytes)
    found: list[Chosen] = []
    tried: dict[tuple[int, int, int, int], Chosen | None] = {}

    def try_out(sending: int, level: int, release: int, fetch: int) -> float:
        key = (sending, level if sending else 0, release if sending else 1, fetch if sending else 1)
        if key not in tried:
            on_trial()
            program = search.program(*key)
            tried[key] = None if program is None else _predicted(menu, program)
            if (chosen := tried[key]) is not None:
                found.append(chosen)
        chosen = tried[key]
        return chosen.seconds if chosen is not None else float("inf")

    count = len(search.calls)
    levels = range(search.levels) if tiers else ()
    try_out(0, 0, 1, 1)
    for level in levels:
        numbers = sorted({round(count * part / (TRIALS - 1)) for part in range(TRIALS)})
        best = min(numbers, key=lambda sending: (try_out(sending, level, 2, 2), sending))
        step = max(1, count // (TRIALS - 1))
        while step > 1:
            step = (step + 1) // 2
            best = min((best - step, best, best + step), key=lambda sending: (try_out(min(max(sending, 0), count), level, 2, 2), sending))
            best = min(max(best, 0), count)
    if found and (keys := [key for key, chosen in tried.items() if chosen is not None and chosen.seconds <= min(f.seconds for f in found)]):
        sending, level, *_ = keys[0]
        for release, fetch in DISTANCES:
            try_out(sending, level, release, fetch)
    if not found:
        tightest = search.tightest()
        made = image(menu, tightest)
        if (last := _predicted(menu, tightest)) is not None:
            return last
        least = peak_bytes(made.problem, made.schedule)[made.problem.device_tier]
        raise InfeasibleBudget(
            f"budget {format_bytes(menu.problem.budget_bytes)} is below {format_bytes(least)}, what this step needs with everything recomputed "
            f"and sent away that can be; use at least {exact_bytes(least)}, a smaller batch, or fewer trainable parameters",
            least_bytes=least,
        )
    fastest = min(chosen.seconds for chosen in found)
    as_fast = [chosen for chosen in found if chosen.seconds <= fastest * AS_FAST]
    return min(as_fast, key=lambda chosen: (chosen.sent_bytes, chosen.seconds))


def _predicted(menu: Menu, program: Program) -> Chosen | None:
    made = image(menu, program)
    try:
        check_schedule(made.problem, made.schedule)
    except InvalidSchedule:
        return None
    timeline = simulate(made.problem, made.schedule)
    sent = {step.storage for step in made.schedule.steps if isinstance(step, Copy)}
    sent_bytes = sum(made.problem.graph.storages[storage].nbytes for storage in sent)
    return Chosen(made.program, timeline.seconds, timeline.peak_bytes[made.problem.device_tier], sent_bytes)


@dataclass(frozen=True, slots=True)
class _Call:
    id: int
    region: int
    forward: int  # ops of the coarse graph
    backward: int
    input_bytes: int  # of inputs that only this call keeps for backward


class _Search:
    """Memory as a sum over calls: what the step holds besides, what each call adds between its forward and its backward."""

    def __init__(self, menu: Menu, tiers: Sequence[str], min_sent_bytes: int) -> None:
        self.menu, self.tiers, self.min_sent_bytes = menu, tiers, min_sent_bytes
        self.hulls = {region: hull(choices) for region, choices in menu.choices.items()}
        self.levels = max((len(choices) for choices in self.hulls.values()), default=0)
        base = keep_everything(menu)
        # Inputs are kept in the base: whoever drops them is counted as a sender.
        made = image(menu, base)
        graph, coarse = made.problem.graph, made.coarse
        self.budget_bytes = menu.problem.budget_bytes
        self.calls = [
            _Call(call, graph.calls[call].region, coarse.forward[call], coarse.backward[call], _own_input_bytes(graph, coarse.inputs[call], call))
            for call in sorted(coarse.forward, key=coarse.forward.__getitem__)
            if call in coarse.backward
        ]
        inside = [call.id for call in self.calls]
        self.outside = {  # bytes, and the ops after which they may leave, by how many calls come before
            gap: sum(graph.storages[storage].nbytes for storage in outside_storages(graph, coarse, inside, gap)) for gap in range(len(inside))
        }
        self.always = [plan for plan in base.calls.items() if plan[0] not in {call.id for call in self.calls}]
        held = list(graph.live_bytes)
        for call in self.calls:
            choice = menu.choices[call.region][0]
            for op in range(call.forward, call.backward + 1):
                held[op] -= choice.saved_bytes
            held[call.forward] -= graph.ops[call.forward].workspace_bytes
            held[call.backward] -= graph.ops[call.backward].workspace_bytes
        self.besides = held
        self._scratch = {
            (call.id, choice.name): _workspace(graph.ops[call.forward].workspace_bytes, graph.ops[call.backward].workspace_bytes, choice, menu)
            for call in self.calls
            for choice in menu.choices[call.region]
        }

    def program(self, sending: int, level: int, release: int, fetch: int) -> Program | None:
        """The first `sending` calls send what they save at this level of their hull; the others go down theirs until all fits, or None."""
        senders = {call.id for call in self.calls[:sending]}
        levels = {call.id: min(level, len(self.hulls[call.region]) - 1) if call.id in senders else 0 for call in self.calls}
        steps = self._downward([call for call in self.calls if call.id not in senders])
        low, high = 0, len(steps)
        if not self._fits(self._after(levels, steps), senders, release, fetch):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._fits(self._after(levels, steps[:middle]), senders, release, fetch):
                high = middle
            else:
                low = middle + 1
        return self._program(self._after(levels, steps[:low]), senders, release, fetch)

    def tightest(self) -> Program:
        """The program that takes the least memory, whatever it costs; what is sent away has room where it goes."""
        found: list[tuple[int, int, Program]] = []
        deepest = {call.id: len(self.hulls[call.region]) - 1 for call in self.calls}
        for level in range(max(1, self.levels)):
            at_level = {call.id: min(level, deepest[call.id]) for call in self.calls}
            for sending in range(len(self.calls) + 1) if self.tiers else (0,):
                senders = {call.id for call in self.calls[:sending]}
                for levels in (at_level, {call: at_level[call] if call in senders else deepest[call] for call in at_level}):
                    program = self._program(levels, senders, 1, 1)
                    if program is not None:
                        found.append((self._peak(levels, senders, 1, 1), len(found), program))
        return min(found)[2]

    def _program(self, levels: dict[int, int], senders: set[int], release: int, fetch: int) -> Program | None:
        calls = dict(self.always)
        machine = self.menu.problem.machine
        room = {tier: machine.capacity(tier) for tier in self.tiers}
        for link in machine.links:  # buffers on the way to a tier below
            if link.staging_tier in room and {link.src, link.dst} & {*self.tiers}:
                room[link.staging_tier] -= link.staging_bytes
        for call in reversed(self.calls):  # who is idle the shortest gets the fastest tier
            choice = self.hulls[call.region][levels[call.id]]
            if call.id not in senders:
                calls[call.id] = CallPlan(choice.name)
                continue
            names = tuple(value.name for value in choice.saved if value.nbytes >= self.min_sent_bytes)
            sent = names + ((INPUTS,) if choice.reads_inputs and call.input_bytes >= max(1, self.min_sent_bytes) else ())
            if not sent:
                calls[call.id] = CallPlan(choice.name)
                continue
            nbytes = choice.saved_bytes + (call.input_bytes if choice.reads_inputs else 0)
            tier = next((tier for tier in self.tiers if room[tier] >= nbytes), None)
            if tier is None:
                return None
            room[tier] -= nbytes
            calls[call.id] = CallPlan(choice.name, sent, tier, release, fetch)
        outside = {}
        for gap, nbytes in self._sent_outside(senders):
            tier = next((tier for tier in self.tiers if room[tier] >= nbytes), None)
            if tier is None:
                return None
            room[tier] -= nbytes
            outside[gap] = CallPlan("", (EVERYTHING,), tier, release, fetch)
        return Program(calls, "auto", outside=outside)

    def _sent_outside(self, senders: set[int]) -> list[tuple[int, int]]:
        """What ops outside of regions save goes with the calls behind them, where it is too much to ignore."""
        least = self.budget_bytes // WORTH_SENDING
        return [(gap, nbytes) for gap, nbytes in self.outside.items() if nbytes > least and self.calls[gap].id in senders]

    def _downward(self, calls: Sequence[_Call]) -> list[int]:
        """Calls, each to go one level down its hull, in the order of what a byte costs; of equals the first of the step first."""
        steps = []
        for call in calls:
            path = self.hulls[call.region]
            for at, (before, after) in enumerate(pairwise(path)):
                price = (after.seconds - before.seconds) / max(1, before.saved_bytes - after.saved_bytes)
                steps.append((price, at, call.forward, call.id))
        return [call for *_, call in sorted(steps)]

    @staticmethod
    def _after(levels: dict[int, int], steps: Iterable[int]) -> dict[int, int]:
        levels = dict(levels)
        for call in steps:
            levels[call] += 1
        return levels

    def _fits(self, levels: dict[int, int], senders: set[int], release: int, fetch: int) -> bool:
        return self._peak(levels, senders, release, fetch) <= self.budget_bytes

    def _peak(self, levels: dict[int, int], senders: set[int], release: int, fetch: int) -> int:
        change = [0] * (len(self.besides) + 1)
        scratch: dict[int, int] = {}
        last = len(self.calls) - 1
        for place, call in enumerate(self.calls):
            choice = self.hulls[call.region][levels[call.id]]
            scratch[call.forward], scratch[call.backward] = self._scratch[call.id, choice.name]
            change[call.forward] += choice.saved_bytes
            change[call.backward + 1] -= choice.saved_bytes
            if call.id in senders:
                away = choice.saved_bytes + (call.input_bytes if choice.reads_inputs else 0)
                gone = max(self.calls[min(place + release, last)].forward, call.forward) + 1
                back = self.calls[min(place + fetch, last)].backward
                if gone < back:
                    change[gone] -= away
                    change[back] += away
        for gap, nbytes in self._sent_outside(senders):
            gone = self.calls[min(gap + release - 1, last)].forward + 1
            back = self.calls[min(gap + fetch - 1, last)].backward
            if gone < back:
                change[gone] -= nbytes
                change[back] += nbytes
        most = held = 0
        for op, besides in enumerate(self.besides):
            held += change[op]
            most = max(most, held + besides + scratch.get(op, 0))
        return most


def hull(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Choices worth having: from the most bytes to the fewest, each step down cheaper by the byte than the next."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (-choice.saved_bytes, choice.seconds)):
        while found and choice.seconds <= found[-1].seconds:  # fewer bytes in less time
            found.pop()
        while len(found) > 1 and _price(found[-2], found[-1]) >= _price(found[-1], choice):
            found.pop()
        if not found or choice.saved_bytes < found[-1].saved_bytes:
            found.append(choice)
    return tuple(found)


def _price(before: Choice, after: Choice) -> float:
    return (after.seconds - before.seconds) / max(1, before.saved_bytes - after.saved_bytes)


def _own_input_bytes(graph: Graph, inputs: Sequence[int], call: int) -> int:
    """What the step itself was given stays: whoever gave it holds it."""
    found = 0
    for storage in (graph.storages[number] for number in inputs):
        backward = [use for use in graph.uses[storage.id] if graph.ops[use].kind == "region_backward"]
        if not storage.lasting and storage.role is not Role.INPUT and all(graph.ops[use].region == call for use in backward):
            found += storage.nbytes
    return found


def _workspace(forward: int, backward: int, choice: Choice, menu: Menu) -> tuple[int, int]:
    """Measured, or what the coarse graph estimates for the first choice."""
    ahead = choice.forward_workspace_bytes
    behind = choice.backward_workspace_bytes
    return forward if ahead is None else ahead, backward if behind is None else behind


def with_budget(menu: Menu, budget_bytes: int) -> Menu:
    return replace(menu, problem=menu.problem.with_budget(budget_bytes))
