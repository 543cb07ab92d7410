"""Lasting state with homes: parameters, gradients, masters and moments where the plan puts them, and updates that run in time for whoever needs them.

    states = States(model, optimizer, {"layers.0": Placement("host", "cpu", gradients="host"), ...}, device, pool=pool, update="after")
    states.install()
    ...                      the loop as it was; the model's regions tell when they run
    states.flush()           nothing is pending any more
    states.close()           model and optimizer as they were

update="after": optimizer.step() starts updates, and each is finished before its region runs again, so they lie under the next forward. Exact with
clipping, accumulation and schedulers: settings are read in step(). update="backward": a unit is updated when its last gradient has arrived, and
step() does what is left; for loops that do nothing between backward and step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...errors import BadInput, TierwiseError, UnknownName
from ..device import Device
from ..host_pool import HostPool
from ..lanes import Lane, Signal
from ..nvme import NvmeStore
from . import access
from .arithmetic import Arithmetic, Formula, Torchs
from .driver import Driver
from .facade import MASTER, Facade
from .gradients import Gradient, Held, HostGradients, Traffic
from .guards import guard, unguard
from .homes import DiskChunks, HostChunks, HostFlat
from .parameters import Residence
from .passes import Passes
from .placement import Placement
from .rules import rule_of
from .torch_compat import after_backward, backward_number, in_backward
from .torchs import is_piecewise, state_names
from .units import CPU_CHUNK_ELEMENTS, STREAM_CHUNK_ELEMENTS, Slot, Unit, units_of
from .updates import Job, Pending, Run, Stored, Updates
from .whole import Whole, step_on_device

_log = logging.getLogger("tierwise")

WHENS = ("after", "backward")


class States:
    """`placements` by module path; parameters of no path stay on the device. `source` has values for parameters by name, such as a checkpoint
    that is mapped into memory; `ahead` is how many regions' parameters come before they are needed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        placements: Mapping[str, Placement],
        device: Device,
        *,
        pool: HostPool | None = None,
        store: NvmeStore | None = None,
        update: str = "after",
        masters: str | None = None,
        source: Mapping[str, torch.Tensor] | None = None,
        ahead: int = 1,
        threads: int | None = None,
        compiled: bool = True,
        stream_chunk_elements: int = STREAM_CHUNK_ELEMENTS,
        cpu_chunk_elements: int = CPU_CHUNK_ELEMENTS,
    ) -> None:
        if update not in WHENS:
            raise UnknownName("time of updates", update, WHENS)
        if masters not in (None, "fp32"):
            raise BadInput(f"masters is {masters!r}; it is 'fp32', or None for the user's own types")
        self.model, self.optimizer, self.device = model, optimizer, device
        self.update, self.ahead = update, ahead
        self.steps = 0
        self._pool, self._store, self._source = pool, store, source or {}
        self._passes: Passes | None = None
        self._settings = (masters, threads, compiled)
        self.units = units_of(model, optimizer, placements, stream_chunk_elements=stream_chunk_elements, cpu_chunk_elements=cpu_chunk_elements)
        self.stored = [_stored(unit, optimizer, masters) for unit in self.units]
        self._paths = tuple(placements)
        self._home_of = {slot.parameter: (home, slot) for home in self.stored for slot in home.unit.slots}
        self._check(pool, store)
        self._by_region: dict[str, list[Stored]] = {}
        for home in self.stored:
            for region in home.unit.regions:
                self._by_region.setdefault(region, []).append(home)
        self.residences: dict[Stored, Residence] = {}
        self._storages: dict[int, Residence] = {}
        self._hooks: list[Any] = []
        self._driver: Driver | None = None
        self._facade: Facade | None = None
        self._updates: Updates | None = None
        self._traffic: Traffic | None = None
        self._bring: Lane | None = None
        self._broken: TierwiseError | None = None
        self._order: list[str] = [path for path in self._paths if path in self._by_region]
        self._seen: list[str] = []
        self._in_pass = False
        self._saving = 0
        self._inputs_done: set[str] = set()
        self._backward = -1
        self._versions: dict[Slot, int] = {}
        self._origins: dict[nn.Parameter, torch.device] = {}
        self._moved_buffers: list[tuple[nn.Module, str, torch.device]] = []

    # -- the beginning and the end ----------------------------------------------------------------------------------------------------

    def install(self, *, drive: bool = True) -> None:
        """Take everything to its home. With `drive`, hooks on the modules say when regions run; otherwise whoever runs them says it."""
        masters, threads, compiled = self._settings
        arithmetic = self._arithmetic(masters, threads, compiled)
        self._updates = Updates(self.device, self._pool, arithmetic, self.stored)
        try:
            if self._pool is not None:
                self._traffic = Traffic(self.device, self._pool, self._updates.host_lane)
            with torch.no_grad():
                self._settle_in()
            self._watch()
            if drive:
                regions = {path: self.model.get_submodule(path) for path in self._by_region if path}
                self._driver = Driver(self.model, regions, self)
            if self.optimizer is not None:
                self._facade = Facade(self.optimizer, self)
        except BaseException:
            self._tear_down()
            raise

    def flush(self) -> None:
        """Finish all updates: whoever reads a parameter after this reads the updated one."""
        for home in self.stored:
            self._finish(home)

    def close(self) -> None:
        """Model and optimizer as they were: parameters on the device they came from, state in the optimizer, in torch's layout."""
        if self._updates is None:
            return
        try:
            self.flush()
            with torch.no_grad():
                self._move_out()
        finally:
            self._tear_down()

    def words(self) -> str:
        """What runs the updates, in one line."""
        return "nothing is updated" if self._passes is None else self._passes.words()

    @property
    def bytes_written(self) -> int:
        """To the disk, so far: its wear."""
        return 0 if self._store is None else self._store.bytes_written

    # -- regions ----------------------------------------------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """The model's forward begins."""
        if not self._in_pass and not in_backward():
            self._in_pass, self._seen, self._saving = True, [], 0
        for home in self._by_region.get("", ()):
            self._be_there(home)

    def after_pass(self) -> None:
        if in_backward():
            return
        if self._in_pass and self._seen:
            self._order = self._seen
        self._in_pass = False
        for home in self._by_region.get("", ()):
            self._not_used(home, keep=torch.is_grad_enabled())

    def before_region_forward(self, path: str) -> None:
        """Its parameters are there and updated, for compute that comes from now on; those of the next regions are on their way."""
        for home in self._by_region.get(path, ()):
            self._be_there(home)
        if in_backward():
            return  # a recomputation: what comes next is known from backward
        if self._in_pass:
            self._seen.append(path)
        self._inputs_done.discard(path)
        for other in self._after(path):
            self._start(other)

    def after_region_forward(self, path: str) -> None:
        last = set(self._order[-self.ahead - 1 :])
        for home in self._by_region.get(path, ()):
            self._not_used(home, keep=in_backward() or (torch.is_grad_enabled() and path in last))

    def before_region_backward(self, path: str) -> None:
        if in_backward() and self._backward != backward_number():
            self._backward = backward_number()
            after_backward(self._after_backward)
        for home in self._by_region.get(path, ()):
            if home in self.residences:
                self.residences[home].arrive()
        for other in self._before(path):
            self._start(other)

    def after_region_backward(self, path: str) -> None:
        """Nothing of the region's backward is left to run."""
        for home in self._by_region.get(path, ()):
            if home in self.residences and len(home.unit.regions) == 1:
                self._not_used(home, keep=False, used=False)

    def inputs_done(self, path: str) -> None:
        """The gradients of all that a region was given are there."""
        self._inputs_done.add(path)
        self._maybe_over(path)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to keep for a tensor that it saves: parameters that may be away when it is asked for are brought then."""
        residence = self._storages.get(id(tensor.untyped_storage())) if self._storages else None
        return tensor if residence is None else _Packed(tensor, residence)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Packed):
            packed.residence.arrive()
            return packed.tensor
        return packed  # type: ignore[no-any-return]

    def make_room(self) -> None:
        """Give back what came ahead of its use."""
        for residence in self.residences.values():
            if residence.users == 0 and not in_backward():
                residence.leave()
        if self._traffic is not None:
            self._traffic.release(all=True)

    # -- updates ----------------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """What optimizer.step() does."""
        self._raise_if_broken()
        places = {path: place for place, path in enumerate(self._order)}
        homes = [home for home in self.stored if home.unit.trained]
        for home in sorted(homes, key=lambda home: min(places.get(region, -1) for region in home.unit.regions)):
            slots = [slot for slot in home.unit.slots if _has_gradient(slot.parameter)]
            if slots:
                self._update(home, slots)
            home.arrived.clear()
        if self._traffic is not None:
            self._traffic.forget_factors()
            self._traffic.release()
        self.steps += 1

    def collected(self) -> dict[Any, dict[str, Any]]:
        """The optimizer's state in torch's layout, masters as one key more."""
        assert self.optimizer is not None and self._updates is not None
        self.flush()
        found: dict[Any, dict[str, Any]] = {}
        arithmetic = self._updates.arithmetic
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                home, slot = self._home_of[parameter]
                if _is_native(home, arithmetic):
                    if parameter in self.optimizer.state:
                        found[parameter] = self.optimizer.state[parameter]
                elif isinstance(arithmetic, Whole):
                    if slot in arithmetic.kept:
                        found[parameter] = arithmetic.kept[slot]
                elif slot.steps:
                    found[parameter] = self._state_of(home, slot)
        return found

    def distribute(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take over a state in torch's layout."""
        assert self.optimizer is not None and self._updates is not None
        self.flush()
        arithmetic = self._updates.arithmetic
        with torch.no_grad():
            for home in self.stored:
                if not home.unit.trained:
                    continue
                if _is_native(home, arithmetic):
                    for slot in home.unit.slots:
                        self.optimizer.state.pop(slot.parameter, None)
                        if slot.parameter in state:
                            self.optimizer.state[slot.parameter] = _cast(state[slot.parameter], slot.parameter.device, slot.parameter.dtype)
                elif isinstance(arithmetic, Whole):
                    for slot in home.unit.slots:
                        arithmetic.kept.pop(slot, None)
                        if slot.parameter in state:
                            arithmetic.kept[slot] = _cast(state[slot.parameter], torch.device("cpu"), home.unit.dtype)
                else:
                    self._take_over(home, {slot: state.get(slot.parameter, {}) for slot in home.unit.slots})

    def refresh_masters(self) -> None:
        """Parameters were written by somebody else: masters follow them, where they differ by more than rounding."""
        with torch.no_grad():
            for home in self.stored:
                if home.has_master:
                    self._finish(home)
                    self._refresh(home, home.unit.slots)

    # -- one unit ---------------------------------------------------------------------------------------------------------------------

    def _update(self, home: Stored, slots: list[Slot]) -> None:
        assert self._updates is not None and self.optimizer is not None
        self._finish(home)
        arithmetic = self._updates.arithmetic
        parameters = [slot.parameter for slot in slots]
        if _is_native(home, arithmetic):
            for slot in slots:
                if isinstance(slot.parameter.grad, Gradient):  # of a step before, not zeroed since
                    slot.parameter.grad = slot.parameter.grad.held.recall()
            step_on_device(self.optimizer, slots)
            self._spend(home, slots, None)
            return
        written = [slot for slot in slots if slot.parameter._version != self._versions[slot]]
        if written and home.has_master:
            self._refresh(home, written)
        job = self._job(home, slots)
        residence = self.residences.get(home)
        if residence is not None and residence.is_here and residence.users == 0 and not in_backward():
            residence.leave()  # what is on the device is about to be old
        pending = self._updates.launch(home, job)
        increment_version(parameters)
        for slot in slots:
            self._versions[slot] = slot.parameter._version
        if pending is not None:
            home.pending = pending
            if residence is None:
                guard(parameters, lambda _: self._finish(home))
        self._spend(home, slots, pending)

    def _job(self, home: Stored, slots: list[Slot]) -> Job:
        assert self._updates is not None
        arithmetic = self._updates.arithmetic
        gradients: dict[Slot, torch.Tensor] = {}
        factors: dict[Slot, Any] = {}
        arrivals = []
        for slot in slots:
            slot.steps += 1
            if home.gradients is not None:
                held = self._at_home(home, slot)
                factors[slot] = held.settle_factors()
                arrivals.append(held.there)
            else:
                found = slot.parameter.grad
                assert found is not None
                gradients[slot] = slot.flat(found.held.recall() if isinstance(found, Gradient) else found.detach())
        runs: list[Run] = []
        settled: dict[tuple[int, int], Any] = {}
        for slot in slots:
            key = (slot.group, slot.steps)
            if key not in settled:
                settled[key] = arithmetic.settle(*key)
            run = Run(slice(slot.offset, slot.stop), settled[key], factors.get(slot))
            last = runs[-1] if runs else None
            together = last is not None and last.settled is run.settled and last.factor is run.factor and home.gradients is not None
            if together and last is not None and arithmetic.masters and not _slots_between(home, last.span.stop, slot.offset):
                runs[-1] = Run(slice(last.span.start, slot.stop), run.settled, run.factor)  # the gap between them is zero and stays so
            else:
                runs.append(run)
        targets = {} if home in self.residences else {slot: slot.flat(slot.parameter.detach()) for slot in slots}
        return Job(tuple(runs), frozenset(slots), gradients, targets, tuple(arrivals), self.device.mark())

    def _at_home(self, home: Stored, slot: Slot) -> Held:
        """The gradient is in host memory, or on its way."""
        assert self._traffic is not None
        gradient = slot.parameter.grad
        if isinstance(gradient, Gradient):
            held = gradient.held
            if held.here is not None:
                here, held.here = held.here, None
                self._traffic.send(held, here)
            return held
        assert gradient is not None
        return self._leave_for_home(home, slot, gradient)

    def _leave_for_home(self, home: Stored, slot: Slot, gradient: torch.Tensor) -> Held:
        assert self._traffic is not None
        held = Held(slot, home.gradients, self._traffic)
        before = home.held.get(slot)
        if before is not None:
            before.touch()
            before.spent, held.there = True, before.there
        home.held[slot] = held
        self._traffic.send(held, gradient)
        slot.parameter.grad = held.as_tensor()
        return held

    def _spend(self, home: Stored, slots: Iterable[Slot], pending: Pending | None) -> None:
        """Say what became of the gradients: used up, or read by an update that is not over."""
        for slot in slots:
            gradient = slot.parameter.grad
            if self.update == "backward":
                held = gradient.held if isinstance(gradient, Gradient) else Held(slot, None, self._traffic)
                held.spent, held.here = True, None
                held.before_touch = None
                if not isinstance(gradient, Gradient):
                    slot.parameter.grad = held.as_tensor()
            elif pending is not None:
                if isinstance(gradient, Gradient):
                    held = gradient.held
                else:
                    held = Held(slot, home.gradients, self._traffic)
                    held.here = gradient
                    slot.parameter.grad = held.as_tensor()
                held.before_touch = lambda: self._finish(home)

    def _finish(self, home: Stored) -> None:
        """Compute that comes from now on comes after the unit's update."""
        pending, home.pending = home.pending, None
        if pending is None:
            return
        assert pending.signal is not None
        try:
            self.device.wait(pending.signal)
        except TierwiseError as error:
            self._broken = error
            raise
        finally:
            if home not in self.residences:
                unguard(slot.parameter for slot in home.unit.slots)
        self.device.wait(pending.event)
        pending.keep.clear()

    def _settling(self, home: Stored) -> Signal | None:
        return None if home.pending is None else home.pending.signal

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(f"an update failed earlier, so parameters and state are torn: {self._broken}; load the last checkpoint")

    # -- gradients as they arrive -------------------------------------------------------------------------------------------------------

    def _arrived(self, home: Stored, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise BadInput(
                f"{slot.name} has a sparse gradient, which cannot leave its device or be updated by a formula; make its module with sparse=False"
            )
        home.arrived.add(slot)
        if home.unit.placement.gradients == "host" and not isinstance(gradient, Gradient):
            self._finish(home)
            self._leave_for_home(home, slot, gradient.detach())
        if self.update == "backward" and len(home.unit.regions) == 1:
            wanted = [other for other in home.unit.slots if other.parameter.requires_grad]
            if len(home.arrived) == len(wanted):
                with torch.no_grad():
                    self._update(home, wanted)
                home.arrived.clear()
                home.arrived.update(wanted)
        for region in home.unit.regions:
            self._maybe_over(region)

    def _maybe_over(self, path: str) -> None:
        """A region's backward is over when all gradients it makes are there."""
        if not self.residences or path not in self._inputs_done:
            return
        homes = self._by_region.get(path, ())
        for home in homes:
            wanted = sum(slot.parameter.requires_grad for slot in home.unit.slots)
            if home.unit.trained and len(home.arrived) < wanted:
                return
        self.after_region_backward(path)

    def _after_backward(self) -> None:
        self._backward = -1
        self._inputs_done.clear()
        for home in self.residences:
            self._not_used(home, keep=False, used=False)
        if self.update == "after":
            for home in self.stored:
                home.arrived.clear()
        if self._traffic is not None:
            self._traffic.release()

    # -- parameters that live elsewhere -------------------------------------------------------------------------------------------------

    def _be_there(self, home: Stored) -> None:
        residence = self.residences.get(home)
        if residence is None:
            self._finish(home)
            return
        residence.arrive()
        residence.users += 1

    def _not_used(self, home: Stored, *, keep: bool, used: bool = True) -> None:
        residence = self.residences.get(home)
        if residence is None:
            return
        residence.users -= used
        if residence.users <= 0:
            residence.users = 0
            if not keep:
                residence.leave()

    def _start(self, path: str) -> None:
        for home in self._by_region.get(path, ()):
            if home in self.residences:
                try:
                    self.residences[home].start()
                except torch.OutOfMemoryError:
                    return  # it will come when it is needed, and there is room

    def _after(self, path: str) -> list[str]:
        """The regions that run next, as in the last pass."""
        place = len(self._seen) - 1 if self._in_pass else -1
        if not (0 <= place < len(self._order) and self._order[place] == path):
            place = self._order.index(path) if path in self._order else len(self._order)
        return self._order[place + 1 : place + 1 + self.ahead]

    def _before(self, path: str) -> list[str]:
        if path not in self._order:
            return []
        place = len(self._order) - 1 - self._order[::-1].index(path)
        return self._order[max(0, place - self.ahead) : place][::-1]

    def _ask(self, home: Stored, parameter: nn.Parameter) -> torch.Tensor | None:
        """Somebody touches a parameter that is away."""
        residence, (_, slot) = self.residences[home], self._home_of[parameter]
        if self._saving:
            return residence.on_host(slot)
        residence.lend()
        return None

    # -- moving in and out ----------------------------------------------------------------------------------------------------------------

    def _arithmetic(self, masters: str | None, threads: int | None, compiled: bool) -> Arithmetic:
        optimizer = self.optimizer
        if optimizer is None:
            return Nothing()
        if masters == "fp32":
            self._passes = Passes(self.device.torch_device, threads=threads, compiled=compiled)
            return Formula(optimizer, self._passes)
        return Torchs(optimizer) if is_piecewise(optimizer) else Whole(optimizer)

    def _settle_in(self) -> None:
        assert self._updates is not None
        device = self.device
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device.torch_device:
                    self._move_buffer(module, name, buffer)
        for home in self.stored:
            for slot in home.unit.slots:
                self._origins[slot.parameter] = slot.parameter.device
                if slot.parameter.grad is not None and home.unit.placement != Placement():
                    raise BadInput(f"{slot.name} has a gradient; call optimizer.zero_grad() before its home is changed")
            if home.unit.placement.parameters == "device":
                for slot in home.unit.slots:
                    self._to_device(slot)
            elif home.unit.numel:
                self._send_away(home)
            self._keep_state(home)
            for slot in home.unit.slots:
                self._versions[slot] = slot.parameter._version

    def _to_device(self, slot: Slot) -> None:
        value = self._source.get(slot.name)
        parameter, place = slot.parameter, self.device.torch_device
        if parameter.device.type == "meta":
            if value is None:
                raise BadInput(f"{slot.name} is on the meta device and no values were given for it; load them, or name a checkpoint that has them")
            torch.utils.swap_tensors(parameter, nn.Parameter(value.to(place, parameter.dtype, copy=True), requires_grad=parameter.requires_grad))
        elif value is not None:
            parameter.data = value.to(place, parameter.dtype, copy=True)
        elif parameter.device != place:
            parameter.data = parameter.data.to(place)

    def _send_away(self, home: Stored) -> None:
        assert self._updates is not None
        unit = home.unit
        if self._bring is None:
            self._bring = Lane("parameters")
        if unit.placement.parameters == "host":
            home.parameters = HostFlat(unit, self.device)
        else:
            assert self._store is not None
            home.parameters = DiskChunks(unit, 1, unit.dtype, self._store)
        residence = Residence(
            unit, self.device, home.parameters, self._bring,
            wait_settled=lambda: self._finish(home), settling=lambda: self._settling(home),
            ask=lambda parameter: self._ask(home, parameter), written=lambda: self._refresh(home, unit.slots) if home.has_master else None,
        )  # fmt: skip
        residence.adopt(self._value, self._updates.ring("parameters", home) or self._parameter_ring(home))
        self.residences[home] = residence
        self._storages[id(residence.storage)] = residence

    def _value(self, slot: Slot) -> torch.Tensor:
        value = self._source.get(slot.name)
        if value is None and slot.parameter.device.type == "meta":
            raise BadInput(f"{slot.name} is on the meta device and no values were given for it; load them, or name a checkpoint that has them")
        return slot.parameter.data if value is None else value

    def _keep_state(self, home: Stored) -> None:
        assert self._updates is not None
        unit, arithmetic = home.unit, self._updates.arithmetic
        if not unit.trained or _is_native(home, arithmetic):
            return
        if unit.placement.gradients == "host" or unit.placement.update == "cpu":
            assert self._pool is not None
            home.gradients = HostGradients(unit, self._pool)
        if not home.names:
            home.chunks = HostChunks(unit, 0, home.dtype, self._pool) if unit.placement.state != "device" and self._pool else None
            home.arrays = torch.empty((0, unit.numel), device=self.device.torch_device) if unit.placement.state == "device" else None
        elif unit.placement.state == "device":
            made = self.device.empty(home.row_count * unit.numel * home.dtype.itemsize)
            home.arrays = made.view(home.dtype).view(home.row_count, unit.numel).zero_()
        elif unit.placement.state == "host":
            assert self._pool is not None
            home.chunks = HostChunks(unit, home.row_count, home.dtype, self._pool)
        else:
            assert self._store is not None
            home.chunks = DiskChunks(unit, home.row_count, home.dtype, self._store)
        assert self.optimizer is not None
        known = {slot: self.optimizer.state.pop(slot.parameter, {}) for slot in unit.slots}
        if isinstance(arithmetic, Whole):
            arithmetic.kept.update({slot: _cast(state, torch.device("cpu"), unit.dtype) for slot, state in known.items() if state})
            known = {slot: {} for slot in unit.slots}
        self._take_over(home, known)

    def _take_over(self, home: Stored, known: Mapping[Slot, Mapping[str, Any]]) -> None:
        """State of parameters in torch's layout becomes rows; a master that is not there is made from its parameter."""
        assert self._updates is not None
        for slot in home.unit.slots:
            state = known[slot]
            slot.steps = int(state["step"]) if "step" in state else int(any(isinstance(value, torch.Tensor) for value in state.values()))

        def values(slot: Slot, name: str) -> torch.Tensor | None:
            value = known[slot].get(name)
            if isinstance(value, torch.Tensor):
                return slot.flat(value)
            return self._weights(home, slot) if name == MASTER else None

        access.fill(home, values, self._updates.ring("state", home))

    def _weights(self, home: Stored, slot: Slot) -> torch.Tensor:
        """A parameter as it is now, flat."""
        if home in self.residences:
            return slot.flat(self.residences[home].on_host(slot))
        return slot.flat(slot.parameter.detach())

    def _refresh(self, home: Stored, slots: Iterable[Slot]) -> None:
        """Masters of parameters that somebody wrote to."""
        assert self._updates is not None
        wanted = set(slots)

        def value(slot: Slot, old: torch.Tensor) -> torch.Tensor | None:
            if slot not in wanted:
                return None
            now = self._weights(home, slot).to(old.device)
            differs = old.to(now.dtype) != now
            return torch.where(differs, now.to(old.dtype), old) if bool(differs.any()) else None

        access.rewrite(home, MASTER, value, self._updates.ring("state", home))

    def _state_of(self, home: Stored, slot: Slot) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kind = type(self.optimizer)
        if kind is not torch.optim.SGD:
            found["step"] = torch.tensor(float(slot.steps))
        for name in home.states:
            found[name] = access.read(home, slot, name).as_strided(slot.size, slot.stride)
        if home.has_master and home.dtype != home.unit.dtype:
            found[MASTER] = access.read(home, slot, MASTER).as_strided(slot.size, slot.stride)
        return found

    def _move_out(self) -> None:
        assert self._updates is not None
        arithmetic = self._updates.arithmetic
        back: dict[Any, dict[str, Any]] = {}
        for home in self.stored:
            residence = self.residences.get(home)
            for slot in home.unit.slots:
                if isinstance(slot.parameter.grad, Gradient):
                    held = slot.parameter.grad.held
                    slot.parameter.grad = None if held.spent else held.recall()
            if residence is not None:
                residence.arrive()
                if residence.borrowed:
                    residence.write_back()
                for slot in home.unit.slots:
                    gradient, slot.parameter.grad = slot.parameter.grad, None
                    residence.give_back(slot, self._origin(slot))
                    slot.parameter.grad = gradient if gradient is None else gradient.to(self._origin(slot))
                residence.is_here = False
                self.device.resize(residence.storage, 0)
            elif self._origin(slot := home.unit.slots[0]) != self.device.torch_device:
                for slot in home.unit.slots:
                    slot.parameter.data = slot.parameter.data.to(self._origin(slot))
            if home.unit.trained and not _is_native(home, arithmetic):
                for slot in home.unit.slots:
                    if isinstance(arithmetic, Whole):
                        if slot in arithmetic.kept:
                            back[slot.parameter] = _cast(arithmetic.kept[slot], self._origin(slot), None)
                    elif slot.steps:
                        state = self._state_of(home, slot)
                        back[slot.parameter] = {
                            key: value if key == "step" else value.to(self._origin(slot), copy=True) for key, value in state.items()
                        }
        for module, name, place in self._moved_buffers:
            setattr(module, name, getattr(module, name).to(place))
        if self.optimizer is not None:
            self.optimizer.state.update(back)

    def _origin(self, slot: Slot) -> torch.device:
        """Where the parameter came from; values without a place of their own go to the host."""
        place = self._origins[slot.parameter]
        return torch.device("cpu") if place.type == "meta" else place

    def _move_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        if buffer.device.type == "meta":
            raise BadInput(f"the buffer {name!r} of a {type(module).__name__} is on the meta device; give it values before its model is placed")
        self._moved_buffers.append((module, name, buffer.device))
        setattr(module, name, buffer.to(self.device.torch_device))

    def _parameter_ring(self, home: Stored) -> Any:
        if not isinstance(home.parameters, DiskChunks):
            return None
        assert self._pool is not None
        from .homes import Ring, chunk_bytes

        ring = Ring(self._pool, chunk_bytes(home.unit, 1, home.unit.dtype), 2)
        self._hooks.append(ring.close)
        return ring

    def _watch(self) -> None:
        """Hooks on parameters, and on modules whose parameters are saved and loaded."""
        for home in self.stored:
            for slot in home.unit.slots:
                if home.unit.trained and slot.parameter.requires_grad:
                    hook = slot.parameter.register_post_accumulate_grad_hook(lambda _, home=home, slot=slot: self._arrived(home, slot))
                    self._hooks.append(hook.remove)
        if not self.residences:
            return
        for module in self.model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self._saves(+1)).remove)
            self._hooks.append(module.register_state_dict_post_hook(lambda *_: self._saves(-1)).remove)
        for path, homes in self._by_region.items():
            if any(home in self.residences for home in homes):
                hook = self.model.get_submodule(path).register_load_state_dict_post_hook(lambda module, keys, homes=homes: self._loaded(homes))
                self._hooks.append(hook.remove)

    def _saves(self, change: int) -> None:
        """A state_dict is being made: parameters that are away are given as they are at home."""
        self._saving = max(0, self._saving + change)

    def _loaded(self, homes: Iterable[Stored]) -> None:
        for home in homes:
            if home in self.residences and self.residences[home].users == 0:
                with torch.no_grad():
                    self.residences[home].leave()

    def _check(self, pool: HostPool | None, store: NvmeStore | None) -> None:
        for home in self.stored:
            unit, place = home.unit, home.unit.placement
            trained = unit.trained
            if pool is None and trained and (place.state != "device" or place.gradients == "host"):
                raise BadInput(f"{unit.name} keeps state or gradients off the device and there is no host memory for them; give a pool")
            if store is None and ((trained and place.state == "nvme") or place.parameters == "nvme"):
                raise BadInput(f"{unit.name} lives on disk and no disk store was given; name one with nvme=")
            if unit.dtype not in (torch.float32, torch.bfloat16, torch.float16) and trained and place.update != "device":
                raise BadInput(f"{unit.name} is of type {unit.dtype}, which only torch itself updates; leave it on the device")
        if self.optimizer is not None and self._settings[0] is None and not is_piecewise(self.optimizer):
            kind = type(self.optimizer).__name__
            for home in self.stored:
                place = home.unit.placement
                if home.unit.trained and (place.update == "streamed" or place.state == "nvme" or place.parameters == "nvme"):
                    raise BadInput(
                        f"{kind} runs on whole parameters where their state is, so {home.unit.name} can be updated on the device or on the CPU with "
                        f"state in host memory, not {place.update!r} with state on {place.state!r}"
                    )
                if home.unit.trained and place.update == "cpu":
                    home.unit.chunk_elements = max(1, home.unit.numel)

    def _tear_down(self) -> None:
        for remove in self._hooks:
            remove()
        self._hooks.clear()
        if self._driver is not None:
            self._driver.close()
        if self._facade is not None:
            self._facade.close()
        self._driver = self._facade = None
        if self._updates is not None:
            self._updates.close()
        if self._bring is not None:
            self._bring.close()
        if self._traffic is not None:
            self._traffic.release(all=True)
        self.device.synchronize()
        for home in self.stored:
            unguard(slot.parameter for slot in home.unit.slots)
            for kept in (home.chunks, home.gradients, home.parameters):
                if kept is not None:
                    kept.free()
            home.chunks = home.gradients = home.parameters = home.arrays = None
            home.held.clear()
        self.residences.clear()
        self._storages.clear()
        if self._passes is not None:
            self._passes.close()
        self._updates = self._bring = self._traffic = self._passes = None


