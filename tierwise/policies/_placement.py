"""Addresses for a schedule: where everything on the device lies, so that no two things that are there at once overlap.

A schedule says what is there when; a placement gives each stay an offset. Placed online, allocations are met one by one in list order, as a
runtime's allocator does it. Placed offline, all stays are known: the largest first, each into the range that nothing living at the same time
has taken. What a placement needs beyond the bytes that are there at once is its fragmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import BadInput, UnknownName
from ..ir import Compute, Copy, Free, Problem, Role, Schedule
from ..ir.schedule import AT_START, WORKSPACE
from ._heap import SizeClassHeap, TwoEndedHeap, quarter_powers

FITS = ("best", "first")
ALLOCATORS = ("first-fit", "best-fit", "two-ended", "size-class", "offline")


@dataclass(slots=True)
class Stay:
    """A storage, or workspace, on the device from step `start` until before step `end`. The step that puts it there names its address."""

    step: int
    storage: int
    nbytes: int
    start: int
    end: int = -1
    crosses: bool = False  # it is there at both ends of the step
    goes: bool = False  # it is copied out


@dataclass(frozen=True, slots=True)
class Placement:
    addresses: Mapping[tuple[int, int], int]
    height_bytes: int  # what the addresses span
    used_bytes: int  # the most bytes that are there at once

    @property
    def fragmentation(self) -> float:
        """The share of the span that is lost at the fullest moment."""
        return 1 - self.used_bytes / self.height_bytes if self.height_bytes else 0.0


def placed(problem: Problem, schedule: Schedule, allocator: str = "offline") -> tuple[Schedule, Placement]:
    """The schedule with addresses. Whether they are within the budget is for the judge to say."""
    found = place(problem, schedule, allocator)
    return replace(schedule, addresses=found.addresses), found


def place(problem: Problem, schedule: Schedule, allocator: str = "offline") -> Placement:
    if allocator not in ALLOCATORS:
        raise UnknownName("allocator", allocator, ALLOCATORS)
    if allocator == "offline":
        return place_offline(problem, schedule)
    found = stays(problem, schedule)
    total = sum(quarter_powers(stay.nbytes) for stay in found)
    if allocator == "size-class":
        slots = SizeClassHeap(total, quarter_powers)
        addresses = _online(found, lambda stay: slots.take(stay.nbytes), slots.give_back)
        assert addresses is not None
        return Placement(addresses, slots.height_bytes, used_bytes(found))
    if allocator == "two-ended":
        return _two_ended(found, total)
    heap = TwoEndedHeap(total)
    take = heap.take_low if allocator == "first-fit" else heap.take_best
    addresses = _online(found, lambda stay: take(stay.nbytes), heap.give_back)
    assert addresses is not None
    return _placement(found, addresses)


# -- who is there when ------------------------------------------------------------------------------------------------------------------


def stays(problem: Problem, schedule: Schedule) -> list[Stay]:
    """Every stay on the device, by the step that begins it."""
    graph, device = problem.graph, problem.device_tier
    on_device = {processor.name for processor in problem.machine.processors if processor.tier == device}
    if any(step.iteration for step in schedule.steps):
        raise BadInput("a schedule whose steps reach into the next step cannot be given addresses; leave its addresses out")
    size = [storage.nbytes for storage in graph.storages]
    found: list[Stay] = []
    here: dict[tuple[int, str], Stay] = {}  # by storage and form

    def put(step: int, storage: int, form: str = "") -> None:
        here[storage, form] = Stay(step, storage, problem.form_bytes(storage, form), step)
        found.append(here[storage, form])

    for known in graph.storages:
        if device in schedule.home.get(known.id, ()) and (known.role is Role.INPUT or graph.is_there_at_start(known.id)):
            put(AT_START, known.id)
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute) and step.on in on_device:
            op = graph.ops[step.op]
            taken_over = {new: old for old, new in op.in_place}
            workspace = problem.costs.variant_of[op.id, step.variant].workspace_bytes if step.variant else op.workspace_bytes
            if workspace:
                found.append(Stay(place, WORKSPACE, workspace, place, place + 1))
            for storage in op.writes:
                if storage in taken_over:
                    stay = here.pop((taken_over[storage], ""))
                    if (storage, "") in here:
                        stay.end = place + 1
                    else:
                        here[storage, ""] = stay
                        stay.nbytes = max(stay.nbytes, size[storage])
                elif (storage, "") not in here:
                    put(place, storage)
                elif not graph.storages[storage].lasting:
                    found.append(Stay(place, storage, size[storage], place, place + 1))  # made twice: the second is dropped after the op
        elif isinstance(step, Copy):
            if step.src == device != step.dst:
                here[step.storage, step.src_form].goes = True
            if step.dst == device and (step.storage, step.dst_form) not in here:
                put(place, step.storage, step.dst_form)
        elif isinstance(step, Free) and step.tier == device:
            here.pop((step.storage, step.form)).end = place
    end = len(schedule.steps) + 1
    for (storage_id, _), stay in here.items():
        stay.end = end
        if graph.storages[storage_id].lasting and stay.start > AT_START and problem.cyclic and not _began_at_start(found, storage_id):
            stay.start, stay.crosses = AT_START, True  # made in the first step only: from then on it is always there
    for stay in found:
        lasting = stay.storage != WORKSPACE and graph.storages[stay.storage].lasting
        stay.crosses |= lasting and problem.cyclic and (stay.start == AT_START or stay.end == end)
    return found


def _began_at_start(found: list[Stay], storage: int) -> bool:
    return any(stay.storage == storage and stay.step == AT_START for stay in found)


def used_bytes(found: list[Stay]) -> int:
    """The most bytes that are there at once."""
    changes = sorted(change for stay in found for change in ((stay.start, stay.nbytes), (stay.end, -stay.nbytes)))
    most = held = 0
    for _, nbytes in changes:
        held += nbytes
        most = max(most, held)
    return most


def _placement(found: list[Stay], addresses: dict[tuple[int, int], int]) -> Placement:
    height = max((addresses[stay.step, stay.storage] + stay.nbytes for stay in found), default=0)
    return Placement(addresses, height, used_bytes(found))


# -- all known --------------------------------------------------------------------------------------------------------------------------


def place_offline(problem: Problem, schedule: Schedule, *, fit: str = "best") -> Placement:
    """What crosses the end of the step first, then the largest first, the longest of equals; each in the best or the first range that is free
    for as long as it stays. A lasting storage that leaves and returns is where it was at both ends."""
    if fit not in FITS:
        raise UnknownName("fit", fit, FITS)
    found = stays(problem, schedule)
    together: dict[tuple[int, int], list[Stay]] = {}
    for stay in found:
        together.setdefault((stay.storage, -1) if stay.crosses else (stay.storage, stay.step), []).append(stay)
    groups = sorted(
        together.values(),
        key=lambda group: (
            not group[0].crosses,
            -max(s.nbytes for s in group),
            -sum(s.end - s.start for s in group),
            group[0].start,
            group[0].storage,
        ),
    )
    addresses: dict[tuple[int, int], int] = {}
    table = np.zeros((4, len(found)), dtype=np.int64)  # start, end, low, high of what is placed
    count = 0
    for group in groups:
        nbytes = max(stay.nbytes for stay in group)
        starts, ends, lows, highs = table[:, :count]
        meets = np.zeros(count, dtype=bool)
        for stay in group:
            meets |= (starts < stay.end) & (ends > stay.start)
        offset = _fit(lows[meets], highs[meets], nbytes, best=fit == "best") if nbytes else 0
        for stay in group:
            addresses[stay.step, stay.storage] = offset
            if nbytes:
                table[:, count] = stay.start, stay.end, offset, offset + nbytes
                count += 1
    return _placement(found, addresses)


def _fit(lows: np.ndarray, highs: np.ndarray, nbytes: int, *, best: bool) -> int:
    """The low end of the smallest, or the first, hole of at least so many bytes between these ranges; above all of them if there is none."""
    if not len(lows):
        return 0
    order = np.argsort(lows, kind="stable")
    tops = np.concatenate(([0], np.maximum.accumulate(highs[order])))
    holes = lows[order] - tops[:-1]
    fits = np.flatnonzero(holes >= nbytes)
    if not len(fits):
        return int(tops[-1])
    return int(tops[fits[np.argmin(holes[fits])] if best else fits[0]])


# -- one by one -------------------------------------------------------------------------------------------------------------------------


def _online(found: list[Stay], take: Callable[[Stay], int | None], give_back: Callable[[int, int], None]) -> dict[tuple[int, int], int] | None:
    """Offsets as an allocator hands them out in list order; None if it finds no room. What crosses the end of the step keeps its place."""
    addresses: dict[tuple[int, int], int] = {}
    kept: dict[int, int] = {}
    ends: dict[int, list[Stay]] = {}
    begins: dict[int, list[Stay]] = {}
    for stay in found:
        if not stay.crosses:
            begins.setdefault(stay.start, []).append(stay)
            ends.setdefault(stay.end, []).append(stay)
        elif stay.storage not in kept:
            if (offset := take(stay)) is None:
                return None
            kept[stay.storage] = offset
    addresses |= {(stay.step, stay.storage): kept[stay.storage] for stay in found if stay.crosses}
    for step in sorted({*begins, *ends}):
        for stay in ends.get(step, ()):
            give_back(addresses[stay.step, stay.storage], stay.nbytes)
        for stay in begins.get(step, ()):
            if (offset := take(stay)) is None:
                return None
            addresses[stay.step, stay.storage] = offset
    return addresses


def _two_ended(found: list[Stay], enough: int) -> Placement:
    """What is copied out from the high end, all else from the low one, in the smallest heap that has room, to a thousandth."""

    def attempt(capacity: int) -> dict[tuple[int, int], int] | None:
        heap = TwoEndedHeap(capacity)
        return _online(found, lambda stay: (heap.take_high if stay.goes else heap.take_low)(stay.nbytes), heap.give_back)

    low, high = used_bytes(found), max(1, enough)
    addresses = attempt(high)
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        tried = attempt(middle)
        low, high, addresses = (middle, high, addresses) if tried is None else (low, middle, tried)
    assert addresses is not None
    return _placement(found, addresses)
