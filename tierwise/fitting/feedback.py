"""What a recorded step says about the costs a plan was made with: times of regions and rates of links, for the next plan.

A call that waits for a copy looks slow, and so does a copy that waits for its turn; so of the calls of one class and choice the quickest counts, and
of the copies over a link the middle one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import mean, median

from ..ir import Choice, Compute, Copy, Machine, Menu, Phase, Timeline
from .plan import Plan

OFF = 0.05  # of the predicted time of a step: what a prediction may be off by
MOST_CORRECTIONS = 2
AT_STEP = 3  # of a plan: by then everything is compiled and warm
LEAST_COPY_BYTES = 1 << 20  # smaller ones say more about the latency of a link than about its rate


def is_off(predicted: Timeline, measured: Timeline) -> bool:
    return abs(measured.seconds / predicted.seconds - 1) > OFF


def corrected(plan: Plan, measured: Timeline) -> Menu:
    """The plan's menu with what was measured: choices that ran as they ran, others of their class by the same factor, links at their rates."""
    menu, graph = plan.menu, plan.image.problem.graph
    seconds: dict[tuple[int, str, Phase], list[float]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in measured.spans:
        step = plan.image.schedule.steps[span.step]
        if isinstance(step, Compute) and graph.ops[step.op].region in plan.program.calls:
            op = graph.ops[step.op]
            region, choice = graph.calls[op.region].region, plan.program.calls[op.region].choice
            seconds[region, choice, op.phase].append(span.end - span.start)
        elif isinstance(step, Copy) and graph.storages[step.storage].nbytes >= LEAST_COPY_BYTES and span.end > span.start:
            rates[step.src, step.dst].append(graph.storages[step.storage].nbytes / (span.end - span.start))
    quickest = {key: min(found) for key, found in seconds.items()}
    choices = {region: tuple(_corrected(choice, region, found, quickest) for choice in found) for region, found in menu.choices.items()}
    machine = _with_rates(menu.problem.machine, {way: median(found) for way, found in rates.items()})
    return replace(menu, choices=choices, problem=replace(menu.problem, machine=machine))


def _corrected(choice: Choice, region: int, others: tuple[Choice, ...], quickest: dict[tuple[int, str, Phase], float]) -> Choice:
    def seconds(planned: float, phase: Phase) -> float:
        if (found := quickest.get((region, choice.name, phase))) is not None:
            return found
        of = {other.name: other.forward_seconds if phase is Phase.FORWARD else other.backward_seconds for other in others}
        known = [(name, of[name]) for name in of if (region, name, phase) in quickest and of[name] > 0]
        return planned * mean(quickest[region, name, phase] / was for name, was in known) if known else planned

    return replace(
        choice,
        forward_seconds=seconds(choice.forward_seconds, Phase.FORWARD),
        backward_seconds=seconds(choice.backward_seconds, Phase.BACKWARD),
    )


def _with_rates(machine: Machine, measured: dict[tuple[str, str], float]) -> Machine:
    """Lanes that more than one link uses have one rate: that of the fastest link measured on them."""
    lanes: dict[str, float] = {}
    for (src, dst), rate in measured.items():
        slowest = min(machine.link(src, dst).lanes.values())
        for lane, planned in machine.link(src, dst).lanes.items():
            if planned == slowest:
                lanes[lane] = max(rate, lanes.get(lane, 0.0))
    links = tuple(replace(link, lanes={lane: lanes.get(lane, rate) for lane, rate in link.lanes.items()}) for link in machine.links)
    return replace(machine, links=links)
