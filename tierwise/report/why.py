"""A plan in sentences: what was decided for each class of tensor, what it was weighed against, and what the step waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..ir import BUFFERS, Compute, Copy, Phase, Problem, Role, Schedule, Timeline
from ..units import format_bytes, format_seconds
from .fates import Fate, fates, recomputations
from .waits import waits_of
from .words import role_words

GIB = 1 << 30
BUSY = 0.97  # of the step: a device that works so much of it is what limits it


def decisions(problem: Problem, schedule: Schedule) -> list[str]:
    """One sentence for each class of tensor there is."""
    return [
        *_activations(problem, schedule),
        *_gradients(problem, schedule),
        *(line for role in (Role.PARAM, Role.OPTIMIZER_STATE, Role.BUFFER) for line in _lasting(problem, schedule, role)),
        *_updates(problem, schedule),
    ]


def _activations(problem: Problem, schedule: Schedule) -> Iterator[str]:
    graph = problem.graph
    nbytes: Counter[Fate] = Counter()
    for storage, fate in fates(problem, schedule).items():
        if not graph.storages[storage].lasting:
            nbytes[fate] += graph.storages[storage].nbytes
    again = sum(problem.seconds(step.op, step.on, step.variant) for _, step in recomputations(schedule))
    if not sum(nbytes.values()) and not again:
        return
    parts = [f"{format_bytes(nbytes[Fate.KEPT])} kept"]
    if nbytes[Fate.COPIED]:
        parts.append(f"{format_bytes(nbytes[Fate.COPIED])} copied away and back")
    if again:
        parts.append(f"{format_bytes(nbytes[Fate.RECOMPUTED])} recomputed in {format_seconds(again)}")
    line = f"activations: of {format_bytes(sum(nbytes.values()))} that wait for backward, {_listed(parts)}"
    prices = _prices(problem, again, nbytes[Fate.RECOMPUTED])
    yield f"{line}; {prices}" if prices and len(parts) > 1 else line


def _prices(problem: Problem, again: float, nbytes: int) -> str:
    """What a GiB costs by each way: the reason why one was taken and not the other."""
    parts = []
    if again and nbytes:
        parts.append(f"recomputing a GiB costs {format_seconds(again / nbytes * GIB)}")
    back = [link for link in problem.machine.links if link.dst == problem.device_tier and link.src not in BUFFERS]
    if back:
        fastest = max(back, key=lambda link: link.bytes_per_second)
        parts.append(f"copying a GiB back from {fastest.src} takes the link {format_seconds(GIB / fastest.bytes_per_second)}")
    return " and ".join(parts)


def _gradients(problem: Problem, schedule: Schedule) -> Iterator[str]:
    graph, device = problem.graph, problem.device_tier
    gradients = {s.id for s in graph.storages if s.role is Role.GRAD}
    total = sum(graph.storages[s].nbytes for s in gradients)
    if not total:
        return
    left: Counter[str] = Counter()
    for step in schedule.steps:
        if isinstance(step, Copy) and step.storage in gradients and step.src == device and step.dst not in (device, *BUFFERS):
            left[step.dst] += graph.storages[step.storage].nbytes
    order = [step.op for step in schedule.steps if isinstance(step, Compute) and not step.iteration]
    last_backward = max((place for place, op in enumerate(order) if graph.ops[op].phase is Phase.BACKWARD), default=-1)
    early = sum(
        graph.storages[s].nbytes for place, op in enumerate(order) if place < last_backward and graph.ops[op].phase is Phase.UPDATE
        for s in graph.ops[op].reads if s in gradients
    )  # fmt: skip
    parts = [f"{format_bytes(nbytes)} go to {tier} as they come" for tier, nbytes in sorted(left.items())]
    if early:
        parts.append(f"{format_bytes(early)} go with their update before backward is over")
    yield f"gradients: {format_bytes(total)}, " + (_listed(parts) if parts else "on the device until their update")


def _lasting(problem: Problem, schedule: Schedule, role: Role) -> Iterator[str]:
    graph = problem.graph
    homes: Counter[str] = Counter()
    for storage in graph.storages:
        if storage.role is role and storage.lasting and storage.nbytes:
            tiers = schedule.home.get(storage.id, (problem.device_tier,))
            homes[" and ".join(tier for tier in tiers if tier not in BUFFERS)] += storage.nbytes
    if homes:
        yield f"{role_words(role)}: " + _listed([f"{format_bytes(nbytes)} at home in {tier}" for tier, nbytes in homes.most_common()])


def _updates(problem: Problem, schedule: Schedule) -> Iterator[str]:
    graph, device = problem.graph, problem.machine.device.name
    where: Counter[str] = Counter()
    for step in schedule.steps:
        if isinstance(step, Compute) and graph.ops[step.op].phase is Phase.UPDATE:
            under = " under the next step's forward" if step.iteration else ""
            processor, _, beside = step.on.partition(",")  # a stream of its own has the name of its processor, and what it is for
            where[f"on the {processor}{' beside its other work' * bool(beside)}{under}"] += 1
    if any(place != f"on the {device}" for place in where):
        yield "updates: " + _listed([f"{count} {place}" for place, count in where.most_common()])


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# -- what it waits for ------------------------------------------------------------------------------------------------------------------


def limit(problem: Problem, schedule: Schedule, timeline: Timeline) -> str:
    """What would have to be faster for the step to be: the device's work, or the lane it waits for most."""
    device, step = problem.machine.device.name, timeline.seconds
    if not step:
        return "nothing: the step takes no time"
    busy = min(step, timeline.busy_seconds().get(device, 0.0))
    again = sum(problem.seconds(run.op, run.on, run.variant) for _, run in recomputations(schedule))
    work = f"the {device} works {busy / step:.0%} of the step" + (f", {again / step:.0%} of it on what was computed before" if again else "")
    if busy >= BUSY * step:
        return f"compute: {work}"
    _, waits = waits_of(timeline, device)
    if not waits:
        return f"the order of things: {work}, and nothing else is busy while it waits"
    lane, seconds = max(waits.items(), key=lambda found: (found[1], found[0]))
    return f"{_lane_words(problem, lane)}: {work}, and waits for {format_seconds(seconds)} while {lane} is busy"


def _lane_words(problem: Problem, lane: str) -> str:
    if lane in problem.machine.processor_named:
        return f"the {lane}"
    through = [link for link in problem.machine.links if lane in link.lanes]
    device = problem.device_tier
    if all({link.src, link.dst} & {"nvme", "disk"} for link in through):
        return "the disk"
    to = {link.dst for link in through}
    return f"the link {'to' if device in to else 'from'} the device"


# -- what more or less memory would do --------------------------------------------------------------------------------------------------


def change_bytes(budget_bytes: int) -> int:
    """How much more and less is tried: a GiB, or an eighth of a small budget."""
    return GIB if budget_bytes >= 8 * GIB else max(1, budget_bytes // 8)


def with_more(change: int, seconds: float, now: float) -> str:
    gain = now - seconds
    if gain <= 0.001 * now:
        return f"{format_bytes(change)} more would buy nothing"
    return f"{format_bytes(change)} more would buy {format_seconds(gain)} a step ({gain / now:.1%})"


def with_less(change: int, seconds: float | None, now: float) -> str:
    """`seconds`: None where there is no plan."""
    if seconds is None:
        return f"{format_bytes(change)} less is too little for any plan"
    loss = seconds - now
    if loss <= 0.001 * now:
        return f"{format_bytes(change)} less would cost nothing"
    return f"{format_bytes(change)} less would cost {format_seconds(loss)} a step ({loss / now:.1%})"
