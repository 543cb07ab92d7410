"""What a recorded step says about the costs a plan was made with: times of regions, of what runs between them, and rates of links, for the next plan.

A call that waits for a copy looks slow; so of the calls of one class and choice those count that send nothing, and those that send and are hardly
slower. Of these the middle one: a card that is kept busy runs slower than the calls after it has rested, which the first of a step are, and it may be
these that send nothing. Of the copies over a link the middle one counts, against what the plan had of that link beside its updates. Updates on the
CPU take what they took; what a call whose state is updated elsewhere still waited for longer than planned, or less long, is the other updates' doing,
and so is what some calls of backward took longer than others of their kind. What a recorded step takes longer than one that nobody records is
nobody's: it was in between calls, which a device runs for as long as it ever does, and only where there is not so much between them in the calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

from ..ir import CallPlan, Choice, Compute, Copy, Link, Machine, Menu, Op, Phase, Problem, Timeline
from ..ir.placement import region_of
from ..lower import image
from ..lower.states import moved_updates
from ..simulate import step_seconds
from .plan import Plan

OFF = 0.05  # of the predicted time of a step: what a prediction may be off by before a plan is made again
NOTICED = 0.02  # of that: before what was measured takes the place of what was estimated
MOST_CORRECTIONS = 2
WARM_STEPS = 4  # of a plan: by then everything is compiled and warm, and updates of the step before are as late as they will be
TIMED_STEPS = 5  # the middle one of these is what a step takes: now and then Python stops for garbage, or the host for somebody else
MOST_TIMES_SLOWER, HALVINGS = 64.0, 8  # updates than planned; of that range, until a factor is known to 2%
LINK_TIMES_SLOWER = 8.0  # a link that others use, too; what it takes more is no matter of links
MOST_TIMES_FASTER = 1.25  # about what plans may take off for whoever is beside
MOST_OF_A_LINK = 1.1  # of what it carries alone: plans take off more than that for whoever is beside it
MOST_OTHERWISE = 1.25  # times as long, or short, as planned: what is between regions where compute stands still for updates
EARLY = 0.01  # of a step: what calls may have waited less than planned before updates are taken to be faster
WAITING = 1.15  # of what calls of its kind take: a call that waits for a copy takes more (a card that has rested: 0.9 for 50 ms, 3.2 G on an H200)
LEAST_COPY_BYTES = 1 << 20  # smaller ones say more about the latency of a link than about its rate


def is_off(predicted: Timeline, seconds: float, by: float = OFF) -> bool:
    return abs(seconds / predicted.seconds - 1) > by


def is_cpu_off(predicted: Timeline, cpu_seconds: float | None) -> bool:
    """Whether updates on the CPU take something else than planned, where they are most of a step: then it is no matter of luck how far that is off,
    and what no plan could beat is something else."""
    planned = predicted.busy_seconds().get("cpu", 0.0)
    return cpu_seconds is not None and planned > predicted.seconds / 2 and abs(cpu_seconds / planned - 1) > OFF


def corrected(plan: Plan, measured: Timeline, seconds: float, cpu_seconds: float | None = None, alone: Machine | None = None) -> Menu:
    """The plan's menu with what was measured: choices that ran as they ran, others of their class by the same factor, what is between regions as
    long as it took, links at their rates. `seconds`: of a step that nobody recorded; `cpu_seconds`: of the CPU with its updates, if that is known;
    `alone`: the machine before anything was learned in steps, if that is another one than the plan's."""
    menu, graph = plan.menu, plan.image.problem.graph
    staying: dict[tuple[int, str, Phase], list[float]] = defaultdict(list)
    sending: dict[tuple[int, str, Phase], list[float]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    recorded = sum(call.seconds for call in calls_in(plan, measured))
    within = min(recorded, seconds)
    scale = within / recorded if recorded else 1.0
    for span in measured.spans:
        step = plan.image.schedule.steps[span.step]
        if isinstance(step, Compute) and graph.ops[step.op].region in plan.program.calls:
            op, call = graph.ops[step.op], plan.program.calls[graph.ops[step.op].region]
            taken = scale * (span.end - span.start) * _alone(plan, op, call)
            (sending if call.sent else staying)[graph.calls[op.region].region, call.choice, op.phase].append(taken)
        elif isinstance(step, Copy) and graph.storages[step.storage].nbytes >= LEAST_COPY_BYTES and span.end > span.start:
            rates[step.src, step.dst].append(graph.storages[step.storage].nbytes / (span.end - span.start))
    ran = {key: usual_seconds(staying.get(key, ()), sending.get(key, ())) for key in {**staying, **sending}}
    choices = {region: tuple(_corrected(choice, region, found, ran) for choice in found) for region, found in menu.choices.items()}
    machine = _with_rates(menu.problem.machine, plan.image.problem.machine, {way: median(found) for way, found in rates.items()})
    stalled = _stalled_seconds(staying) if _updated_elsewhere(plan) else 0.0
    late = _late_seconds(plan, measured)
    late += stalled - min(max(0.0, late), max(0.0, measured.seconds - seconds))  # less what only the recorded step waited
    if -EARLY * seconds < late < 0:
        late = 0.0
    between = seconds - (within - stalled) - late
    found = replace(
        menu, choices=choices, problem=_between(replace(menu.problem, machine=machine), plan, between, stalled + abs(late) > EARLY * seconds)
    )
    planned, known = plan.predicted.busy_seconds().get("cpu", 0.0), False
    if cpu_seconds and planned:
        found, known = with_cpu(found, cpu_seconds / planned), True
        late = seconds - _step_seconds(found, plan)  # what the CPU leaves of it
        late = late if abs(late) > EARLY * seconds else 0.0
    if late > 0:
        return _with_late_updates(found, plan, seconds, known)
    return _with_early_updates(found, plan, seconds, not rates, known, alone or menu.problem.machine) if late else found


def usual_seconds(staying: Sequence[float], sending: Sequence[float]) -> float:
    """Seconds of the middle one of the calls that waited for no copy."""
    least = median(staying) if staying else min(sending)
    return median([*staying, *(seconds for seconds in sending if seconds <= WAITING * least)])


def _alone(plan: Plan, op: Op, call: CallPlan) -> float:
    """The part of what a call takes in the plan that it takes by itself: updates and copies beside it take the rest, in the next plan, too."""
    choice, planned = plan.menu.choice(op.region, call.choice), plan.image.problem.device_seconds[op.id]
    alone = choice.forward_seconds if op.phase is Phase.FORWARD else choice.backward_seconds
    return min(1.0, alone / planned) if alone > 0 and planned > 0 else 1.0


def with_cpu(menu: Menu, factor: float) -> Menu:
    """With updates on the CPU that take so many times as long."""
    return replace(menu, problem=replace(menu.problem, costs=menu.problem.costs.slowed(factor, "cpu")))


def _step_seconds(menu: Menu, plan: Plan) -> float:
    """What a step by this plan takes with these costs."""
    made = image(menu, plan.program)
    return step_seconds(made.problem, made.schedule)


def _stalled_seconds(ran: Mapping[tuple[int, str, Phase], Sequence[float]]) -> float:
    """How much longer than the middle ones of their kind backward's calls took: in their midst they wait until gradients before theirs are updated,
    where plans have that before the next call."""
    return sum(max(0.0, sum(found) - len(found) * median(found)) for (_, _, phase), found in ran.items() if phase is Phase.BACKWARD)


def _late_seconds(plan: Plan, measured: Timeline) -> float:
    """How much longer than planned compute stood still before calls of modules whose state is updated elsewhere; less than nothing if it did so for
    a shorter time."""
    moved = _updated_elsewhere(plan)
    planned, found = _pauses(plan, plan.predicted, moved), _pauses(plan, measured, moved)
    return sum(found[step] - planned[step] for step in found.keys() & planned.keys())


def _updated_elsewhere(plan: Plan) -> set[str]:
    """Modules of whose state some is."""
    regions = {call.module for call in plan.menu.problem.graph.calls}
    return {region_of(path, regions) for path, place in plan.program.states.items() if place.update != "device"}


def _pauses(plan: Plan, timeline: Timeline, modules: set[str]) -> dict[int, float]:
    """From the call before to the beginning of a call of one of these modules, by step of the schedule."""
    return {call.step: call.pause_seconds for call in calls_in(plan, timeline) if call.module in modules}


@dataclass(frozen=True, slots=True)
class RegionCall:
    """Forward or backward of a region's call in a timeline."""

    step: int  # of the schedule
    module: str
    phase: Phase
    seconds: float
    pause_seconds: float  # since the call before


def calls_in(plan: Plan, timeline: Timeline) -> list[RegionCall]:
    """In the order in which they ran."""
    graph, steps = plan.image.problem.graph, plan.image.schedule.steps
    found, before = [], 0.0
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end, span.step)):
        step = steps[span.step]
        if isinstance(step, Compute) and graph.ops[step.op].region in plan.program.calls:
            op = graph.ops[step.op]
            module = graph.calls[op.region].module
            found.append(RegionCall(span.step, module, op.phase, span.end - span.start, max(0.0, span.start - before)))
            before = span.end
    return found


