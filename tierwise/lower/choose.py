"""The planner over choices: cheap recomputation, then what the link carries for nothing, then dear recomputation.

For each region class only choices on the lower hull of (saved bytes, seconds) are of interest; going down it, each second buys fewer bytes. Some
calls send away what they save, or the largest part of it; the others go down the hull until everything fits. Who sends is a pattern, such as every
third call from the first on, which is idle the longest, at one level of the hull. Hundreds of patterns are timed on a sketch of the step, a clock
that knows calls, what is between them and one lane each way; the best of them are changed call by call, and only then is an image made, judged
and simulated. Whether a program fits is a few additions (holding.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from ..errors import InfeasibleBudget, InvalidSchedule
from ..ir import INPUTS, CallPlan, Choice, Copy, Graph, Menu, Op, Program, Role, check_schedule, peak_bytes
from ..ir.program import EVERYTHING
from ..simulate import simulate, step_seconds
from ..units import exact_bytes, format_bytes
from .holding import Holding, Sending, Whole
from .image import Image, image, outside_storages

DISTANCES = ((2, 2), (1, 1), (2, 1), (4, 2))  # (release, fetch) to try, in calls
STRIDES = (1, 2, 3, 4, 6, 8)  # every so manyth call sends
PARTS = (1.0, 0.5)  # of what a call saves, sent: the largest values first
PATIENCE = (0.0, 0.5, 1.0, 2.0)  # of what a call sends, in its time on the link: how long it waits for its turn
TRIALS = 9  # numbers of sending calls to try between none and all, then again around the best
SKETCHES = 4  # the best of their kind, to be looked at more closely
IMAGES = 8  # and so many of the best after that are simulated
FEW_IMAGES = 2  # where no more are asked for, the best are taken as they are
TOO_MANY = 1.01  # a pattern with more calls that is slower by this, twice, is not followed
AS_FAST = 1.001  # programs so close are equals: of these the one that moves the fewest bytes
WORTH_SENDING = 200  # of the budget, the part above which tensors outside of regions are sent


@dataclass(frozen=True, slots=True)
class Chosen:
    program: Program
    seconds: float
    peak_bytes: int
    sent_bytes: int


def keep_everything(menu: Menu) -> Program:
    """Every call with the choice that saves the most."""
    return Program(_every_call(menu, 0), "keep_all")


def recompute_everything(menu: Menu) -> Program:
    """Every call with the choice that saves the least."""
    return Program(_every_call(menu, -1), "recomputed")


def _every_call(menu: Menu, which: int) -> dict[int, CallPlan]:
    """With the choice of this number: 0 saves the most, -1 the least."""
    return {call.id: CallPlan(menu.choices[call.region][which].name) for call in menu.problem.graph.calls if call.region in menu.choices}


def choose(menu: Menu, *, tiers: Sequence[str] = ("dram",), min_sent_bytes: int = 0, images: int = IMAGES) -> Chosen:
    """The fastest program found within the menu's budget; `tiers` are where saved values may go, the fastest first, if they are large enough.
    `images`: how many of what the sketch finds are simulated."""
    kept = _predicted(menu, keep_everything(menu))
    if kept is not None:
        return kept
    search = _Search(menu, tiers, min_sent_bytes)
    found: list[Chosen] = []
    for program in search.programs(images):
        if (chosen := _predicted(menu, program)) is not None:
            found.append(chosen)
            if chosen.seconds <= search.least_seconds * AS_FAST:
                break  # nothing could be faster
    if not found:
        tightest = search.tightest()
        made = image(menu, tightest)
        if (last := _predicted(menu, tightest)) is None:
            least = peak_bytes(made.problem, made.schedule)[made.problem.device_tier]
            raise InfeasibleBudget(
                f"budget {format_bytes(menu.problem.budget_bytes)} is below {format_bytes(least)}, what this step needs with everything recomputed "
                f"and sent away that can be; use at least {exact_bytes(least)}, a smaller batch, or fewer trainable parameters",
                least_bytes=least,
            )
        found.append(last)
    fastest = min(chosen.seconds for chosen in found)
    as_fast = [chosen for chosen in found if chosen.seconds <= fastest * AS_FAST]
    return min(as_fast, key=lambda chosen: (chosen.sent_bytes, chosen.seconds))


def staying(menu: Menu) -> tuple[Program, int] | None:
    """The program in which nothing is sent, and the bytes of the device that its calls come to by a count; it is not judged. None: there is none."""
    return _Search(menu, (), 0).staying()


def sending(menu: Menu, tiers: Sequence[str], min_sent_bytes: int = 0, images: int = FEW_IMAGES) -> list[tuple[Program, int]]:
    """Programs in which something is sent, the fastest by a sketch first, and the bytes of the device that their calls come to by a count; they are
    not judged."""
    return [*islice(_Search(menu, tiers, min_sent_bytes).sending(images), images)]


def _predicted(menu: Menu, program: Program) -> Chosen | None:
    made = image(menu, program)
    try:
        check_schedule(made.problem, made.schedule)
    except InvalidSchedule:
        return None
    return predicted(made)


def keeping_everything(menu: Menu) -> tuple[float, int]:
    """Seconds and bytes of the device, however much that is."""
    made = image(menu, keep_everything(menu))
    needed = peak_bytes(made.problem, made.schedule)[made.problem.device_tier]
    return step_seconds(made.problem.with_budget(max(needed, menu.problem.budget_bytes)), made.schedule), needed


def predicted(made: Image, budget_bytes: int | None = None) -> Chosen:
    """What a program comes to whose image was judged. `budget_bytes`: what there is while it runs, if it had to fit into less."""
    timeline = simulate(made.problem if budget_bytes is None else made.problem.with_budget(budget_bytes), made.schedule)
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


@dataclass(frozen=True, slots=True)
class _Sketch:
    seconds: float
    sending: Sending
    levels: Whole  # of hulls, by place of the call


class _Search:
    """Patterns of sending calls, and how far the others have to go down their hulls."""

    def __init__(self, menu: Menu, tiers: Sequence[str], min_sent_bytes: int) -> None:
        self.menu, self.tiers, self.min_sent_bytes = menu, tiers, min_sent_bytes
        self.hulls = {region: hull(choices) for region, choices in menu.choices.items()}
        self.levels = max((len(choices) for choices in self.hulls.values()), default=0)
        base = keep_everything(menu)
        # Inputs are kept in the base: whoever drops them is counted as a sender.
        made = image(menu, base)
        graph, coarse = made.problem.graph, made.coarse
        self.budget_bytes = menu.problem.budget_bytes
        least = image(menu, Program(_every_call(menu, -1), "auto"))  # where a call reads what it returned, the next one's input is not its own
        own = [{call: _own_input_bytes(of.problem.graph, of.coarse.inputs[call], call) for call in coarse.backward} for of in (made, least)]
        self.calls = [
            _Call(call, graph.calls[call].region, coarse.forward[call], coarse.backward[call], min(found[call] for found in own))
            for call in sorted(coarse.forward, key=coarse.forward.__getitem__)
            if call in coarse.backward
        ]
        inside = [call.id for call in self.calls]
        self.outside = {  # bytes, and the ops after which they may leave, by how many calls come before
            gap: sum(graph.storages[storage].nbytes for storage in outside_storages(graph, coarse, inside, gap)) for gap in range(len(inside))
        }
        self.always = [plan for plan in base.calls.items() if plan[0] not in {call.id for call in self.calls}]
        besides = np.maximum(_besides(menu, made, 0), _besides(menu, least, -1))  # choices differ in whether they read what they returned
        self._names = {
            (region, choice.name, part): _largest(choice, part, min_sent_bytes)
            for region, path in self.hulls.items()
            for choice in path
            for part in PARTS
        }
        self._deepest = np.array([len(self.hulls[call.region]) - 1 for call in self.calls], dtype=np.int64)
        worth_sending = self.budget_bytes // WORTH_SENDING
        paths = [(call, self.hulls[call.region]) for call in self.calls]
        self.holding = Holding(
            besides,
            [call.forward for call in self.calls],
            [call.backward for call in self.calls],
            saved=[[choice.saved_bytes for choice in path] for _, path in paths],
            scratch=[[_workspace(graph.ops[call.forward], graph.ops[call.backward], choice) for choice in path] for call, path in paths],
            sent={part: [[self.sent(call, choice, part)[1] for choice in path] for call, path in paths] for part in PARTS},
            outside={gap: nbytes for gap, nbytes in self.outside.items() if nbytes > worth_sending},  # where it is too much to ignore
        )
        self._steps = self._downward()
        self._clock = _Clock(self, made.problem.device_seconds)
        self.least_seconds = self._clock.least_seconds()

    # -- what is worth an image ---------------------------------------------------------------------------------------------------

    def programs(self, images: int) -> Iterator[Program]:
        """Without sends, then what the sketch finds fastest, the best first."""
        if (alone := self.staying()) is not None:
            yield alone[0]
        if self.tiers:
            yield from (program for program, _ in self.sending(images))

    def sending(self, images: int) -> Iterator[tuple[Program, int]]:
        """What the sketch finds fastest, the best first, and its bytes by a count."""
        sketches = self._patterns()
        sketches |= {sketch.sending: sketch for sketch in self._as_the_link_has_time()}
        starts = sorted(sketches.values(), key=_by_seconds)[:SKETCHES]
        # The first calls send all they save: what memory does with these is simplest, so that of each level the best is looked at.
        first = (self._first_calls(level, distance) for level in range(self.levels) for distance in (2, 1))
        plain = sorted((sketch for sketch in first if sketch is not None), key=_by_seconds)
        near = self._closer if images > FEW_IMAGES else lambda start: (start,)
        closer = {sketch.sending: sketch for start in (*starts, *plain[: 2 * SKETCHES]) for sketch in near(start)}
        chosen = [*sorted(closer.values(), key=_by_seconds)[:images], *plain[: images // 2]]
        for sketch in {sketch.sending: sketch for sketch in chosen}.values():
            if (program := self._program(sketch.levels, sketch.sending)) is not None:
                yield program, self.holding.peak_bytes(sketch.levels, sketch.sending)

    def staying(self) -> tuple[Program, int] | None:
        found = self.sketch(Sending())
        program = None if found is None else self._program(found.levels, found.sending)
        return None if found is None or program is None else (program, self.holding.peak_bytes(found.levels, found.sending))

    def _patterns(self) -> dict[Sending, _Sketch]:
        count, found = len(self.calls), dict[Sending, _Sketch]()
        for stride in STRIDES:
            most = -(-count // stride)
            numbers = sorted({round(most * part / (TRIALS - 1)) for part in range(1, TRIALS)} - {0})
            for level in range(self.levels):
                for part in PARTS:
                    worse, best = 0, float("inf")
                    for number in numbers:
                        senders = tuple(place for place in range(0, number * stride, stride) if place < count)
                        sketch = self.sketch(Sending(senders, level, part, 2, 2)) or self.sketch(Sending(senders, level, part, 1, 1))
                        if sketch is None:
                            continue
                        found[sketch.sending] = sketch
                        worse, best = worse + (sketch.seconds > best * TOO_MANY), min(best, sketch.seconds)
                        if worse == 2:
                            break
        return found

    def _as_the_link_has_time(self) -> Iterator[_Sketch]:
        """Whoever finds the link free when it is done sends, or finds it free soon enough. Where calls differ, that is no pattern of places."""
        for level in range(self.levels):
            for part in PARTS:
                found = {tuple(self._clock.senders(level, part, patience, first)) for patience in PATIENCE for first in (0, 1)}
                for senders in sorted(found - {()}):
                    for release, fetch in ((2, 2), (4, 2)):
                        if (sketch := self.sketch(Sending(senders, level, part, release, fetch))) is not None:
                            yield sketch

    def _first_calls(self, level: int, distance: int) -> _Sketch | None:
        """The best number of first calls that send all they save at a level."""
        count, tried = len(self.calls), dict[int, _Sketch | None]()

        def seconds(number: int) -> tuple[float, int]:
            if number not in tried:
                tried[number] = self.sketch(Sending(tuple(range(number)), level, 1.0, distance, distance))
            sketch = tried[number]
            return (sketch.seconds if sketch is not None else float("inf")), number

        best = min((round(count * part / (TRIALS - 1)) for part in range(TRIALS)), key=seconds)
        step = max(1, count // (TRIALS - 1))
        while step > 1:
            step = (step + 1) // 2 if step > 2 else 1
            best = min((min(max(number, 0), count) for number in (best - step, best, best + step)), key=seconds)
        return tried[best]

    def _closer(self, sketch: _Sketch) -> Iterator[_Sketch]:
        """A start, and what is better near it: other distances, then one call more, one fewer, or one instead of another."""
        yield sketch
        for release, fetch in DISTANCES:
            changed = self.sketch(replace(sketch.sending, release=release, fetch=fetch))
            if changed is not None:
                yield changed
                sketch = min(sketch, changed, key=_by_seconds)
        improved = True
        while improved:
            improved = False
            for place in range(len(self.calls)):
                senders = {*sketch.sending.senders} ^ {place}
                changed = self.sketch(replace(sketch.sending, senders=tuple(sorted(senders)))) if senders else None
                if changed is not None and changed.seconds < sketch.seconds * (1 - 1e-6):
                    sketch, improved = changed, True
                    yield sketch

    def sketch(self, sending: Sending) -> _Sketch | None:
        """The senders at this level of their hulls; the others go down theirs until all fits, or None."""
        stays = np.ones(len(self.calls), dtype=bool)
        stays[list(sending.senders)] = False
        start = np.where(stays, 0, np.minimum(sending.level, self._deepest))
        steps = self._steps[stays[self._steps]]

        def after(count: int) -> Whole:
            found: Whole = start + np.bincount(steps[:count], minlength=len(start))
            return found

        low, high = 0, len(steps)
        if self.holding.peak_bytes(after(high), sending) > self.budget_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.holding.peak_bytes(after(middle), sending) <= self.budget_bytes:
                high = middle
            else:
                low = middle + 1
        levels = after(low)
        return _Sketch(self._clock.seconds(levels, sending), sending, levels)

    def tightest(self) -> Program:
        """The program that takes the least memory, whatever it costs; what is sent away has room where it goes."""
        found: list[tuple[int, int, Program]] = []
        for level in range(max(1, self.levels)):
            at_level = np.minimum(level, self._deepest)
            for number in range(len(self.calls) + 1) if self.tiers else (0,):
                sending = Sending(tuple(range(number)), level)
                for levels in (at_level, np.where(np.arange(len(self.calls)) < number, at_level, self._deepest)):
                    program = self._program(levels, sending)
                    if program is not None:
                        found.append((self.holding.peak_bytes(levels, sending), len(found), program))
        return min(found)[2]

    def _program(self, levels: Whole, sending: Sending) -> Program | None:
        calls = dict(self.always)
        machine = self.menu.problem.machine
        room = {tier: machine.capacity(tier) for tier in self.tiers}
        for link in machine.links:  # buffers on the way to a tier below
            if link.staging_tier in room and {link.src, link.dst} & {*self.tiers}:
                room[link.staging_tier] -= link.staging_bytes
        senders = {*sending.senders}
        for place, call in reversed([*enumerate(self.calls)]):  # who is idle the shortest gets the fastest tier
            choice = self.hulls[call.region][levels[place]]
            names, nbytes = self.sent(call, choice, sending.part) if place in senders else ((), 0)
            if not names:
                calls[call.id] = CallPlan(choice.name)
                continue
            tier = next((tier for tier in self.tiers if room[tier] >= nbytes), None)
            if tier is None:
                return None
            room[tier] -= nbytes
            calls[call.id] = CallPlan(choice.name, names, tier, sending.release, sending.fetch)
        outside = {}
        for gap, nbytes in self.holding.outside_of(sending.senders):
            tier = next((tier for tier in self.tiers if room[tier] >= nbytes), None)
            if tier is None:
                return None
            room[tier] -= nbytes
            outside[gap] = CallPlan("", (EVERYTHING,), tier, sending.release, sending.fetch)
        return Program(calls, "auto", outside=outside)

    def sent(self, call: _Call, choice: Choice, part: float) -> tuple[tuple[str, ...], int]:
        """What a sender sends, by name, and its bytes."""
        names, nbytes = self._names[call.region, choice.name, part]
        if choice.reads_inputs and call.input_bytes >= max(1, self.min_sent_bytes):
            return (*names, INPUTS), nbytes + call.input_bytes
        return names, nbytes

    def _downward(self) -> Whole:
        """Places of calls, each to go one level down its hull, in the order of what a byte costs; of equals the first of the step first."""
        steps = []
        for place, call in enumerate(self.calls):
            for at, (before, after) in enumerate(pairwise(self.hulls[call.region])):
                steps.append((_price(before, after), at, call.forward, place))
        return np.array([place for *_, place in sorted(steps)], dtype=np.int64)


_Item = tuple[int, bool]  # place of a call; what it saves, or what is outside of regions before it


class _Clock:
    """A sketch of the simulator: calls in order, what runs between them, and one lane each way to the fastest tier."""

    def __init__(self, search: _Search, op_seconds: Sequence[float]) -> None:
        self.search = search
        machine, device = search.menu.problem.machine, search.menu.problem.device_tier
        tier = next(iter(search.tiers), "")
        self.out, self.back = machine.link_between.get((device, tier)), machine.link_between.get((tier, device))
        events = sorted(
            [(call.forward, place, True) for place, call in enumerate(search.calls)]
            + [(call.backward, place, False) for place, call in enumerate(search.calls)]
        )
        self.events: list[tuple[float, int, bool]] = []  # (seconds of ops before it, place of the call, whether forward)
        starts = np.concatenate(([0.0], np.cumsum(op_seconds)))
        before = 0
        for op, place, is_forward in events:
            self.events.append((float(starts[op] - starts[before]), place, is_forward))
            before = op + 1
        self.rest = float(starts[-1] - starts[before])
        self.own = {  # of a call and its choice; where a choice has no times of its own, those of the step's ops count
            (place, choice.name): (choice.forward_seconds, choice.backward_seconds)
            if choice.seconds
            else (float(op_seconds[call.forward]), float(op_seconds[call.backward]))
            for place, call in enumerate(search.calls)
            for choice in search.menu.choices[call.region]
        }

    def senders(self, level: int, part: float, patience: float, first: int) -> Iterator[int]:
        """Places of calls, from one on, that send at a level of their hulls when the link is free within so many times what they would take of it."""
        search, now, out = self.search, 0.0, 0.0
        for between, place, is_forward in self.events:
            if not is_forward or self.out is None:
                return
            call = search.calls[place]
            path = search.hulls[call.region]
            choice = path[min(level, len(path) - 1)]
            now += between + self.own[place, choice.name][0]
            nbytes = search.sent(call, choice, part)[1]
            taken = nbytes / self.out.bytes_per_second
            if nbytes and place >= first and out <= now + patience * taken:
                out = max(out, now) + taken
                yield place

    def least_seconds(self) -> float:
        """Every call by its fastest choice, and no waiting."""
        calls = self.search.calls
        own = (min(sum(self.own[place, choice.name]) for choice in self.search.menu.choices[call.region]) for place, call in enumerate(calls))
        return self.rest + sum(between for between, *_ in self.events) + sum(own)

    def seconds(self, levels: Whole, sending: Sending) -> float:
        search, senders, at = self.search, {*sending.senders}, levels.tolist()
        last = len(search.calls) - 1
        now = out = back = behind = 0.0
        gone: dict[_Item, float] = {}
        there: dict[_Item, float] = {}
        sent: dict[_Item, int] = {(place, True): nbytes for place, nbytes in search.holding.outside_of(sending.senders)}
        released: dict[int, list[_Item]] = {}
        fetched: dict[int, list[_Item]] = {}
        for place, is_outside in [*((place, False) for place in sending.senders), *sent]:  # what is outside is before the call in program order
            released.setdefault(min(place + sending.release - is_outside, last), []).append((place, is_outside))
            fetched.setdefault(min(place + sending.fetch - is_outside, last), []).append((place, is_outside))
        for between, place, is_forward in self.events:
            call = search.calls[place]
            choice = search.hulls[call.region][at[place]]
            now = max(now, behind) + between
            behind = 0.0
            if is_forward:
                if (place, True) in sent and self.out is not None:
                    out = gone[place, True] = max(out, now) + self.out.latency_seconds + sent[place, True] / self.out.bytes_per_second
                now += self.own[place, choice.name][0]
                if place in senders and self.out is not None:
                    sent[place, False] = search.sent(call, choice, sending.part)[1]
                    out = gone[place, False] = max(out, now) + self.out.latency_seconds + sent[place, False] / self.out.bytes_per_second
                for item in released.get(place, ()):
                    now = max(now, gone.get(item, 0.0))
            else:
                for item in sorted(fetched.get(place, ()), key=lambda item: (-item[0], item[1])):
                    if item in sent and self.back is not None:
                        back = there[item] = max(back, now) + self.back.latency_seconds + sent[item] / self.back.bytes_per_second
                now = max(now, there.get((place, False), 0.0)) + self.own[place, choice.name][1]
                behind = there.get((place, True), 0.0)  # for the ops that come now
        return max(now, behind) + self.rest


def _by_seconds(sketch: _Sketch) -> tuple[float, int]:
    return sketch.seconds, len(sketch.sending.senders)


def _largest(choice: Choice, part: float, least_bytes: int) -> tuple[tuple[str, ...], int]:
    """The largest of what is saved, until it is this part of all of it; in the order in which it is saved."""
    wanted = part * choice.saved_bytes
    taken: set[str] = set()
    nbytes = 0
    for value in sorted(choice.saved, key=lambda value: -value.nbytes):
        if nbytes < wanted and value.nbytes >= least_bytes:
            taken.add(value.name)
            nbytes += value.nbytes
    return tuple(value.name for value in choice.saved if value.name in taken), nbytes


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


def _besides(menu: Menu, made: Image, which: int) -> Whole:
    """Bytes by op without what calls save and take while they run, in an image in which all have their first or their last choice."""
    graph, coarse = made.problem.graph, made.coarse
    held = np.array(graph.live_bytes, dtype=np.int64)
    for call, backward in coarse.backward.items():
        forward = coarse.forward[call]
        held[forward : backward + 1] -= menu.choices[graph.calls[call].region][which].saved_bytes
        for op in (forward, backward):
            held[op] -= graph.ops[op].workspace_bytes
    return held


def _workspace(forward: Op, backward: Op, choice: Choice) -> tuple[int, int]:
    """Measured, or what the coarse graph estimates for the first choice."""
    ahead, behind = choice.forward_workspace_bytes, choice.backward_workspace_bytes
    return forward.workspace_bytes if ahead is None else ahead, backward.workspace_bytes if behind is None else behind


def with_budget(menu: Menu, budget_bytes: int) -> Menu:
    return replace(menu, problem=menu.problem.with_budget(budget_bytes))
