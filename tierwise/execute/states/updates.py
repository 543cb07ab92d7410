"""Updates in three places: on the device, on the CPU, and streamed through the device. Each unit has one; one step mixes them.

    device     state, gradient and parameter are there: done at once, in line with compute
    cpu        the gradient has come to the host; a lane of its own updates the state there, chunk by chunk, and sends the parameter to the device
    streamed   a lane drives chunks of state to the device, a kernel beside compute updates them, and they go back: both directions at once

An update on a lane is pending until somebody needs the parameter: the unit's next forward, or whoever reads it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ..device import CudaDevice, Device, Direction, waited_here
from ..host_pool import Block, HostPool
from ..lanes import Event, Lane, Signal, Turns, already
from .arithmetic import Arithmetic, Piece
from .backlog import Backlog
from .beside import Beside
from .gradients import Factor, Held, HostGradients
from .homes import ChunkHome, DiskChunks, HostFlat, Ring, copy_block
from .units import Slot, Unit
from .whole import Whole
from .worked import Worked

STAGING_BUFFERS = 3  # one arriving, one in work, one leaving
CHUNKS_A_TURN = 2  # of a link: a turn costs it 0.1 ms, and a chunk takes 2
CHUNKS_AHEAD = 12  # of a link, 20 ms: no thread is that late, and what comes after them waits no longer


@dataclass(eq=False, slots=True)
class Stored:
    """A unit with everything that is kept for it."""

    unit: Unit
    names: tuple[str, ...] = ()  # rows of its state
    dtype: torch.dtype = torch.float32
    has_master: bool = False  # the first row holds the weights, the parameter is made from them
    chunks: ChunkHome | None = None  # its state, in host memory or on disk
    arrays: torch.Tensor | None = None  # its state, on the device
    gradients: HostGradients | None = None  # in host memory, if they go there; taken from a shelf when the first one arrives
    parameters: HostFlat | DiskChunks | None = None  # where they live if not on the device
    was_written: bool = False  # they may be other than what their masters say: somebody wrote to them
    held: dict[Slot, Held] = field(default_factory=dict)
    arrived: set[Slot] = field(default_factory=set)
    pending: Pending | None = None

    @property
    def states(self) -> tuple[str, ...]:
        return self.names[1:] if self.has_master else self.names

    @property
    def wants_gradients(self) -> bool:
        """Whether its gradients are in host memory when it is updated."""
        return self.unit.trained and (self.unit.placement.gradients == "host" or self.unit.placement.update == "cpu")

    @property
    def gradients_wait(self) -> bool:
        """Whether they stay on the device until state passes through it."""
        return self.unit.trained and self.unit.placement.update == "streamed" and not self.wants_gradients

    @property
    def row_count(self) -> int:
        return len(self.names)


class Pending:
    """An update under way. `event` is when the parameters are there, known once the lane has done its part."""

    def __init__(self) -> None:
        self.signal: Signal | None = None
        self.event: Event = already()
        self.keep: list[Any] = []  # bytes of the device that the update reads or writes


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring elements that are updated with the same numbers."""

    span: slice
    settled: Any
    factor: Factor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Of a unit that is updated."""

    index: int
    span: slice
    parts: Sequence[tuple[Run, slice]]
    makes_all: bool  # of its parameters, from their masters, so that the old ones need not be there


@dataclass(frozen=True, slots=True)
class Job:
    """One update of one unit."""

    runs: tuple[Run, ...]
    slots: frozenset[Slot]
    gradients: dict[Slot, torch.Tensor]  # flat, on the device; empty if they are at home
    targets: dict[Slot, torch.Tensor]  # parameters on the device, flat
    arrivals: tuple[Event, ...]  # of gradients in host memory
    ready: Event  # all compute that reads the old parameters

    def parts(self, chunk: slice) -> list[tuple[Run, slice]]:
        found = []
        for run in self.runs:
            start, stop = max(run.span.start, chunk.start), min(run.span.stop, chunk.stop)
            if start < stop:
                found.append((run, slice(start, stop)))
        return found


class Staging:
    """Buffers on the device for chunks that pass through, counted by the plan."""

    def __init__(self, device: Device, nbytes: int, count: int = STAGING_BUFFERS) -> None:
        self.buffers = [device.empty(nbytes) for _ in range(count)]
        self.free: list[Event] = [device.mark() for _ in range(count)]
        self._turn = 0

    def next(self) -> int:
        self._turn = (self._turn + 1) % len(self.buffers)
        return self._turn


class Updates:
    """The lanes, the buffers and the code of updates."""

    def __init__(self, device: Device, pool: HostPool | None, arithmetic: Arithmetic, stored: Sequence[Stored]) -> None:
        self.device, self.arithmetic = device, arithmetic
        # Streams of their own, for either: a parameter that waits for memory, or a gradient for compute, must not hold up state that passes through,
        # nor must that, which is issued early and waits for compute, hold up what the cpu has made.
        self._copiers = {place: CudaDevice(device.torch_device.index) if isinstance(device, CudaDevice) else device for place in ("cpu", "streamed")}
        self._lanes: dict[str, Lane] = {}
        self._rings: dict[str, Ring] = {}
        self.staging: Staging | None = None
        self._issued: deque[Event] = deque()  # chunks that pass through the device, the oldest first
        self._layouts: dict[tuple[Stored, int, int], _Staged] = {}  # by unit, chunk and buffer
        self.beside = Beside(device)
        self.on_cpu = Worked()  # without what comes from a disk, which is waited for
        places = {home.unit.placement.update for home in stored if home.unit.trained}
        for place in ("cpu", "streamed"):
            if place in places:
                self._lanes[place] = Lane(f"{place} update")
        self._turns = Turns() if self._lanes else None
        self._backlog = Backlog(self._lanes["cpu"]) if "cpu" in self._lanes else None
        sizes = ring_bytes(stored)
        for name, (nbytes, count) in sizes.items():
            assert pool is not None
            self._rings[name] = Ring(pool, nbytes, count)
        staged = staging_bytes(stored)
        if staged:
            self.staging = Staging(device, staged)

    @property
    def runs_beside(self) -> bool:
        """Whether anything is updated while the model runs."""
        return bool(self._lanes)

    @property
    def host_lane(self) -> Lane:
        """Where the host works on gradients: beside compute, before the updates that come after."""
        if "cpu" not in self._lanes:
            self._lanes["cpu"] = Lane("cpu update")
        return self._lanes["cpu"]

    def ring(self, kind: str, home: Stored) -> Ring | None:
        return self._rings.get(f"{kind} {home.unit.placement.update}")

    def launch(self, home: Stored, job: Job, needed: int = 0) -> Pending | None:
        """Start an update; None if it is in line with compute, so that there is nothing to wait for. `needed`: of those that wait for the CPU, the
        one with the least goes first."""
        place = home.unit.placement.update
        if place == "device":
            self._on_device(home, job)
            return None
        pending = Pending()
        pending.keep += [job.gradients, job.targets]

        def run() -> None:
            pending.event = self._on_cpu(home, job, needed) if place == "cpu" else self._streamed(home, job)

        if place == "cpu" and self._backlog is not None:
            pending.signal = self._backlog.put(run, arrivals=job.arrivals, needed=needed)
        else:
            pending.signal = self._lanes[place].put(run)
        return pending

    def renew(self) -> None:
        """After a failure: nothing runs, and all buffers are free again."""
        for lane in self._lanes.values():
            lane.drain()
        for ring in self._rings.values():
            ring.renew()
        self._issued.clear()
        if self.staging is not None:
            self.staging.free = [self.device.mark() for _ in self.staging.free]

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        if self._backlog is not None:
            self._backlog.close()
        if self._turns is not None:
            self._turns.close()
        for ring in self._rings.values():
            ring.close()
        self._lanes.clear()
        self._rings.clear()
        self._layouts.clear()
        self.staging = None

    # -- on the device ----------------------------------------------------------------------------------------------------------------

    def _on_device(self, home: Stored, job: Job) -> None:
        assert home.arrays is not None
        for run, part in job.parts(slice(0, home.unit.numel)):
            for slot, piece in home.unit.pieces(part):
                target = job.targets[slot]
                weights = home.arrays[0, piece] if home.has_master else target
                rows = home.arrays[1:] if home.has_master else home.arrays
                out = target if home.has_master else None
                self.arithmetic.run([Piece(run.settled, weights, job.gradients[slot], [row[piece] for row in rows], out, _number(run.factor))])

    # -- on the CPU -------------------------------------------------------------------------------------------------------------------

    def _on_cpu(self, home: Stored, job: Job, needed: int = 0) -> Event:
        """Between chunks it lets in what is needed before it, unless it has some in buffers already that others may want."""
        assert home.chunks is not None and home.gradients is not None
        for event in job.arrivals:
            event.wait()
        gradient = home.gradients.flat
        if isinstance(self.arithmetic, Whole):
            return self._whole_on_cpu(home, job, self.arithmetic)
        others = None if DiskChunks in (type(home.chunks), type(home.parameters)) else self._backlog
        is_direct = home.parameters is not None or (home.has_master and home.dtype == home.unit.dtype)  # the master itself can be copied
        worked = None if others is None else self.on_cpu
        under_way = _UnderWay(home, job, self._copiers["cpu"], None if is_direct else self._rings["bounce cpu"], worked)
        with contextlib.closing(under_way), contextlib.nullcontext() if worked is None else worked.at_it():
            self._chunks_on_cpu(home, job, gradient, others, needed, under_way)
            return under_way.finish()

    def _chunks_on_cpu(self, home: Stored, job: Job, gradient: torch.Tensor, others: Backlog | None, needed: int, under_way: _UnderWay) -> None:
        assert home.chunks is not None
        for chunk in self._walk(home, job):
            if others is not None:
                others.let_in(needed, under_way.finish)
            arrays, after = home.chunks.take(chunk.index)
            for event in after:
                event.wait()
            out, bounce = None, None
            if home.parameters is not None:
                fresh, after = home.parameters.take(chunk.index)
                for event in after:
                    event.wait()
                out = fresh[0]
            elif under_way.bounces is not None:
                bounce = under_way.bounces.next()
                out = bounce.bytes.view(home.unit.dtype)[: chunk.span.stop - chunk.span.start]
            rows = arrays[1:] if home.has_master else arrays
            pieces = []
            for run, part in chunk.parts:
                here = slice(part.start - chunk.span.start, part.stop - chunk.span.start)
                if home.has_master:
                    weights, made = arrays[0, here], None if out is None else out[here]
                else:
                    assert out is not None
                    weights, made = out[here], None
                pieces.append(Piece(run.settled, weights, gradient[part], [row[here] for row in rows], made, _number(run.factor)))
            # Before the one before is waited for, so that the processors always have some.
            under_way.put(self.arithmetic.start(pieces), chunk.index, chunk.span, bounce)
            under_way.finish(but=0 if others is None else 1)

    def _whole_on_cpu(self, home: Stored, job: Job, arithmetic: Whole) -> Event:
        assert home.chunks is not None and home.gradients is not None
        arrays, after = home.chunks.take(0)
        for event in after:
            event.wait()
        settled = {slot: run.settled for run in job.runs for slot, _ in home.unit.pieces(run.span)}
        numbers = {slot: _number(run.factor) for run in job.runs for slot, _ in home.unit.pieces(run.span)}
        flat = home.gradients.flat
        gradients = {slot: slot.shaped(flat) if numbers[slot] == 1.0 else slot.shaped(flat).mul(numbers[slot]) for slot in job.slots}
        ordered = [slot for slot in home.unit.slots if slot in job.slots]
        arithmetic.run_unit(settled, {slot: slot.shaped(arrays[0]) for slot in ordered}, gradients)
        last: Event = already()
        if home.parameters is not None:
            fresh, after = home.parameters.take(0)
            for event in after:
                event.wait()
            for slot in ordered:
                fresh[0, slot.offset : slot.stop].copy_(arrays[0, slot.offset : slot.stop])
            home.parameters.give(0, already())
        else:
            size = home.unit.dtype.itemsize
            for slot in ordered:
                span, there = slice(slot.offset * size, slot.stop * size), job.targets[slot].view(torch.uint8)
                last = copy_block(self._copiers["cpu"], Direction.IN, home.chunks.block(0), span, there, after=(job.ready,))
        home.chunks.give(0, last)
        return last

    # -- through the device -------------------------------------------------------------------------------------------------------------

    def _streamed(self, home: Stored, job: Job) -> Event:
        assert home.chunks is not None and self.staging is not None
        copier = self._copiers["streamed"]
        made: Event = already()
        arrivals = waited_here(job.arrivals)  # not on the copy lane: the host's work on a gradient may stand behind updates that wait for that lane
        leaving: tuple[int, Event, Event] | None = None
        for chunk in self._walk(home, job):
            index = chunk.index
            while len(self._issued) >= CHUNKS_AHEAD:
                self._issued.popleft().wait()
            number = self.staging.next()
            waited_here((self.staging.free[number],))  # a lane that waits for a buffer would keep the link from others
            layout = self._layout(home, chunk, number)
            _, after = home.chunks.take(index)
            come = copy_block(
                copier, Direction.IN, home.chunks.block(index), home.chunks.span(index), layout.state_bytes,
                after=(self.staging.free[number], *after),
            )  # fmt: skip
            if home.wants_gradients:
                assert home.gradients is not None
                size = home.unit.dtype.itemsize
                span = slice(chunk.span.start * size, chunk.span.stop * size)
                come = copy_block(copier, Direction.IN, home.gradients.block, span, layout.gradient_bytes, after=(come, *arrivals))
            if home.parameters is not None:
                _, after = home.parameters.take(index)
            if home.parameters is not None and not chunk.makes_all:
                come = copy_block(
                    copier, Direction.IN, home.parameters.block(index), home.parameters.span(index), layout.parameter_bytes, after=after
                )
            if index % CHUNKS_A_TURN == 0:
                copier.let_others(Direction.IN)  # a forward waits for parameters that come the same way
            with self.beside.after((come, job.ready)):
                self._compute_staged(home, job, chunk, layout)
                done = self.device.mark()
            made = done
            if home.parameters is not None:  # before the state: the next forward waits for them
                made = copy_block(
                    copier, Direction.OUT, home.parameters.block(index), home.parameters.span(index), layout.parameter_bytes, after=(done,)
                )
            last = copy_block(copier, Direction.OUT, home.chunks.block(index), home.chunks.span(index), layout.state_bytes, after=(done,))
            self.staging.free[number] = last
            self._issued.append(last)
            if leaving is not None:
                self._give(home, *leaving)
            leaving = index, last, made
        if leaving is not None:
            self._give(home, *leaving)
        return made

    def _layout(self, home: Stored, chunk: Chunk, number: int) -> _Staged:
        """Made once for each chunk and buffer: a chunk passes in two thousandths of a second, and a thread that cuts tensors keeps others from
        Python."""
        assert self.staging is not None
        key = home, chunk.index, number
        if key not in self._layouts:
            self._layouts[key] = _Staged(home, chunk.span, self.staging.buffers[number])
        return self._layouts[key]

    def _compute_staged(self, home: Stored, job: Job, chunk: Chunk, layout: _Staged) -> None:
        found = []
        for run, part in chunk.parts:
            for slot, piece in home.unit.pieces(part):
                cut = layout.cut(piece)
                in_slot = slice(piece.start - slot.offset, piece.stop - slot.offset)
                target = cut.parameter if home.parameters is not None else job.targets[slot][in_slot]
                gradient = cut.gradient if home.wants_gradients else job.gradients[slot][in_slot]
                weights, states, out = (cut.rows[0], cut.rows[1:], target) if home.has_master else (target, cut.rows, None)
                found.append(Piece(run.settled, weights, gradient, states, out, _number(run.factor)))
        self.arithmetic.run(found)

    def _give(self, home: Stored, index: int, after: Event, made: Event) -> None:
        assert home.chunks is not None
        home.chunks.give(index, after)
        if home.parameters is not None:
            home.parameters.give(index, made)

    # -- chunk after chunk --------------------------------------------------------------------------------------------------------------

    def _walk(self, home: Stored, job: Job) -> Iterator[Chunk]:
        """The chunks that have something to update; the next is on its way from the disk while one is in work."""
        assert home.chunks is not None
        found = [
            Chunk(index, span, parts, home.parameters is not None and _makes_all(home, span, parts))
            for index, span in enumerate(home.unit.chunks())
            if (parts := job.parts(span))
        ]
        rings = self.ring("state", home), self.ring("parameters", home)
        for place, chunk in enumerate(found):
            for coming in found[place : place + 2]:
                home.chunks.start(coming.index, rings[0])
                if home.parameters is not None:
                    home.parameters.start(coming.index, rings[1], fresh=coming.makes_all)
            yield chunk


class _UnderWay:
    """Chunks of an update that the cpu works on, and when what it made of those before is where it belongs."""

    def __init__(self, home: Stored, job: Job, copier: Device, bounces: Ring | None, worked: Worked | None) -> None:
        self._home, self._job, self._copier, self.bounces, self._worked = home, job, copier, bounces, worked
        self._last: Event = already()
        self._chunks: deque[tuple[Callable[[], None], int, slice, Block | None]] = deque()

    def put(self, started: Callable[[], None], index: int, chunk: slice, bounce: Block | None) -> None:
        self._chunks.append((started, index, chunk, bounce))

    def finish(self, but: int = 0) -> Event:
        """Wait for all but so many, and send what they made."""
        while len(self._chunks) > but:
            started, index, chunk, bounce = self._chunks.popleft()
            started()
            if self._worked is not None:
                self._worked.did(chunk.stop - chunk.start)
            self._send(index, chunk, bounce)
        return self._last

    def close(self) -> None:
        """After a failure: nobody writes any more."""
        while self._chunks:
            self._chunks.popleft()[0]()

    def _send(self, index: int, chunk: slice, bounce: Block | None) -> None:
        home, job = self._home, self._job
        assert home.chunks is not None
        if home.parameters is not None:
            home.parameters.give(index, already())
            home.chunks.give(index, already())
            return
        block, size = home.chunks.block(index) if bounce is None else bounce, home.unit.dtype.itemsize
        for slot, piece in home.unit.pieces(chunk):
            if slot in job.slots:
                span = slice((piece.start - chunk.start) * size, (piece.stop - chunk.start) * size)
                there = job.targets[slot][piece.start - slot.offset : piece.stop - slot.offset].view(torch.uint8)
                self._last = copy_block(self._copier, Direction.IN, block, span, there, after=(job.ready,))
        home.chunks.give(index, self._last if bounce is None else already())
        if bounce is not None and self.bounces is not None:
            self.bounces.give(bounce, self._last)


class _Staged:
    """Where the arrays of a chunk lie in a staging buffer: the state's rows, then the gradient, then the parameter."""

    def __init__(self, home: Stored, chunk: slice, buffer: torch.Tensor) -> None:
        count = chunk.stop - chunk.start
        narrow = count * home.unit.dtype.itemsize
        cuts = [0, home.row_count * count * home.dtype.itemsize]
        cuts += [cuts[-1] + narrow * home.wants_gradients]
        cuts += [cuts[-1] + narrow * (home.parameters is not None)]
        self.state_bytes, self.gradient_bytes, self.parameter_bytes = (buffer[low:high] for low, high in pairwise(cuts))
        self._start = chunk.start
        self._rows = self.state_bytes.view(home.dtype).view(home.row_count, count).unbind()
        self._gradient = self.gradient_bytes.view(home.unit.dtype)
        self._parameter = self.parameter_bytes.view(home.unit.dtype)
        self._cuts: dict[tuple[int, int], _Cut] = {}

    def cut(self, piece: slice) -> _Cut:
        """The part of a piece of the unit, once made the same one."""
        key = piece.start, piece.stop
        if key not in self._cuts:
            here = slice(piece.start - self._start, piece.stop - self._start)
            self._cuts[key] = _Cut([row[here] for row in self._rows], self._gradient[here], self._parameter[here])
        return self._cuts[key]