def _with_late_updates(menu: Menu, plan: Plan, seconds: float, is_cpu_known: bool) -> Menu:
    """Updates elsewhere as slow as they must be for a step by this plan to take so long: on the cpu, or where that is known, over the link."""
    if is_cpu_known:
        return _fitted(partial(_with_other_links, menu), 1.0, LINK_TIMES_SLOWER, plan, seconds)
    return _fitted(partial(with_cpu, menu), 1.0, MOST_TIMES_SLOWER, plan, seconds)


def _with_early_updates(menu: Menu, plan: Plan, seconds: float, links: bool, is_cpu_known: bool, alone: Machine) -> Menu:
    """Updates elsewhere as fast as they must be for a step by this plan to take no longer, on the cpu and over links that nothing was measured of.
    Where it is known how long the cpu was at them it was slower only if links cannot have been so fast: its threads stand still in that time, too."""

    def made_by(factor: float) -> Menu:
        made = _with_other_links(menu, factor, alone) if links else menu
        return made if is_cpu_known else with_cpu(made, factor)

    found = _fitted(made_by, 1 / MOST_TIMES_FASTER, 1.0, plan, seconds)
    if is_cpu_known and _step_seconds(found, plan) > (1 + OFF) * seconds:
        return _fitted(partial(with_cpu, found), 1 / MOST_TIMES_FASTER, 1.0, plan, seconds)
    return found


