"""Runs as numbers: everything a report says, before anything is drawn. `tierwise report --json` prints it.

A lane works one piece at a time, so within a period its share is busy seconds over the period. Work that reaches over the end of the period
runs under the beginning of the next one; where time is counted within the period, it is counted there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..ir import BUFFERS, PASSING, PASSING_HOST, Compute, Copy, Phase, Problem, Run, Schedule, Timeline, Within
from ..ir.schedule import held_as
from ..units import format_bytes
from .fates import Fate, Module, fates, module_tree, recomputations
from .tables import Group, grouped
from .waits import waits_of
from .words import explain, sentence

RECOMPUTE = "recompute"
COMPILED_BACKWARD = "region_backward"  # the kind of an op that is the whole backward of a block (lower/)
PHASES = (*map(str, Phase), RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Lane:
    """One processor, or one direction of a link."""

    name: str
    what: str  # "computes in hbm", "hbm → dram"
    spans: int
    busy_seconds: float
    share: float  # of the period
    phase_seconds: dict[str, float]  # of a processor, if the schedule is known


@dataclass(frozen=True, slots=True)
class Peak:
    """The most a tier holds, when, and what it is made of then."""

    tier: str
    nbytes: int
    capacity_bytes: int | None
    at_seconds: float | None
    roles: dict[str, int]
    during: str  # the op that runs on the device then


@dataclass(frozen=True, slots=True)
class Times:
    """One timeline in numbers."""

    measured: bool
    seconds: float
    peaks: tuple[Peak, ...]
    lanes: tuple[Lane, ...]
    waiting_seconds: float  # how long the device did nothing in the period
    waiting_while: dict[str, float]  # ... and how much of that each other lane was at work


@dataclass(frozen=True, slots=True)
class Gap:
    """One number as predicted and as measured."""

    what: str
    unit: str  # "seconds" or "bytes"
    predicted: float
    measured: float

    @property
    def off(self) -> float | None:
        """By how much the measured one is larger, as a share of it: the prediction's error."""
        return self.measured / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True, slots=True)