@dataclass(frozen=True, slots=True)
class _Cut:
    rows: Sequence[torch.Tensor]
    gradient: torch.Tensor  # empty if it does not come along, as is the parameter
    parameter: torch.Tensor


def staging_bytes(stored: Sequence[Stored]) -> int:
    """One staging buffer for all streamed units."""
    most = 0
    for home in stored:
        if home.unit.trained and home.unit.placement.update == "streamed":
            elements = min(home.unit.chunk_elements, home.unit.numel)
            narrow = (home.unit.placement.gradients == "host") + (home.unit.placement.parameters != "device")
            most = max(most, elements * (home.row_count * home.dtype.itemsize + narrow * home.unit.dtype.itemsize))
    return most


def ring_bytes(stored: Sequence[Stored]) -> dict[str, tuple[int, int]]:
    """Host buffers, by what they are for and the place of the update: bytes of one, and how many."""
    sizes: dict[str, tuple[int, int]] = {}

    def want(name: str, nbytes: int, count: int) -> None:
        sizes[name] = max(sizes.get(name, (0, 0))[0], nbytes), count

    for home in stored:
        unit, place = home.unit, home.unit.placement
        elements = min(unit.chunk_elements, unit.numel)
        if unit.trained and place.state == "nvme":
            want(f"state {place.update}", home.row_count * elements * home.dtype.itemsize, 4)
        if unit.trained and place.parameters == "nvme" and place.update != "device":
            want(f"parameters {place.update}", elements * unit.dtype.itemsize, 4)
        if unit.trained and place.update == "cpu" and place.parameters == "device" and home.dtype != unit.dtype:
            want("bounce cpu", elements * unit.dtype.itemsize, 3)
    return sizes


def _makes_all(home: Stored, chunk: slice, parts: Sequence[tuple[Run, slice]]) -> bool:
    """Whether every parameter of a chunk is made anew from its master, so that the old ones need not be there."""
    made = {slot for _, part in parts for slot, _ in home.unit.pieces(part)}
    return home.has_master and all(slot in made for slot, _ in home.unit.pieces(chunk))


def _number(factor: Factor | None) -> float:
    return 1.0 if factor is None else factor.number()
