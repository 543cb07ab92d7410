"""A recorded step as a Timeline whose spans name the steps of the plan's schedule, so that it can be drawn over the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..execute.device import Direction, Moment
from ..execute.recording import CopyFact, Recording
from ..ir import INPUTS, Compute, Copy, Curve, Span, Timeline
from .plan import Plan

ALLOCATED = "allocated"  # the role under which measured memory stands: an allocator knows no other


def measured_timeline(recording: Recording, plan: Plan, host_bytes: int) -> Timeline:
    """Region calls and their copies; what runs between regions is not told apart and leaves gaps."""
    assert recording.end is not None and recording.after is not None
    places = _Places(plan)
    spans = sorted((*_calls(recording, places), *_copies(recording, places)), key=lambda span: (span.start, span.step))
    tier = plan.image.problem.device_tier
    samples = sorted((moment.since(recording.start), nbytes) for moment, nbytes in recording.memory)
    before, after = recording.before.peak_allocated_bytes, recording.after.peak_allocated_bytes
    peak = after if after > before else max((nbytes for _, nbytes in samples), default=after)  # the allocator's own where it rose in this step
    return Timeline(
        seconds=(recording.updated or recording.end).since(recording.start),
        peak_bytes={tier: peak, **({"dram": host_bytes} if host_bytes else {})},
        spans=tuple(spans),
        memory={tier: {ALLOCATED: Curve(tuple(when for when, _ in samples), tuple(nbytes for _, nbytes in samples))}},
        measured=True,
    )


class _Places:
    """Where in the schedule a region call, or the copy of what it saved, stands."""

    def __init__(self, plan: Plan) -> None:
        self.problem, self.coarse = plan.image.problem, plan.image.coarse
        tier = self.problem.device_tier
        self.computes: dict[int, int] = {}
        self.moves: dict[tuple[Direction, int], tuple[int, Copy]] = {}
        for place, step in enumerate(plan.image.schedule.steps):
            if isinstance(step, Compute):
                self.computes.setdefault(step.op, place)
            elif isinstance(step, Copy):
                self.moves.setdefault((Direction.OUT if step.src == tier else Direction.IN, step.storage), (place, step))

    def of_copy(self, direction: Direction, call: int, name: str, nbytes: int) -> tuple[int, Copy] | None:
        if name != INPUTS:
            storage = self.coarse.saved.get((call, name))
            return self.moves.get((direction, storage)) if storage is not None else None
        given = [storage for storage in self.coarse.inputs.get(call, ()) if (direction, storage) in self.moves]
        storages = self.problem.graph.storages
        return next((self.moves[direction, storage] for storage in given if storages[storage].nbytes == nbytes), None)

    def lanes(self, copy: Copy) -> Iterable[str]:
        return self.problem.machine.link(copy.src, copy.dst).lanes


def _calls(recording: Recording, places: _Places) -> Iterator[Span]:
    lane = places.problem.machine.device.name
    for call, fact in recording.calls.items():
        for moments, ops in ((fact.forward, places.coarse.forward), (fact.backward, places.coarse.backward)):
            place = places.computes.get(ops.get(call, -1))
            if len(moments) > 1 and place is not None:
                times = [moment.since(recording.start) for moment in moments]
                yield Span(place, lane, min(times), max(times))


def _copies(recording: Recording, places: _Places) -> Iterator[Span]:
    for fact in recording.copies:
        for call, name, nbytes, start, end in _shares(fact, recording):
            found = places.of_copy(fact.direction, call, name, nbytes)
            if found is not None:
                place, copy = found
                for lane in places.lanes(copy):
                    yield Span(place, lane, start, end)


def _shares(fact: CopyFact, recording: Recording) -> Iterator[tuple[int, str, int, float, float]]:
    """What travelled in one parcel, one behind the other, as long as its bytes take."""
    inside = recording.sent.get(fact.parcel, [])
    at, end = _seconds(fact.start, recording), _seconds(fact.end, recording)
    total, taken = sum(nbytes for *_, nbytes in inside) or 1, end - at
    for call, name, nbytes in inside:
        until = at + taken * nbytes / total
        yield call, name, nbytes, at, until
        at = until


def _seconds(moment: Moment, recording: Recording) -> float:
    return moment.since(recording.start)