class Copied:
    role: str
    src: str
    dst: str
    nbytes: int
    copies: int


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of the steps that ran, and of the same steps untouched."""

    losses: tuple[float | None, ...]  # None: not a number
    untouched: tuple[float | None, ...]
    compared: int
    identical: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    name: str
    title: str  # name, policy and budget: what tells it from the others
    policy: str
    machine: str
    machine_source: str
    device_tier: str
    budget_bytes: int | None
    predicted: Times | None
    measured: Times | None
    gaps: tuple[Gap, ...]
    saved_bytes: dict[str, int]  # for backward, by fate
    recomputed_ops: int | None  # None: not known, as compiled blocks may recompute inside and nobody said
    recomputed_blocks: int  # that recompute inside their compiled backward
    recomputed_seconds: float | None
    copied: tuple[Copied, ...]
    homes: tuple[Copied, ...]  # lasting bytes that live away from the device between steps; src is empty
    elsewhere_ops: dict[str, int]  # ops on other processors
    keep_all_seconds: float | None
    keep_all_bytes: int | None
    bound_seconds: float | None
    reserved_bytes: int | None
    unaccounted_bytes: int | None
    step_seconds: tuple[float, ...]
    losses: Losses | None
    modules: Module | None
    plan: tuple[str, ...]  # what was planned, in the words of who planned it
    words: tuple[str, ...]  # what it comes to

    @property
    def best(self) -> Times | None:
        """What was measured, or else what was predicted."""
        return self.measured or self.predicted


@dataclass(frozen=True, slots=True)
class Summary:
    runs: tuple[RunSummary, ...]  # those with a timeline
    groups: tuple[Group, ...] = field(default=())  # tables of policies


def summarize(runs: Sequence[Run]) -> Summary:
    timed = [run for run in runs if run.predicted is not None or run.measured is not None]
    titles = _titles(timed)
    return Summary(tuple(_run(run, title) for run, title in zip(timed, titles, strict=True)), grouped(runs))


def _titles(runs: Sequence[Run]) -> list[str]:
    """Name, policy and budget; a number behind those that are still the same."""
    titles: list[str] = []
    for run in runs:
        budget = format_bytes(run.problem.budget_bytes) if run.problem is not None else ""
        title = " · ".join(filter(None, (run.name, run.policy, budget)))
        again = sum(other == title or other.startswith(f"{title} #") for other in titles)
        titles.append(f"{title} #{again + 1}" if again else title)
    return titles


def _run(run: Run, title: str) -> RunSummary:
    problem, schedule = run.problem, run.schedule
    planned = (problem, schedule) if problem is not None and schedule is not None else None
    predicted = times(run.predicted, problem, schedule) if run.predicted else None
    measured = times(run.measured, problem, schedule) if run.measured else None
    table = next((t for t in run.comparisons if problem is None or t.budget_bytes == problem.budget_bytes), None)
    again = [step for _, step in recomputations(schedule)] if schedule else []
    within = [block for block in run.within or () if block.nbytes or block.seconds]
    told = run.within is not None or not (problem and any(op.kind == COMPILED_BACKWARD for op in problem.graph.ops))
    summary = RunSummary(
        name=run.name,
        title=title,
        policy=run.policy,
        machine=problem.machine.name if problem else "",
        machine_source=problem.machine.source if problem else "",
        device_tier=device_tier(run),
        budget_bytes=problem.budget_bytes if problem else None,
        predicted=predicted,
        measured=measured,
        gaps=tuple(_gaps(predicted, measured)) if predicted and measured else (),
        saved_bytes=_saved_bytes(*planned, within) if planned else {},
        recomputed_ops=len(again) if schedule and told else None,
        recomputed_blocks=len(within),
        recomputed_seconds=_recomputed_seconds(problem, again, within) if problem and schedule and told else None,
        copied=_copied(*planned) if planned else (),
        homes=_homes(*planned) if planned else (),
        elsewhere_ops=_elsewhere(*planned) if planned else {},
        keep_all_seconds=table.keep_all_seconds if table else None,
        keep_all_bytes=table.keep_all_bytes if table else None,
        bound_seconds=table.bound_seconds if table else None,
        reserved_bytes=run.reserved_bytes,
        unaccounted_bytes=run.unaccounted_bytes,
        step_seconds=run.step_seconds,
        losses=_losses(run),
        modules=module_tree(*planned, within) if planned else None,
        plan=tuple(map(sentence, run.words)),
        words=(),
    )
    return replace(summary, words=explain(summary))


def device_tier(run: Run) -> str:
    """The tier a budget caps; without a problem, the one a timeline names first."""
    if run.problem is not None:
        return run.problem.device_tier
    timeline = run.measured or run.predicted
    return next(iter(timeline.peak_bytes), "") if timeline else ""


# -- one timeline -----------------------------------------------------------------------------------------------------------------------


def times(timeline: Timeline, problem: Problem | None, schedule: Schedule | None) -> Times:
    lanes = lane_order(timeline, problem)
    device = lanes[0] if lanes else ""
    waiting_seconds, while_waiting = waits_of(timeline, device) if device else (0.0, {})
    return Times(
        measured=timeline.measured,
        seconds=timeline.seconds,
        peaks=tuple(_peak(timeline, tier, problem, schedule, device) for tier in timeline.peak_bytes if tier not in BUFFERS),
        lanes=tuple(_lane(timeline, lane, problem, schedule) for lane in lanes),
        waiting_seconds=waiting_seconds,
        waiting_while={lane: while_waiting[lane] for lane in lanes if lane in while_waiting},
    )


def lane_order(timeline: Timeline, problem: Problem | None) -> list[str]:
    """The device first, then links as the machine lists them, then the other processors; lanes without work are left out."""
    used = {span.lane for span in timeline.spans}
    known: list[str] = []
    if problem is not None:
        machine = problem.machine
        known = [machine.device.name, *(lane for link in machine.links for lane in link.lanes), *(p.name for p in machine.processors)]
    return [lane for lane in dict.fromkeys([*known, *(span.lane for span in timeline.spans)]) if lane in used]


def phases_by_step(problem: Problem, schedule: Schedule) -> dict[int, str]:
    """For each Compute of the schedule, by its place: its phase, or that it runs again."""
    again = {place for place, _ in recomputations(schedule)}
    return {
        place: RECOMPUTE if place in again else str(problem.graph.ops[step.op].phase)
        for place, step in enumerate(schedule.steps)
        if isinstance(step, Compute)
    }


def _lane(timeline: Timeline, lane: str, problem: Problem | None, schedule: Schedule | None) -> Lane:
    spans = [span for span in timeline.spans if span.lane == lane]
    busy = math.fsum(span.end - span.start for span in spans)
    by_phase: dict[str, float] = {}
    if problem is not None and schedule is not None and lane in problem.machine.processor_named:
        phases = phases_by_step(problem, schedule)
        for span in spans:
            phase = phases.get(span.step, "")
            by_phase[phase] = by_phase.get(phase, 0.0) + span.end - span.start
    share = busy / timeline.seconds if timeline.seconds else 0.0
    return Lane(lane, lane_words(lane, problem, schedule), len(spans), busy, share, {phase: by_phase[phase] for phase in PHASES if phase in by_phase})


def lane_words(lane: str, problem: Problem | None, schedule: Schedule | None) -> str:
    """What a lane does: where a processor works, or between which tiers the schedule copies over it."""
    if problem is None:
        return ""
    machine = problem.machine
    if lane in machine.processor_named:
        return f"computes in {machine.processor_named[lane].tier}"
    used = {(step.src, step.dst) for step in schedule.steps if isinstance(step, Copy)} if schedule else set(machine.link_between)
    return ", ".join(f"{link.src} → {link.dst}" for link in machine.links if lane in link.lanes and (link.src, link.dst) in used)


def _peak(timeline: Timeline, tier: str, problem: Problem | None, schedule: Schedule | None, device: str) -> Peak:
    capacity = problem.machine.tier_named[tier].capacity_bytes if problem and tier in problem.machine.tier_named else None
    at, roles = largest_moment(timeline, tier)
    during = ""
    if at is not None and problem is not None and schedule is not None:
        running = next((s for s in timeline.spans if s.lane == device and s.start <= at < s.end), None)
        step = schedule.steps[running.step] if running else None
        during = problem.graph.ops[step.op].name if isinstance(step, Compute) else ""
    return Peak(tier, timeline.peak_bytes[tier], capacity, at, roles, during)


def largest_moment(timeline: Timeline, tier: str) -> tuple[float | None, dict[str, int]]:
    """When a tier's curves add up to most, and what each role holds then."""
    changes: list[tuple[float, str, int]] = []
    for role, curve in timeline.memory.get(tier, {}).items():
        changes += [(when, role, nbytes) for when, nbytes in zip(curve.seconds, curve.nbytes, strict=True)]
    changes.sort(key=lambda change: change[0])
    held: dict[str, int] = {}
    total, most, at, roles = 0, -1, None, {}
    for place, (when, role, nbytes) in enumerate(changes):
        total += nbytes - held.get(role, 0)
        held[role] = nbytes
        last = place + 1 == len(changes) or changes[place + 1][0] > when
        if last and total > most:
            most, at, roles = total, when, {name: size for name, size in held.items() if size}
    return at, roles


