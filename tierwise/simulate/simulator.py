"""The clock. Each processor and each lane of a link is a server that takes its work in list order; a step starts when all it needs is there.
Encoding and decoding within a tier is work of the processor there; a link with an engine for a codec moves the encoded bytes.

Memory works like tokens: a Free hands its bytes back when the last op or copy that uses them ends, and an allocation takes the bytes that
come back first. Tokens are handed over in list order, so a schedule that fits in list order can neither overflow nor deadlock: it waits.
An outgoing storage is held until its copy ends, an incoming one from its copy's start, a duplicate or workspace while its op runs.

Periods overlap where the list lets them: the next step's forward does not wait for a copy or a cpu update it does not need. What a period does for
the step before begins with the period, when that step's last op on the device is over: so an optimizer's step() comes after backward. `simulate`
repeats the period until it looks the same as the one before; `seconds` is the distance between the two.

Clock is the same thing one step at a time, for policies that decide as they go (DTR, FlashNeuron).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidSchedule
from ..ir import Compute, Copy, Free, Op, Problem, Role, Schedule, Span, Step, Timeline
from ..ir.schedule import AT_START, WORKSPACE, held_as
from .memory import MemoryLog, Unread

MAX_PERIODS = 12  # a schedule whose periods still differ after so many alternates; the mean of the last two is then its period


def simulate(problem: Problem, schedule: Schedule, most_periods: int = MAX_PERIODS) -> Timeline:
    """Predict one period of a legal schedule in its steady state, or the last of so many."""
    return _played(problem, schedule, most_periods, MemoryLog()).timeline()


def step_seconds(problem: Problem, schedule: Schedule, most_periods: int = MAX_PERIODS) -> float:
    """How long that period is, for whoever asks nothing else."""
    return _played(problem, schedule, most_periods, Unread()).seconds()


def _played(problem: Problem, schedule: Schedule, most_periods: int, log: MemoryLog) -> Clock:
    clock = Clock(problem, schedule, log)
    previous: tuple[float, ...] | None = None
    for period in range(most_periods if problem.cyclic else 1):
        clock.begin_period()
        for step in schedule.steps:
            clock.advance(step)
        if not problem.cyclic:
            break
        shape = clock.lag()
        if (period > 0 or not clock.skipped) and (clock.at_rest() or shape == previous):
            break
        previous = shape
    return clock


@dataclass(slots=True)
class _Held:
    """A storage in a tier: when its content is there, when its last user ends, and where it lies."""

    ready: float
    busy: float
    address: int = -1


class Clock:
    """Plays steps one after the other and tells the time."""

    def __init__(self, problem: Problem, schedule: Schedule, log: MemoryLog | None = None) -> None:
        graph, machine = problem.graph, problem.machine
        self.problem = problem
        self._nbytes = [s.nbytes for s in graph.storages]
        self._lasting = [s.lasting for s in graph.storages]
        self._roles = [str(s.role) for s in graph.storages]
        self._ops = graph.ops
        self._seconds = problem.costs.op_seconds
        self._tier_of = {p.name: p.tier for p in machine.processors}
        self._reach = {p.name: tuple(t for t in machine.reachable(p.name) if t != p.tier) for p in machine.processors}
        self._charged = machine.enclosing
        self._links = machine.link_between
        self._issuer = {(link.src, link.dst): machine.issuer(link.src, link.dst) for link in machine.links}
        self._variants = problem.costs.variant_of
        self._addresses = dict(schedule.addresses)
        self._home = schedule.home
        self._inputs = [s.id for s in graph.storages if s.role is Role.INPUT]
        self.lanes: dict[str, float] = {p.name: 0.0 for p in machine.processors}
        for link in machine.links:
            for lane in link.lanes:
                self.lanes.setdefault(lane, 0.0)
        self._device = machine.device.name
        self._device_tier = machine.device.tier
        self._free = {tier.name: tier.capacity_bytes for tier in machine.tiers}  # tokens nobody holds
        self._returning: dict[str, list[tuple[float, int]]] = {tier.name: [] for tier in machine.tiers}  # (when, bytes) still in use
        self._vacated: list[tuple[float, int, int]] = []  # (when, start, end) of freed ranges, with addresses
        self._now: dict[tuple[int, str], _Held] = {}  # lasting, and of this step
        self._before: dict[tuple[int, str], _Held] = {}  # of the step before
        self._log = MemoryLog() if log is None else log
        self.spans: list[Span] = []
        self.step = 0
        self.period = -1
        self.period_starts: list[float] = []
        self.skipped = False  # whether this period left out work of a step before the first
        used = {(s.src, s.dst) for s in schedule.steps if isinstance(s, Copy)}
        for link in machine.links:
            if link.staging_bytes and (link.src, link.dst) in used:
                self._take(link.staging_tier, link.staging_bytes, 0.0)
                self._log.add(link.staging_tier, "staging", 0.0, link.staging_bytes)
        for storage in graph.storages:
            if storage.lasting and graph.is_there_at_start(storage.id):
                for tier in schedule.home[storage.id]:
                    self._place(storage.id, tier, 0.0, 0.0, AT_START)

    # -- periods ------------------------------------------------------------------------------------------------------------------

    def begin_period(self) -> None:
        """Start the next step: what is left of the last one becomes the step before; new inputs arrive."""
        self.period += 1
        now = self.lanes[self._device]
        self.period_starts.append(now)
        if self.period:
            self._before = {key: held for key, held in self._now.items() if not self._lasting[key[0]]}
            self._now = {key: held for key, held in self._now.items() if self._lasting[key[0]]}
            self.spans = []
        self.step, self.skipped = 0, False
        for storage in self._inputs:
            for tier in self._home[storage]:
                start = self._take(tier, self._nbytes[storage], now)
                self._place(storage, tier, start, start, AT_START, taken=True)

    def lag(self) -> tuple[float, ...]:
        """How far every lane is behind the device's last op, and what is still held back: two equal lags mean a steady state."""
        now = self.lanes[self._device]
        behind = [round(self.lanes[lane] - now, 9) for lane in self.lanes if self.lanes[lane] > now]
        behind += [round(when - now, 9) for heap in self._returning.values() for when, _ in sorted(heap) if when > now]
        behind += [round(held.ready - now, 9) for held in self._now.values() if held.ready > now]
        return (round(now - self.period_starts[-1], 9), *behind)

    def at_rest(self) -> bool:
        """Whether nothing is under way once the device's last op of the period has ended."""
        return len(self.lag()) == 1

    def now(self, processor: str | None = None) -> float:
        """When the processor (the device, if not named) will be done with everything it was given."""
        return self.lanes[processor or self._device]

    def held(self, storage: int, tier: str) -> bool:
        return (storage, tier) in self._now

    # -- steps --------------------------------------------------------------------------------------------------------------------

    def advance(self, step: Step, addresses: Mapping[int, int] | None = None) -> float:
        """Play one step; returns when it ends. `addresses`: where it puts what it makes, by storage, for policies that place as they go."""
        index = self.step
        self.step = index + 1
        if addresses:
            self._addresses.update(((index, storage), offset) for storage, offset in addresses.items())
        if step.iteration and self.period == 0:
            self.skipped = True
            return 0.0
        kind = type(step)
        try:
            if kind is Compute:
                return self._compute(step, index)  # type: ignore[arg-type]
            if kind is Free:
                return self._release(step, index)  # type: ignore[arg-type]
            return self._copy(step, index)  # type: ignore[arg-type]
        except KeyError as error:
            raise InvalidSchedule(index, f"{step} needs {error} which is not there; run the judge to see why") from None

    def _compute(self, step: Compute, index: int) -> float:
        op, on = self._ops[step.op], step.on
        tier = self._tier_of[on]
        now, before = self._now, self._before if step.iteration else self._now
        nbytes, lasting = self._nbytes, self._lasting
        start = self._from(step, self.lanes[on])
        reads = []
        seconds, scratch, read, forms = self._way(step, op)
        for storage in read:
            where = now if lasting[storage] else before
            at = tier if storage not in forms else held_as(tier, forms[storage])
            held = where.get((storage, at)) or self._nearby(where, storage, on, forms.get(storage, ""))
            if held.ready > start:
                start = held.ready
            reads.append(held)
        for storage in op.mutates:
            where = now if lasting[storage] else before
            held = where.get((storage, tier)) or self._nearby(where, storage, on)
            if held.busy > start:
                start = held.busy
            reads.append(held)
        fresh: list[int] = []
        need = workspace = scratch
        for storage in op.writes:
            where = now if lasting[storage] else before
            there = where.get((storage, tier))
            if there is None:
                fresh.append(storage)
                need += nbytes[storage]
            elif lasting[storage]:
                if there.busy > start:
                    start = there.busy
                reads.append(there)
            else:
                scratch += nbytes[storage]
                need += nbytes[storage]
        for old, _ in op.in_place:
            held = before[old, tier]
            if held.busy > start:
                start = held.busy
            need -= nbytes[old]
        if need > 0:
            start = self._take(tier, need, start)
        if self._addresses and tier == self._device_tier:
            start = self._wait_for_ranges(index, start, workspace, fresh)
        end = start + seconds
        self.lanes[on] = end
        for held in reads:
            if end > held.busy:
                held.busy = end
        for storage in op.mutates:
            where = now if lasting[storage] else before
            (where.get((storage, tier)) or self._nearby(where, storage, on)).ready = end
        for storage in op.writes:
            where = now if lasting[storage] else before
            if (there := where.get((storage, tier))) is not None and lasting[storage]:
                there.ready = end
        add = self._log.add
        taken_over = {}
        for old, new in op.in_place:
            taken_over[new] = before.pop((old, tier)).address
            for name in self._charged[tier]:
                add(name, self._roles[old], start, -nbytes[old])
        for storage in fresh:
            where = now if lasting[storage] else before
            where[storage, tier] = _Held(end, end, taken_over.get(storage, self._addresses.get((index, storage), -1)))
            for name in self._charged[tier]:
                add(name, self._roles[storage], start, nbytes[storage])
        if need < 0:
            self._give_back(tier, -need, end)
        if scratch:
            self._give_back(tier, scratch, end)
            for name in self._charged[tier]:
                add(name, "workspace", start, scratch)
                add(name, "workspace", end, -scratch)
        self.spans.append(Span(index, on, start, end))
        return end

    def _from(self, step: Step, start: float) -> float:
        return max(start, self.period_starts[-1]) if step.iteration else start

    def _way(self, step: Compute, op: Op) -> tuple[float, int, tuple[int, ...], Mapping[int, str]]:
        """How long the op takes, its workspace, and what it reads in which forms."""
        if not step.variant:
            return self._seconds[step.op, step.on], op.workspace_bytes, op.reads, {}
        variant = self._variants[step.op, step.variant]
        return variant.seconds[step.on], variant.workspace_bytes, op.reads if variant.reads is None else variant.reads, variant.forms

    def _nearby(self, where: dict[tuple[int, str], _Held], storage: int, processor: str, form: str = "") -> _Held:
        for tier in self._reach[processor]:
            if (held := where.get((storage, held_as(tier, form)))) is not None:
                return held
        raise KeyError(self.problem.graph.storages[storage].name)

    def _copy(self, step: Copy, index: int) -> float:
        storage, src, dst = step.storage, step.src, step.dst
        if src == dst:
            return self._code(step, index)
        link = self._links[src, dst]
        where = self._before if step.iteration and not self._lasting[storage] else self._now
        source = where[storage, held_as(src, step.src_form)]
        start = self._from(step, max(self.lanes[self._issuer[src, dst]], source.ready))
        for lane in link.lanes:
            if self.lanes[lane] > start:
                start = self.lanes[lane]
        start, target = self._make_target(step, index, where, start)
        nbytes = self._moved_bytes(step)
        end = start
        overhead = link.latency_seconds + (link.faults_seconds(nbytes) if step.fault else 0.0)
        # An engine on the way passes plain bytes at its own rate, and the lanes go no faster.
        through = self._nbytes[storage] / link.codecs[step.src_form or step.dst_form] if step.src_form != step.dst_form else 0.0
        for lane, rate in link.lanes.items():
            done = start + overhead + max(nbytes / rate, through)
            self.lanes[lane] = done
            self.spans.append(Span(index, lane, start, done))
            if done > end:
                end = done
        if end > source.busy:
            source.busy = end
        target.ready = target.busy = end
        return end

    def _code(self, step: Copy, index: int) -> float:
        """Encode or decode within a tier, on the processor that works there."""
        on = self.problem.machine.works_in(step.src)
        assert on is not None  # the judge has seen it
        where = self._before if step.iteration and not self._lasting[step.storage] else self._now
        source = where[step.storage, held_as(step.src, step.src_form)]
        start, target = self._make_target(step, index, where, self._from(step, max(self.lanes[on], source.ready)))
        end = start + self.problem.coding_seconds(step.storage, step.src_form, step.dst_form, on)
        self.lanes[on] = end
        self.spans.append(Span(index, on, start, end))
        if end > source.busy:
            source.busy = end
        target.ready = target.busy = end
        return end

    def _make_target(self, step: Copy, index: int, where: dict[tuple[int, str], _Held], start: float) -> tuple[float, _Held]:
        """Bytes for what a copy brings, fresh ones or those of an old version, and when they are to be had."""
        storage, dst, key = step.storage, step.dst, (step.storage, held_as(step.dst, step.dst_form))
        target = where.get(key)
        if target is not None:
            return max(start, target.busy), target
        nbytes = self.problem.form_bytes(storage, step.dst_form) if step.dst_form else self._nbytes[storage]
        start = self._take(dst, nbytes, start)
        if self._addresses and dst == self._device_tier:
            start = self._wait_for_ranges(index, start, 0, [storage], nbytes)
        target = where[key] = _Held(0.0, 0.0, self._addresses.get((index, storage), -1) if dst == self._device_tier else -1)
        for name in self._charged[dst]:
            self._log.add(name, self._roles[storage], start, nbytes)
        return start, target

    def _moved_bytes(self, step: Copy) -> int:
        form = step.src_form or step.dst_form
        return self.problem.form_bytes(step.storage, form) if form else self._nbytes[step.storage]

    def _release(self, step: Free, index: int) -> float:
        storage, tier = step.storage, step.tier
        where = self._before if step.iteration and not self._lasting[storage] else self._now
        held = where.pop((storage, held_as(tier, step.form)))
        when = held.busy
        nbytes = self.problem.form_bytes(storage, step.form) if step.form else self._nbytes[storage]
        self._give_back(tier, nbytes, when)
        if held.address >= 0 and nbytes:
            self._vacated.append((when, held.address, held.address + nbytes))
        for name in self._charged[tier]:
            self._log.add(name, self._roles[storage], when, -nbytes)
        if step.join and when > self.lanes[self._device]:
            self.lanes[self._device] = when
        return when

    # -- memory -------------------------------------------------------------------------------------------------------------------

    def _take(self, tier: str, nbytes: int, start: float) -> float:
        """Take bytes of a tier; returns when they are there, `start` at the earliest."""
        for name in self._charged[tier]:
            free, returning, when = self._free[name], self._returning[name], None
            while free < nbytes:
                if not returning:
                    raise InvalidSchedule(self.step - 1, f"{name} overflows by {nbytes - free} bytes; run the judge to see why")
                when, amount = heapq.heappop(returning)
                free += amount
                if when > start:
                    start = when
            self._free[name] = free - nbytes
            if when is not None and free > nbytes:  # what is left of the last is not there any sooner
                self._free[name] = 0
                heapq.heappush(returning, (when, free - nbytes))
        return start

    def _give_back(self, tier: str, nbytes: int, when: float) -> None:
        for name in self._charged[tier]:
            heapq.heappush(self._returning[name], (when, nbytes))

    def _place(self, storage: int, tier: str, ready: float, start: float, step: int, *, taken: bool = False) -> None:
        nbytes = self._nbytes[storage]
        if not taken:
            self._take(tier, nbytes, start)
        address = self._addresses.get((step, storage), -1) if tier == self._device_tier else -1
        self._now[storage, tier] = _Held(ready, ready, address)
        for name in self._charged[tier]:
            self._log.add(name, self._roles[storage], start, nbytes)

    def _wait_for_ranges(self, index: int, start: float, workspace: int, fresh: list[int], nbytes: int | None = None) -> float:
        """With addresses, an allocation also waits for the very ranges it takes; `nbytes` is said of what is encoded."""
        size = self._nbytes if nbytes is None else dict.fromkeys(fresh, nbytes)
        wanted = [(self._addresses[index, s], size[s]) for s in fresh if (index, s) in self._addresses]
        if workspace:
            wanted.append((self._addresses[index, WORKSPACE], workspace))
        for when, low, high in self._vacated:
            if when > start and any(low < begin + size and begin < high for begin, size in wanted):
                start = when
        self._vacated = [(when, low, high) for when, low, high in self._vacated if when > start]
        return start

    # -- the answer ---------------------------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Of the last period."""
        if not self.problem.cyclic:
            return max((span.end for span in self.spans), default=0.0)
        if self.period + 1 >= MAX_PERIODS:
            return (self.lanes[self._device] - self.period_starts[-2]) / 2
        return self.lanes[self._device] - self.period_starts[-1]

    def timeline(self) -> Timeline:
        """What has been played of the last period, as a Timeline."""
        origin, seconds = self.period_starts[-1], self.seconds()
        tiers = tuple(tier.name for tier in self.problem.machine.tiers)
        peaks, curves = self._log.curves(tiers, origin, origin + seconds)
        spans = tuple(self.spans) if origin == 0 else tuple(Span(i, lane, a - origin, b - origin) for i, lane, a, b in self.spans)
        return Timeline(seconds=seconds, peak_bytes=peaks, spans=spans, memory=curves, measured=False)
