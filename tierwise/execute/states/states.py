"""Lasting state with homes: parameters, gradients, masters and moments where the plan puts them, and updates that run in time for whoever needs them.

    states = States(model, optimizer, {"layers.0": Placement("host", "cpu", gradients="host"), ...}, device, update="after", masters="fp32")
    pool = HostPool(states.needs().host_bytes, device)
    states.install(pool=pool)
    ...                      the loop as it was; hooks on the model's regions tell when they run
    states.flush()           nothing is pending any more
    states.close()           model and optimizer as they were

update="after": optimizer.step() starts updates, and each is finished before its region runs again, so they lie under the next forward. Exact with
clipping, accumulation and schedulers: settings are read in step(). update="backward": a unit is updated when its last gradient has arrived, and
step() does what is left; for loops that do nothing between backward and step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import BadInput, TierwiseError, UnknownName
from ...ir.placement import FEW_IN_FLIGHT, region_of, waiting_bytes
from ..device import Device
from ..host_pool import HostPool
from ..nvme import NvmeStore
from ..pace import Pace
from .arithmetic import Arithmetic, Formula, Torchs
from .checkpoint import Checkpoints
from .checks import check
from .driver import Driver, watch
from .facade import Facade
from .gradients import LEAVING_BYTES, Shelf, Traffic
from .guards import unguard
from .homes import HostFlat, Ring, chunk_bytes
from .ledger import Ledger, stored_of
from .moving import Moving
from .needs import needs_of, shelf_bytes
from .passes import Passes
from .placement import Needs, Placement
from .residency import Residency
from .settling import Settling, let_go
from .stepping import Stepping, has_gradient
from .torchs import is_piecewise
from .units import CPU_CHUNK_ELEMENTS, STREAM_CHUNK_ELEMENTS, Known, Slot, units_of
from .updates import Stored, Updates
from .whole import Whole
from .worked import Work

WHENS = ("after", "backward")
_log = logging.getLogger("tierwise")


class States:
    """`placements` by module path; parameters of no path stay on the device.

    regions          modules within which paths are parts: they are needed when the whole module runs
    known            what Known.of says of the model and the optimizer, for whoever asks many times
    source           values for parameters by name, such as a checkpoint that is mapped into memory
    ahead            how many regions' parameters come before they are needed
    gradient_blocks  with update="backward", how many units' gradients have room in host memory at once, likewise; None: all, and then the cpu
                     updates first what the next forward needs first
    leaving_bytes    how much device memory gradients on their way out may hold before compute waits for one of them
    threads, cpus    of the host, for updates: how many, by default all cores but one, and on which processors; passes.best_host measures both
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        placements: Mapping[str, Placement],
        device: Device,
        *,
        regions: Collection[str] = (),
        known: Known | None = None,
        update: str = "after",
        masters: str | None = None,
        source: Mapping[str, torch.Tensor] | None = None,
        ahead: int = 1,
        gradient_blocks: int | None = None,
        threads: int | None = None,
        cpus: Sequence[int] | None = None,
        compiled: bool = True,
        stream_chunk_elements: int = STREAM_CHUNK_ELEMENTS,
        cpu_chunk_elements: int = CPU_CHUNK_ELEMENTS,
        leaving_bytes: int = LEAVING_BYTES,
    ) -> None:
        if update not in WHENS:
            raise UnknownName("time of updates", update, WHENS)
        if masters not in (None, "fp32"):
            raise BadInput(f"masters is {masters!r}; it is 'fp32', or None for the user's own types")
        self.model, self.optimizer, self.device = model, optimizer, device
        self.update, self.masters = update, masters
        self.gradient_blocks = max(1, gradient_blocks) if gradient_blocks is not None and update == "backward" else None
        self.steps = 0
        self._leaving_bytes = leaving_bytes
        units = units_of(
            known or Known.of(model, optimizer), placements, regions=regions, apart=update == "backward",
            stream_chunk_elements=stream_chunk_elements, cpu_chunk_elements=cpu_chunk_elements,
        )  # fmt: skip
        self._is_whole = optimizer is not None and masters is None and not is_piecewise(optimizer)
        for unit in units:
            if self._is_whole and unit.trained and unit.placement.update == "cpu":
                unit.chunk_elements = max(1, unit.numel)
        self.stored = [stored_of(unit, optimizer, masters) for unit in units]
        self._threads, self._cpus, self._compiled = threads, cpus, compiled
        self._source = source or {}
        self._home_of = {slot.parameter: (home, slot) for home in self.stored for slot in home.unit.slots}
        self._by_region: dict[str, list[Stored]] = {}
        for home in self.stored:
            for region in home.unit.regions:
                self._by_region.setdefault(region, []).append(home)
        regions_bytes = (sum(home.unit.nbytes for home in homes if home.unit.trained) for path, homes in self._by_region.items() if path)
        self._largest_bytes = max(regions_bytes, default=0)
        order = [path for path in dict.fromkeys(region_of(path, regions) for path in placements) if path in self._by_region]
        self.residency = Residency(self._by_region, order, ahead, finish=self._finish, over=self._backward_is_over)
        self._removers: list[Callable[[], None]] = []
        self._pool: HostPool | None = None
        self._store: NvmeStore | None = None
        self._passes: Passes | None = None
        self._updates: Updates | None = None
        self._ledger: Ledger | None = None
        self._settling: Settling | None = None
        self._traffic: Traffic | None = None
        self._shelf: Shelf | None = None
        self._stepping: Stepping | None = None
        self._pace: Pace | None = None

    # -- the beginning and the end ----------------------------------------------------------------------------------------------------

    def needs(self) -> Needs:
        """What all of this will take; ask before the pool and the store are made."""
        order, ahead = self.residency.order, self.residency.ahead
        return needs_of(self.stored, self._by_region, order, ahead, self.gradient_blocks, self.update, self._leaving_bytes)

    def install(
        self, *, pool: HostPool | None = None, store: NvmeStore | None = None, pool_is_ours: bool = False, drive: bool = True,
        before: States | None = None,
    ) -> None:  # fmt: skip
        """Take everything to its home, from those of `before`, which are then nobody's any more. With `drive`, hooks on the modules say when regions
        run; otherwise whoever runs them says it. If that fails model and optimizer are as they were at the beginning, state in host memory where the
        device has no room for it. `pool_is_ours`: nobody else uses it, then or later, so that its memory goes back to the system as state leaves."""
        self._pool, self._store = pool, store
        check(self.stored, self.optimizer, self._is_whole, pool, store)
        if before is not None:
            before.retire()
            self.steps = before.steps
        try:
            self._updates = Updates(self.device, pool, self._arithmetic(), self.stored)
            self._pace = Pace(self.device) if self._updates.runs_beside else None
            if pool is not None:
                self._traffic = Traffic(self.device, pool, self._updates.host_lane, leaving_bytes=self._leaving_bytes)
                self._shelf = Shelf(pool)
                for nbytes in shelf_bytes(self.stored, self.gradient_blocks):
                    self._shelf.add(nbytes)
            if self.optimizer is not None:
                self._ledger = Ledger(self.optimizer, self._updates, self._weights)
                self._stepping = Stepping(
                    self.optimizer, self.device, self._updates, self._ledger, self._traffic, self._shelf, self.residency.residences,
                    during_backward=self.update == "backward", needed=self._needed,
                )  # fmt: skip
                self.plan_with(sys.maxsize)
            with torch.no_grad():
                moving = Moving(self.model, self.device, self._source, None if before is None else before._settled.moving)
                self._settling = Settling(
                    self.stored, moving, self.residency, self._ledger, self._stepping, self.device, pool, store, pool_is_ours=pool_is_ours,
                    failed=self._failed,
                )  # fmt: skip
                if before is None:
                    self._settling.settle()
                else:
                    self._settling.succeed(before._settled)
                    before.stored = []
                    before._tear_down()
            self._watch()
            if drive:
                regions = {path: self.model.get_submodule(path) for path in self._by_region if path}
                self._removers.append(Driver(self.model, regions, self).close)
            if self.optimizer is not None:
                self._removers.append(Facade(self.optimizer, self).close)
        except BaseException:
            try:
                with torch.no_grad():
                    self._give_back(before)
            finally:
                self._tear_down()
            raise

    def _give_back(self, before: States | None) -> None:
        """Everything, wherever the move had come to."""
        others = None if before is None else before._settling
        if self._settling is not None and others is not None:
            self._settling.back_from(others)
        elif (one := self._settling or others) is not None:
            one.move_out(state=True)
        if before is not None:
            before._tear_down()

    @property
    def _settled(self) -> Settling:
        assert self._settling is not None
        return self._settling

    def retire(self) -> None:
        """No step comes any more: nothing is under way, hooks are gone, and what is at home is for whoever takes it over."""
        self.residency.make_room()
        self.flush()
        if self._stepping is not None:
            self._stepping.raise_if_broken()
        self._follow()
        self.device.synchronize()  # state that passed through the device may still be on its way home, from buffers that go now
        self._stop()

    def held_on_device(self) -> list[torch.Tensor]:
        """What lives there beside parameters, gradients and what torch's optimizer keeps itself: state, and buffers that state passes through."""
        staging = self._updates.staging if self._updates is not None else None
        return [*(home.arrays for home in self.stored if home.arrays is not None), *(staging.buffers if staging is not None else ())]

    def flush(self) -> None:
        """Finish all updates: whoever reads a parameter after this reads the updated one."""
        for home in self.stored:
            self._finish(home)

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """Parameters as plain parameters, for whoever looks at their shapes and asks for their class, such as a capture. Those that are away have
        no bytes, and reading one would end the process: only for code that reads none."""
        self.flush()
        gone = [residence for residence in self.residency.residences.values() if not residence.is_here]
        for residence in gone:
            unguard(residence.parameters)
        try:
            yield
        finally:
            for residence in gone:
                residence.guard_if_away()

    def close(self) -> None:
        """Model and optimizer as they were: parameters on the device they came from, state in the optimizer, in torch's layout.

        After a failed update parameters are given back as they are, some updated and some not, and the optimizer's state is not.
        """
        if self._updates is None:
            return
        failure: TierwiseError | None = None
        known = self._stepping is not None and self._stepping.broken is not None
        try:
            try:
                self.flush()
                self._follow()
            except TierwiseError as error:
                failure = None if known else error
            torn = self._stepping is not None and self._stepping.broken is not None
            if torn:
                _log.warning("an update had failed: parameters are given back as they are and the optimizer's state is not; load the last checkpoint")
                self._renew(parameters=False)
            with torch.no_grad():
                self._settled.move_out(state=not torn)
        finally:
            self._tear_down()
        if failure is not None:
            raise failure

    @property
    def is_installed(self) -> bool:
        return self._updates is not None

    @property
    def cpu_work(self) -> Work:
        """What the CPU has done so far of updates whose state is in host memory."""
        return Work() if self._updates is None else self._updates.on_cpu.work

    @property
    def cpu_elements(self) -> int:
        """Of parameters that it updates so in one step."""
        places = [(home.unit, home.unit.placement) for home in self.stored if home.unit.trained]
        return sum(unit.numel for unit, place in places if place.update == "cpu" and "nvme" not in (place.state, place.parameters))

    def words(self) -> str:
        """What runs the updates, in one line."""
        return "updates are torch's own" if self._passes is None else self._passes.words()

    @contextlib.contextmanager
    def present(self, *paths: str) -> Iterator[None]:
        """The parameters of these regions are on the device and updated, for whoever runs or measures their modules by themselves."""
        homes = [home for path in dict.fromkeys(paths) for home in self._by_region.get(path, ())]
        with contextlib.ExitStack() as stack:
            for home in homes:
                self.residency.be_there(home)
                stack.callback(self.residency.not_used, home, keep=False)
            yield

    def plan_with(self, budget_bytes: int, in_flight: int = FEW_IN_FLIGHT) -> None:
        """Updates in backward: by how much memory there is, how much of it gradients may hold that wait for theirs, of so many regions at most."""
        if self._stepping is not None:
            self._stepping.waiting_bytes = waiting_bytes(budget_bytes, self._largest_bytes, in_flight)

    # -- regions ------------------------------------------------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """The model's forward begins."""
        if self._stepping is not None:
            self._stepping.raise_if_broken()
        self.residency.before_pass()

    def after_pass(self) -> None:
        """It has returned, or failed."""
        self.residency.after_pass()

    def before_region_forward(self, path: str) -> None:
        """The region's parameters are there and updated, for compute that comes from now on; those of the next regions are on their way."""
        if self._pace is not None:
            self._pace.next()
        self.residency.before_forward(path)

    def after_region_forward(self, path: str) -> None:
        self.residency.after_forward(path)

    def watch(self, path: str, inputs: Any, output: Any) -> None:
        """Have a region's backward announced by autograd: call it with what the region was given and what it returned, if gradients are on."""
        watch(self, path, inputs, output)

    def before_region_backward(self, path: str) -> None:
        """Called inside backward, before the first op of the region's."""
        if self._pace is not None:
            self._pace.next()
        self.residency.before_backward(path)

    def inputs_done(self, path: str) -> None:
        """The gradients of all that a region was given are there. Its backward is over when those of its parameters are, too."""
        self.residency.inputs_done(path)

    def after_region_backward(self, path: str) -> None:
        """Nothing of the region's backward is left to run."""
        self.residency.after_backward(path)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep for a tensor that it saves: a parameter that may be away when it is asked for is brought then."""
        return self.residency.pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        return self.residency.unpack(packed)

    def bring(self, tensor: torch.Tensor) -> None:
        """A tensor that was saved for backward is about to be read; if it is a parameter, it is there."""
        self.residency.bring(tensor)

    @property
    def paths(self) -> tuple[str, ...]:
        """Modules whose parameters these are."""
        return tuple(self._by_region)

    def make_room(self) -> None:
        """The device is full: give back what is not needed now."""
        self.residency.make_room()
        if self._traffic is not None:
            self._traffic.release(all=True)

    # -- the optimizer ------------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """What optimizer.step() does."""
        assert self._stepping is not None
        self._stepping.raise_if_broken()
        for home in sorted(self.stored, key=self.residency.needed):  # what the next forward needs first is updated first
            slots = [slot for slot in home.unit.slots if home.unit.trained and has_gradient(slot.parameter)]
            if slots:
                self._stepping.update(home, slots)
            home.arrived.clear()
        if self._traffic is not None:
            self._traffic.forget_factors()
            self._traffic.release()
        self.steps += 1

    def collected(self) -> dict[Any, dict[str, Any]]:
        """The optimizer's state in torch's layout, masters as one key more."""
        assert self.optimizer is not None and self._ledger is not None
        self.flush()
        self._follow()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {parameter: state for parameter in parameters if (state := self._ledger.of(*self._home_of[parameter]))}

    def distribute(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take over a state in torch's layout."""
        assert self._ledger is not None and self._stepping is not None
        self._settle(parameters=False)
        with torch.no_grad():
            for home in self.stored:
                if home.unit.trained:
                    self._ledger.take_over(home, {slot: state.get(slot.parameter, {}) for slot in home.unit.slots})
                    self._stepping.know(home)
        self._stepping.broken = None

    # -- checkpoints --------------------------------------------------------------------------------------------------------------------

    def publish(self, name: str) -> None:
        """Write parameters and optimizer state as one state in the store's directory, in the place of the last one of that name."""
        self.flush()
        self._follow()
        with torch.no_grad():
            self._checkpoints().publish(name, self._weights)

    def restore(self, name: str) -> None:
        """Read what was published, into the homes of now."""
        checkpoints = self._checkpoints()
        checkpoints.check(name)
        self._settle(parameters=True)
        with torch.no_grad():
            try:
                checkpoints.restore(name, self._write)
            except TierwiseError as error:
                self._failed(error)  # some of it may have been taken over: nobody trains on that
                raise
            if self._stepping is not None:
                for home in self.stored:
                    self._stepping.know(home)
                self._stepping.broken = None

    def _checkpoints(self) -> Checkpoints:
        if self._store is None:
            raise BadInput("checkpoints are published in the directory of the disk store, and there is none; name one with nvme=")
        return Checkpoints(self._store, self.model, self.optimizer, self.stored, self._ledger)

    def _write(self, home: Stored, values: Callable[[Slot], torch.Tensor]) -> None:
        residence = self.residency.residences.get(home)
        if residence is None:
            for slot in home.unit.slots:
                slot.parameter.copy_(values(slot).as_strided(slot.size, slot.stride))
            return
        residence.borrowed = False
        residence.know()
        residence.leave()
        ring = None if self._pool is None else Ring(self._pool, chunk_bytes(home.unit, 1, home.unit.dtype), 2)
        residence.fill(values, ring)
        if ring is not None:
            ring.close()

    # -- how it is done -------------------------------------------------------------------------------------------------------------------

    def _finish(self, home: Stored) -> None:
        if self._stepping is not None:
            self._stepping.finish(home)

    def _follow(self) -> None:
        """What somebody wrote to parameters is at home and in the masters, too."""
        with torch.no_grad():
            for home in self.stored:
                if home in self.residency.residences:
                    self.residency.residences[home].settle()
                if self._stepping is not None:
                    self._stepping.follow(home)

    def _settle(self, *, parameters: bool) -> None:
        """Nothing is under way; what failed does not matter, since state, and with `parameters` they too, are about to be replaced."""
        with contextlib.suppress(TierwiseError):
            self.flush()
        if self._stepping is not None and self._stepping.broken is not None:
            self._renew(parameters=parameters)

    def _renew(self, *, parameters: bool) -> None:
        assert self._updates is not None
        self._updates.renew()
        for home in self.stored:
            home.pending = None
            home.held.clear()
            if home.chunks is not None:
                home.chunks.renew()
            if home.parameters is not None and (parameters or isinstance(home.parameters, HostFlat)):
                home.parameters.renew()

    def _arrived(self, home: Stored, slot: Slot) -> None:
        assert self._stepping is not None
        self._stepping.arrived(home, slot)
        for region in home.unit.regions:
            self.residency.maybe_over(region)

    def _backward_is_over(self) -> None:
        for home in self.stored:
            home.arrived.clear()
        if self._traffic is not None:
            self._traffic.release()

    def _needed(self, home: Stored) -> int:
        """Whose update goes first. Where gradients take turns in host memory, the one that has been there longest."""
        return self.residency.needed(home) if self.gradient_blocks is None else 0

    def _arithmetic(self) -> Arithmetic:
        if self.optimizer is None:
            return Nothing()
        if self.masters == "fp32":
            self._passes = Passes(self.device.torch_device, threads=self._threads, cpus=self._cpus, compiled=self._compiled)
            return Formula(self.optimizer, self._passes)
        return Torchs(self.optimizer) if is_piecewise(self.optimizer) else Whole(self.optimizer)

    def _failed(self, error: TierwiseError) -> None:
        if self._stepping is not None and not isinstance(error, BadInput):
            self._stepping.broken = error

    def _weights(self, home: Stored, slot: Slot) -> torch.Tensor:
        """A parameter as it is now, flat."""
        residence = self.residency.residences.get(home)
        return slot.flat(slot.parameter.detach() if residence is None else residence.on_host(slot))

    def _watch(self) -> None:
        """Hooks on parameters, and on modules whose parameters are saved and loaded."""
        # What torch keeps for such a hook the garbage collector does not see: it must not lead back to the parameter.
        mine = weakref.ref(self)
        for number, home in enumerate(self.stored):
            for place, slot in enumerate(home.unit.slots):
                if home.unit.trained and slot.parameter.requires_grad:
                    hook = slot.parameter.register_post_accumulate_grad_hook(partial(_arrived, mine, number, place))
                    self._removers.append(hook.remove)
        if not self.residency.residences:
            return
        for module in self.model.modules():
            self._removers.append(module.register_state_dict_pre_hook(lambda *_: self.residency.saves(+1)).remove)
            self._removers.append(module.register_state_dict_post_hook(lambda *_: self.residency.saves(-1)).remove)
        for path in self._by_region:
            module = self.model.get_submodule(path)
            self._removers.append(module.register_load_state_dict_post_hook(lambda *_, path=path: self.residency.loaded(path)).remove)

    def _stop(self) -> None:
        """Nothing is updated any more, and nobody tells of regions that run."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        if self._updates is not None:
            self._updates.close()
        if self._traffic is not None:
            self._traffic.release(all=True)
        self.device.synchronize()
        for home in self.stored:
            home.gradients = None
            home.held.clear()
        if self._shelf is not None:
            self._shelf.close()
        if self._passes is not None:
            self._passes.close()
        self._pace = self._traffic = self._shelf = self._passes = None

    def _tear_down(self) -> None:
        self._stop()
        if self._settling is not None:
            self._settling.close()
        self.device.synchronize()
        for home in self.stored:
            unguard(slot.parameter for slot in home.unit.slots)
            let_go(home)
        self.residency.residences.clear()
        self._updates = self._ledger = self._settling = self._stepping = None


def _arrived(states: weakref.ref[States], number: int, place: int, parameter: torch.Tensor) -> None:
    found = states()
    if found is not None:
        home = found.stored[number]
        found._arrived(home, home.unit.slots[place])


class Nothing:
    """The arithmetic of a model without an optimizer."""

    masters = False
    states: tuple[str, ...] = ()

    def settle(self, group: int, step: int) -> Any:
        raise NotImplementedError

    def run(self, *args: Any) -> NoReturn:
        raise NotImplementedError

    start = run
