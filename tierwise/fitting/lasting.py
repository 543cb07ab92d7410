"""Lasting state under a fitted model: placed where a plan says, kept there by later plans, and given back."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from ..errors import OutOfHostMemory
from ..execute.below import Below
from ..execute.host_pool import HostPool, available_host_bytes
from ..execute.session import Session
from ..execute.states import States
from ..execute.states.gradients import LEAVING_BYTES
from ..execute.states.passes import HostRate
from ..execute.states.placement import Needs
from ..execute.states.safetensors import Checkpoint
from ..execute.states.units import MASTERED_BYTES, STREAM_CHUNK_BYTES, Known
from ..execute.states.updates import STAGING_BUFFERS
from ..ir import Placement, Program
from ..ir.placement import HELD_SHARE, IN_FLIGHT, region_of, stated
from ..units import format_bytes

PASSING_SHARE = 50  # of the budget, one part in so many for gradients that leave, and for state that is streamed
LEAVING_UNITS, LEAVING_SHARE = 1.5, 20  # gradients of the largest module so many times may leave at once, where that is less than such a part of it
# The largest module's parameters so many times are what is lost between blocks where they come and go: 0.9 to 1.6 GB of 0.23 each with compiled
# blocks, whose workspace is large, and 0.5 to 0.7 op by op; 0.6 to 1.1 of 0.41.
HOLES_UNITS = {True: 5, False: 3}
HOLES_WAITING = 16  # of gradients that wait until backward is over, between activations, one part in so many
HOLES_SHARE = 8  # of the budget, one part in so many at most
ROOM_TO_MOVE = 16  # of host memory for state, one part in so many for holes between blocks where it moves: 0.2 to 0.7 GB of 42 to 80 (simulated)
ROOMY_SHARE = 0.85  # of the host memory that is available: state that takes less leaves room for all gradients
MOST_CHUNKS = 16  # that a module's state is cut into, if there is room for larger ones: each is issued by a thread that shares Python's lock
TORCHS_ROWS = 2  # state of an element without a master: so many of the parameter's own type


class Lasting:
    """Where parameters, gradients and optimizer state are; torch's own business until a plan moves something or masters are asked for."""

    def __init__(
        self, session: Session, below: Below, optimizer: torch.optim.Optimizer | None, masters: str | None, update: str,
        budget_bytes: int, weights: str | os.PathLike[str] | None = None, compiled: bool = True,
    ) -> None:  # fmt: skip
        self._source = None if weights is None else Checkpoint(os.fspath(weights))
        self._comes_from_elsewhere = weights is not None or any(
            parameter.device != session.device.torch_device for parameter in session.model.parameters()
        )
        share = budget_bytes // PASSING_SHARE
        self._least_leaving_bytes = min(LEAVING_BYTES, share)
        widest = max((parameter.element_size() for parameter in session.model.parameters()), default=1)
        state = MASTERED_BYTES if masters == "fp32" else TORCHS_ROWS * widest
        # A buffer has state, gradient and parameter of a chunk.
        self._chunk_elements = STREAM_CHUNK_BYTES // state
        self._most_chunk_elements = max(1, share // (STAGING_BUFFERS * (state + 2 * widest)))
        self._budget_bytes = budget_bytes
        self._holes_units = HOLES_UNITS[compiled]
        self._session, self._below, self._optimizer = session, below, optimizer
        self._masters, self._update = masters, update
        self._known_sizes: dict[Callable[[nn.Parameter], int], dict[str, int]] = {}  # a planner asks for the same ones again and again
        self._pool: HostPool | None = None
        self._reserved = (0, 0)
        self.regions: Collection[str] = ()  # modules of which parts may be placed by themselves
        self._counted: tuple[Known, int] | None = None  # what a planner that asks again and again need not have looked at each time
        self.placements: dict[str, Placement] | None = None  # once something was placed
        self.host: HostRate | None = None  # how updates run fastest on this host, once that was measured

    @property
    def states(self) -> States | None:
        return self._session.states

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """The model, the optimizer and what there is of host memory stay as they are meanwhile."""
        self._counted = Known.of(self._session.model, self._optimizer), available_host_bytes()
        try:
            yield
        finally:
            self._counted = None

    def takes(self, states: Mapping[str, Placement]) -> tuple[int, int]:
        """What updates and gradients on their way out hold on the device, beyond what they read and write there; and all of it in host memory.
        Gradients that wait there for updates are in the plan itself."""
        _, needs = self._states(stated(states))
        return needs.staging_bytes + needs.leaving_bytes, needs.host_bytes + needs.parameter_host_bytes

    def leaving_bytes(self, states: Mapping[str, Placement]) -> int:
        """Of what these take on the device, for gradients on their way out."""
        return self._states(stated(states))[1].leaving_bytes

    def holes_bytes(self, states: Mapping[str, Placement]) -> int:
        """What the allocator loses between blocks of many sizes that come and go at different times. If it had to be found in the middle of a step,
        everything would wait."""
        away = stated(states)
        lost = self._holes_units * max(self._sizes(away, _nbytes), default=0)
        if self._update == "after":
            waiting = {path: place for path, place in away.items() if (place.update, place.gradients) == ("streamed", "device")}
            lost += sum(self._sizes(waiting, _nbytes)) // HOLES_WAITING
        return min(lost, self._budget_bytes // HOLES_SHARE)

    def _states(self, placements: Mapping[str, Placement]) -> tuple[States, Needs]:
        """And what they take: with host memory for the gradients of all modules, or, where there is none to spare, of a few in turn."""
        known, available = self._counted or (None, available_host_bytes())
        make = partial(
            States, self._session.model, self._optimizer, placements, self._session.device, update=self._update, masters=self._masters,
            source=self._source, leaving_bytes=self._leaving_bytes(placements), stream_chunk_elements=self._stream_chunk_elements(placements),
            regions=self.regions, known=known, threads=self.host.threads if self.host else None, cpus=self.host.cpus if self.host else None,
        )  # fmt: skip
        states, left = make(), self._below.host_left_bytes
        needs = states.needs()
        room = (int(available * ROOMY_SHARE) if left is None else left) + self._reserved[0]
        if needs.host_bytes + needs.parameter_host_bytes > room:
            states = make(gradient_blocks=self._gradient_blocks(placements))
            needs = states.needs()
        return states, needs

    def _leaving_bytes(self, placements: Mapping[str, Placement]) -> int:
        """Of gradients on their way to host memory: where a module's are more, its own backward waits for the link."""
        wanted = int(LEAVING_UNITS * max(self._sizes(placements, _nbytes), default=0))
        return max(self._least_leaving_bytes, min(wanted, self._budget_bytes // LEAVING_SHARE))

    def _stream_chunk_elements(self, placements: Mapping[str, Placement]) -> int:
        """Of state that passes through the device: what the link likes, more where a module would come in very many, within the room for it."""
        largest = max(self._sizes(placements, nn.Parameter.numel), default=0)
        return min(max(self._chunk_elements, largest // MOST_CHUNKS), self._most_chunk_elements)

    def _gradient_blocks(self, placements: Mapping[str, Placement]) -> int:
        """For all parts of the modules that may hold their gradients at once, and of the one that backward fills."""
        parts = Counter(region_of(path, self.regions) for path in placements)
        largest = max(self._sizes(placements, _nbytes), default=0)
        return max(parts.values(), default=1) * (max(1, min(IN_FLIGHT, self._budget_bytes // HELD_SHARE // max(1, largest) - 1)) + 1)

    def _sizes(self, placements: Mapping[str, Placement], size: Callable[[nn.Parameter], int]) -> list[int]:
        """Of each module of which something is placed, all of its parameters."""
        found, regions = self._known_sizes.setdefault(size, {}), dict.fromkeys(region_of(path, self.regions) for path in placements)
        for path in regions:
            if path not in found:
                found[path] = sum(map(size, self._session.model.get_submodule(path).parameters()))
        return [found[path] for path in regions]

    def differs(self, program: Program) -> bool:
        wanted = stated(program.states)
        if self.placements is None:
            return bool(wanted) or self._comes_from_elsewhere or (self._masters is not None and self._optimizer is not None)
        return wanted != self.placements

    def follow(self, program: Program, budget_bytes: int) -> None:
        """What a plan says besides places: how early parameters come, how many gradients wait, and in how much memory."""
        if self.states is not None:
            self.states.residency.ahead = program.ahead
            self.states.plan_with(budget_bytes, program.in_flight)

    def place(self, program: Program) -> None:
        """Take everything to its home, from where it was placed before."""
        wanted = stated(program.states)
        device, before = self._session.device, self.states
        states, needs = self._states(wanted)
        there, reserved = 0 if self._pool is None else self._pool.nbytes, self._reserved
        holes = there // ROOM_TO_MOVE
        if there and (short := needs.host_bytes - there + holes - available_host_bytes()) > 0:
            raise OutOfHostMemory(f"to move lasting state {format_bytes(short)} more of host memory are needed than there are")
        self._reserve(max(needs.host_bytes, there) + holes + needs.parameter_host_bytes, reserved[1])
        try:
            if needs.host_bytes and self._pool is None:
                self._pool = HostPool(needs.host_bytes, device, pinned_limit_bytes=self._below.pinned_left_bytes)
            more = contextlib.nullcontext() if self._pool is None else self._pool.growing(needs.host_bytes - there, self._below.pinned_left_bytes)
            with more:
                store = self._below.disk() if needs.nvme_bytes else None
                states.install(pool=self._pool, store=store, pool_is_ours=True, drive=False, before=before)
            if self._pool is not None:
                with contextlib.suppress(OutOfHostMemory):  # a little more than there was room for, which is taken already
                    self._reserve(self._pool.nbytes + needs.parameter_host_bytes, self._pool.pinned_bytes)
        except BaseException:
            if before is not None and before.is_installed:
                self._reserve(*reserved)
            else:
                self._session.place(None)
                self.placements = None
                self._give_back()
            raise
        self._session.place(states)
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()  # where parameters were that have left: the budget caps what torch keeps for later, too
        self.placements = wanted
        self._source = None  # from now on values are where they were placed

    @contextlib.contextmanager
    def at_hand(self, path: str) -> Iterator[None]:
        """A module's parameters are on the device, for whoever runs or measures it by itself."""
        if self.states is not None:
            with self.states.present(path):
                yield
            return
        place = self._session.device.torch_device
        lent: dict[int, nn.Parameter] = {}
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self._session.model.get_submodule(path).modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter.device != place:
                    if id(parameter) not in lent:
                        made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=place).normal_(std=0.02)
                        lent[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
                    replaced.append((module, name, parameter))
                    setattr(module, name, lent[id(parameter)])
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                setattr(module, name, parameter)

    def unguarded(self) -> contextlib.AbstractContextManager[None]:
        """Parameters as plain ones, for whoever looks at the model without reading them."""
        return contextlib.nullcontext() if self.states is None else self.states.unguarded()

    def close(self) -> None:
        """State and parameters back to where they came from."""
        states = self.states
        try:
            if states is not None:
                states.close()
        finally:
            self._session.place(None)
            self.placements = None
            self._give_back()

    def _reserve(self, host_bytes: int, pinned_bytes: int) -> None:
        """So much in all."""
        host, pinned = self._reserved
        self._below.reserve(host_bytes - host, pinned_bytes - pinned)
        self._reserved = host_bytes, pinned_bytes

    def _give_back(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        with contextlib.suppress(OutOfHostMemory):  # never: less than nothing is asked for
            self._reserve(0, 0)


def _early(ahead: int) -> str:
    return "while the module before it runs" if ahead == 1 else f"while the module {ahead} before it runs"


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.nbytes


def words_of(program: Program) -> list[str]:
    """What was decided, for people."""
    places, update = stated(program.states).values(), program.update
    found = []
    where = {"host": "in host memory", "nvme": "on the disk"}
    how = {"cpu": "is updated on the CPU", "streamed": "is updated on the device, through which it passes"}
    when = {"after": "after backward and under the next forward", "backward": "as gradients arrive in backward"}
    kinds = Counter((place.state, place.update) for place in places if place.update != "device")
    for (state, kind), count in sorted(kinds.items()):
        found.append(f"{count} × optimizer state of a module lives {where[state]} and {how[kind]}, {when[update]}")
    homes = Counter(place.parameters for place in places if place.parameters != "device")
    for home, count in sorted(homes.items()):
        found.append(f"{count} × parameters of a module live {where[home]} and come {_early(program.ahead)}")
    return found