# -- a plan -----------------------------------------------------------------------------------------------------------------------------


def _saved_bytes(problem: Problem, schedule: Schedule, within: Sequence[Within]) -> dict[str, int]:
    found = dict.fromkeys(map(str, Fate), 0)
    for storage, fate in fates(problem, schedule).items():
        found[str(fate)] += problem.graph.storages[storage].nbytes
    found[str(Fate.RECOMPUTED)] += sum(block.nbytes for block in within)
    return found


def _recomputed_seconds(problem: Problem, again: Sequence[Compute], within: Sequence[Within]) -> float:
    return math.fsum([*(problem.seconds(step.op, step.on, step.variant) for step in again), *(block.seconds for block in within)])


def _is_within(step: Copy, problem: Problem) -> bool:
    """Whether it only goes to the buffers of the memory it is in, or back."""
    return {step.src, step.dst} in ({problem.device_tier, PASSING}, {"dram", PASSING_HOST})


def _copied(problem: Problem, schedule: Schedule) -> tuple[Copied, ...]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for step in schedule.steps:
        if isinstance(step, Copy) and not _is_within(step, problem):
            storage = problem.graph.storages[step.storage]
            ways = held_as(step.src, step.src_form), held_as(step.dst, step.dst_form)
            found.setdefault((str(storage.role), *ways), []).append(problem.form_bytes(storage.id, step.src_form or step.dst_form))
    return tuple(Copied(*key, nbytes=sum(sizes), copies=len(sizes)) for key, sizes in sorted(found.items()))


def _homes(problem: Problem, schedule: Schedule) -> tuple[Copied, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for storage, tiers in schedule.home.items():
        for tier in tiers if problem.device_tier not in tiers else ():
            found.setdefault((str(problem.graph.storages[storage].role), tier), []).append(problem.graph.storages[storage].nbytes)
    return tuple(Copied(role, "", tier, nbytes=sum(sizes), copies=len(sizes)) for (role, tier), sizes in sorted(found.items()))


def _elsewhere(problem: Problem, schedule: Schedule) -> dict[str, int]:
    found: dict[str, int] = {}
    for step in schedule.steps:
        if isinstance(step, Compute) and step.on != problem.machine.device.name:
            found[step.on] = found.get(step.on, 0) + 1
    return found


def _losses(run: Run) -> Losses | None:
    if not run.losses:
        return None
    both = list(zip(run.losses, run.untouched_losses, strict=False))
    same = sum(a == b or (math.isnan(a) and math.isnan(b)) for a, b in both)
    return Losses(tuple(map(_number, run.losses)), tuple(map(_number, run.untouched_losses)), len(both), same)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- predicted against measured ---------------------------------------------------------------------------------------------------------


def _gaps(predicted: Times, measured: Times) -> Iterable[Gap]:
    yield Gap("step time", "seconds", predicted.seconds, measured.seconds)
    known = {peak.tier: peak.nbytes for peak in measured.peaks}
    for peak in predicted.peaks:
        if peak.tier in known and (peak.nbytes or known[peak.tier]):
            yield Gap(f"peak of {peak.tier}", "bytes", peak.nbytes, known[peak.tier])
    lanes = {lane.name: lane for lane in measured.lanes}
    for lane in predicted.lanes:
        if lane.name in lanes:
            yield Gap(f"{lane.name} busy", "seconds", lane.busy_seconds, lanes[lane.name].busy_seconds)
    yield Gap("device waiting", "seconds", predicted.waiting_seconds, measured.waiting_seconds)