class Nothing:
    """The arithmetic of a model without an optimizer."""

    masters = False
    states: tuple[str, ...] = ()

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def settle(self, group: int, step: int) -> Any:
        raise NotImplementedError

    def run(self, *args: Any) -> None:
        raise NotImplementedError


class _Packed:
    """A parameter in the hands of autograd."""

    __slots__ = ("residence", "tensor")

    def __init__(self, tensor: torch.Tensor, residence: Residence) -> None:
        self.tensor, self.residence = tensor, residence


def _stored(unit: Unit, optimizer: torch.optim.Optimizer | None, masters: str | None) -> Stored:
    home = Stored(unit)
    place = unit.placement
    home.dtype = torch.float32 if masters == "fp32" else unit.dtype
    narrow = home.dtype != unit.dtype
    copied = place.update == "cpu" and place.parameters == "device"  # the host has weights of its own to work on
    whole = optimizer is not None and masters is None and not is_piecewise(optimizer) and place.update == "cpu"
    home.has_master = unit.trained and (narrow or copied or whole)
    if optimizer is not None and unit.trained:
        known = rule_of(optimizer).states if masters == "fp32" else state_names(optimizer) if is_piecewise(optimizer) else ()
        home.names = ((MASTER,) if home.has_master else ()) + known
    return home


def _is_native(home: Stored, arithmetic: Arithmetic) -> bool:
    """Whether torch itself keeps the state and updates, on the device."""
    return home.unit.placement.update == "device" and not isinstance(arithmetic, Formula)


def _has_gradient(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is not None and not (isinstance(gradient, Gradient) and gradient.held.spent)


def _slots_between(home: Stored, start: int, stop: int) -> bool:
    return any(start <= slot.offset < stop for slot in home.unit.slots)


def _cast(state: Mapping[str, Any], place: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    """As torch does it when a state is loaded: everything to the parameter's device, numbers with a fraction to its type, `step` as it is."""
    made: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or key == "step":
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
        else:
            made[key] = value.to(place, dtype if dtype is not None and value.is_floating_point() else value.dtype, copy=True)
    return made