def _fitted(made_by: Callable[[float], Menu], least: float, most: float, plan: Plan, seconds: float) -> Menu:
    for _ in range(HALVINGS):
        middle = (least * most) ** 0.5
        least, most = (middle, most) if _step_seconds(made_by(middle), plan) < seconds else (least, middle)
    return made_by(least)


def _with_other_links(menu: Menu, factor: float, alone: Machine | None = None) -> Menu:
    """So many times as long over links with the host; not much faster than these are alone, where that is known."""
    problem = menu.problem
    ends = {problem.device_tier, "dram"}

    def slower(link: Link, lane: str, rate: float) -> float:
        if {link.src, link.dst} != ends:
            return rate
        most = math.inf if alone is None else max(rate, MOST_OF_A_LINK * alone.link(link.src, link.dst).lanes[lane])
        return min(rate / factor, most)

    return replace(menu, problem=replace(problem, machine=problem.machine.with_rates(slower)))


def _between(problem: Problem, plan: Plan, measured_seconds: float, is_held_up: bool) -> Problem:
    """Ops outside of the planned calls, all slower or faster by what they and the waiting between calls came to. Updates that run elsewhere say
    nothing about them; where compute stands still for these, it does so in more places than are told apart."""
    device, calls = problem.machine.device.name, plan.program.calls
    waiting = max(0.0, plan.predicted.seconds - plan.predicted.busy_seconds().get(device, 0.0))
    elsewhere = moved_updates(problem.graph, plan.program.states)
    outside = [
        (op.id, device)
        for op in problem.graph.ops
        if op.region not in calls and op.id not in elsewhere and (op.id, device) in problem.costs.op_seconds
    ]
    planned = sum(problem.costs.op_seconds[op] for op in outside)
    if planned <= 0 or measured_seconds <= waiting:
        return problem
    factor = (measured_seconds - waiting) / planned
    if is_held_up:
        factor = min(max(factor, 1 / MOST_OTHERWISE), MOST_OTHERWISE)
    seconds = {**problem.costs.op_seconds, **{op: factor * problem.costs.op_seconds[op] for op in outside}}
    return replace(problem, costs=replace(problem.costs, op_seconds=seconds))


def _corrected(choice: Choice, region: int, others: tuple[Choice, ...], ran: dict[tuple[int, str, Phase], float]) -> Choice:
    def seconds(planned: float, phase: Phase) -> float:
        if (found := ran.get((region, choice.name, phase))) is not None:
            return found
        of = {other.name: other.forward_seconds if phase is Phase.FORWARD else other.backward_seconds for other in others}
        known = [(name, of[name]) for name in of if (region, name, phase) in ran and of[name] > 0]
        return planned * mean(ran[region, name, phase] / was for name, was in known) if known else planned

    return replace(
        choice,
        forward_seconds=seconds(choice.forward_seconds, Phase.FORWARD),
        backward_seconds=seconds(choice.backward_seconds, Phase.BACKWARD),
    )


def _with_rates(machine: Machine, as_planned: Machine, measured: dict[tuple[str, str], float]) -> Machine:
    """By as much slower as links were than planned, where they may have had others beside them. None is faster than it is alone: a copy that was
    faster than planned had the link to itself. Lanes that more than one link uses have one rate: that of the fastest link measured on them."""
    lanes: dict[str, float] = {}
    for (src, dst), rate in measured.items():
        planned = as_planned.link(src, dst).lanes
        slowest = min(planned.values())
        for lane, alone in machine.link(src, dst).lanes.items():
            if planned[lane] == slowest:
                lanes[lane] = max(alone * min(1.0, rate / slowest), lanes.get(lane, 0.0))
    return machine.with_rates(lambda _, lane, rate: lanes.get(lane, rate))
