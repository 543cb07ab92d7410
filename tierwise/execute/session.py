"""A fitted model at run time: its regions run as planned, its saved tensors travel, and it can be given back as it was.

A region's module gets a `forward` of its own in place of its class's, and so does the model itself, whose call is a pass. Hooks, parameters,
state_dict and everything else of the modules stay as they are. Calls without gradients (evaluation, generation) run the class's forward.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..errors import BadInput, CannotCapture, OutOfDeviceMemory
from ..units import format_bytes
from .copies import Copies
from .device import Device
from .passes import Pass, RegionPlan, RegionRun, Trouble
from .recording import Recording
from .states import States
from .states.torch_compat import without_torch_function
from .torch_compat import is_at, others_hold_saved_tensors, version_of, within_transform

_log = logging.getLogger("tierwise")

Plans = Mapping[tuple[str, int], RegionPlan]
"""By module path and how many times it was called before in the same pass."""


@dataclass(slots=True)
class Events:
    """What happened that a user should hear of, said once."""

    said: set[str] = field(default_factory=set)
    listeners: list[Callable[[str], None]] = field(default_factory=list)

    def say(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.add(sentence)
            _log.warning("%s", sentence)
            for listener in self.listeners:
                listener(sentence)


class Runner(Protocol):
    """How the regions of one pass run."""

    def run(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def over(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Shortage:
    """The device was full although the plan fits."""

    where: str
    held_bytes: int  # what was allocated then
    requested_bytes: int  # what was asked for, 0 if that is not known


class DeviceFull(OutOfDeviceMemory, torch.OutOfMemoryError):
    """The device is full where a call cannot be repeated; whoever catches torch's own error catches this too."""


class Session(Trouble):
    """`before_pass(args, kwargs)` is asked for the plans of each pass; it may plan then, or change what earlier passes ran by."""

    def __init__(self, model: nn.Module, device: Device, before_pass: Callable[[tuple[Any, ...], dict[str, Any]], Plans | None]) -> None:
        self.model, self.device = model, device
        self.owner: Any = None  # whoever made the session; `session_of(model)` leads to it
        self.copies: Copies | None = None
        self.events = Events()
        self.passes = 0
        self.retries = 0
        self.shortages: list[Shortage] = []  # since somebody last looked
        self.last: Pass | None = None
        self.recording: Recording | None = None  # of the next pass, then of that one
        self.states: States | None = None  # lasting state with homes of its own, and whose it is by module path
        self._placed: frozenset[str] = frozenset()
        self._before_pass = before_pass
        self.returned: Callable[[list[torch.Tensor]], None] = lambda tensors: None  # told what each planned pass returns
        self._current: Runner | None = None
        self._installed: dict[str, nn.Module] = {}
        self._root = RootForward(self, model)
        self.is_closed = False

    def install_root(self) -> None:
        _refuse_own_forward(self.model, "the model")
        self.model.__dict__["forward"] = self._root
        self.model.__dict__["__getstate__"] = _refuse_copy  # deepcopy, copy and pickle all ask for it

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Let these submodules run through the session; the others as they are."""
        for name, module in modules.items():
            if name not in self._installed:
                module.__dict__["forward"] = RegionForward(self, module, name)
                self._installed[name] = module

    def place(self, states: States | None) -> None:
        """Lasting state moves with the modules that run; None: it is where torch has it."""
        self.states = states
        self._placed = frozenset(states.paths) if states is not None else frozenset()
        self.install({path: self.model.get_submodule(path) for path in self._placed if path})

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was, for as long as it is looked at or copied."""
        ours = [(module, name, module.__dict__.pop(name)) for module, name in self._attributes()]
        try:
            yield
        finally:
            for module, name, value in ours:
                module.__dict__[name] = value

    def close(self) -> None:
        """Give the model back as it was. What another tool has wrapped around the root stays, and finds the plain forward behind it."""
        for module, name in self._attributes():
            if name == "__getstate__" or isinstance(module.__dict__[name], _Forward):
                del module.__dict__[name]
        self._installed.clear()
        self.is_closed = True
        self.copies = self.last = self.recording = None

    def _attributes(self) -> list[tuple[nn.Module, str]]:
        """What is ours in the modules."""
        found = [(module, "forward") for module in self._installed.values() if isinstance(module.__dict__.get("forward"), _Forward)]
        found += [(self.model, name) for name in ("forward", "_original_forward") if _root_in(self.model.__dict__.get(name)) is self._root]
        return found + [(self.model, "__getstate__")] * (self.model.__dict__.get("__getstate__") is _refuse_copy)

    # -- a pass ---------------------------------------------------------------------------------------------------------------------

    def run_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_closed or self._current is not None:
            return self._root.plain(self.model, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self._plainly(args, kwargs)
        if within_transform():
            self.say("the model is called within torch.func, such as vmap or grad, so it runs as it is, not as planned")
            return self._plainly(args, kwargs)
        plans = self._before_pass(args, kwargs)
        if plans is None or self.copies is None:
            return self._plainly(args, kwargs)
        self.passes += 1
        return self.run_pass(PlannedPass(self, plans, (args, kwargs)), args, kwargs)

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._state_at_hand():
            return self._root.plain(self.model, *args, **kwargs)

    @contextlib.contextmanager
    def _state_at_hand(self) -> Iterator[None]:
        """A forward of the model, for state that comes and goes with it."""
        states = self.states
        if states is None:
            yield
            return
        states.before_pass()
        try:
            yield
        finally:
            states.after_pass()

    def run_pass(self, runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the model in which regions run as `runner` has them run."""
        self._current = runner
        try:
            with self.device.accounting(), self._state_at_hand(), _hooks_outside(runner):
                out = self._root.plain(self.model, *args, **kwargs)
            runner.over()
        except BaseException as error:
            held_bytes = self.device.memory().allocated_bytes
            runner.abandon()
            if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DeviceFull):
                self._give_up(error, held_bytes)
            raise
        finally:
            self._current = None
        tensors = _tensors(out)
        self.device.account_backward(tensors)
        self.returned(tensors)
        return out

    def run_region(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = self.states
        if states is None or region.name not in self._placed:
            return self._run_region(region, args, kwargs)
        states.before_region_forward(region.name)
        try:
            out = self._run_region(region, args, kwargs)
            if torch.is_grad_enabled():
                states.watch(region.name, (args, kwargs), _opened(out))
        finally:
            states.after_region_forward(region.name)
        return out

    def run_as_it_is(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward; parameters that backward saves may go and come back."""
        moves = self.states is not None and region.name in self._placed and torch.is_grad_enabled()
        if self.states is None or not moves or others_hold_saved_tensors():  # who checkpoints brings them by running it again
            return region.plain(region.module, *args, **kwargs)
        with saved_tensors_hooks(self.states.pack, self.states.unpack):
            return region.plain(region.module, *args, **kwargs)

    def _run_region(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._current is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.run_as_it_is(region, args, kwargs)
        if others_hold_saved_tensors(ours=self._current.pack_outside if isinstance(self._current, Pass) else None):
            self.say(f"{region.name} is called within torch.utils.checkpoint or other hooks on saved tensors, so it runs as it is, not as planned")
            return region.plain(region.module, *args, **kwargs)
        return self._current.run(region, args, kwargs)

    # -- trouble --------------------------------------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        self.events.say(sentence)

    def make_room(self, where: str, error: torch.OutOfMemoryError) -> None:
        """The device is full in spite of the plan: free what can be freed."""
        self.retries += 1
        self.shortages.append(Shortage(where, self.device.memory().allocated_bytes, requested_bytes(error)))
        self.say(f"the device ran out of memory in {where} although the plan fits: what could be freed was freed, it runs again, and the next "
                 "step is planned with less")  # fmt: skip
        if isinstance(self._current, Pass):
            self._current.over()
        elif self.copies is not None:
            self.copies.release_sent()
        if self.states is not None:
            self.states.make_room()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def _give_up(self, error: torch.OutOfMemoryError, held_bytes: int) -> NoReturn:
        """Where nothing can be repeated: one error that says what to do."""
        self.shortages.append(Shortage("the forward", held_bytes, requested_bytes(error)))
        raise DeviceFull(
            f"the device ran out of memory in the forward although the plan fits ({format_bytes(held_bytes)} were allocated; {error}); the next "
            "step is planned with less, so it can be tried again; if that fails too, use a smaller batch or a lower budget="
        ) from error


def _hooks_outside(runner: Runner) -> contextlib.AbstractContextManager[Any]:
    """Where a plan sends what ops outside of regions save, they are watched too."""
    if isinstance(runner, Pass) and runner.sends_outside:
        return saved_tensors_hooks(runner.pack_outside, runner.unpack_outside)
    return contextlib.nullcontext()


class PlannedPass(Pass):
    """Regions run as planned; one that finds the device full runs a second time after what can be freed was freed."""

    def __init__(self, session: Session, plans: Plans, batch: Any = ()) -> None:
        assert session.copies is not None
        with without_torch_function():  # who asks for a parameter's storage does not read it
            lasting = {id(tensor.untyped_storage()) for tensor in (*session.model.parameters(), *session.model.buffers())}
        given = {id(tensor.untyped_storage()) for tensor in _tensors(batch)}
        bring = None if session.states is None else session.states.bring
        super().__init__(session.copies, plans, session, lasting=lasting, given=given, recording=session.recording, bring=bring)
        self._session = session
        session.last = self

    def run(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.enter(region.name)
        if run is None:
            return self._session.run_as_it_is(region, args, kwargs)
        if self.recording is not None:
            self.recording.forward(run.plan.id)
        before, out, is_done = _State(region, self._session.device), None, False
        try:
            out, is_done = self._attempt(region, run, args, kwargs), True
        except torch.OutOfMemoryError as error:
            if not before.can_be_restored():
                raise
            run.forget()
            self._session.make_room(region.name, error)
            error.__traceback__ = None  # its frames keep what the first attempt had made
        if not is_done:
            before.restore()
            out = self._attempt(region, run, args, kwargs)
        self.leave(run, (args, kwargs), out)
        if self.recording is not None:
            self.recording.forward(run.plan.id)
            self.recording.watch_backward(run.plan.id, _tensors(out), _tensors((args, kwargs)))
        return out

    def _attempt(self, region: RegionForward, run: RegionRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Where nothing moves there is nothing to see, and a hook costs the host a few microseconds for each tensor. The first call tells
        # whether the pass still waits for its backward.
        watched = self.moves or self.recording is not None or run.place == 0 or self.bring is not None
        with saved_tensors_hooks(run.pack, run.unpack) if watched else contextlib.nullcontext():
            try:
                return run.plan.forward(region.module, *args, **kwargs)
            except CannotCapture as error:
                self._session.say(f"{region.name} runs as it is, without a choice of what it saves: {error.reason}")
                run.forget()
                return region.plain(region.module, *args, **kwargs)


class _State:
    """What a region call changes besides making its result: the random state, and buffers, which cannot be put back."""

    def __init__(self, region: RegionForward, device: Device) -> None:
        self._buffers = region.buffers
        self._versions = [version_of(buffer) for buffer in region.buffers]
        self._device = device
        self._random = device.random_state()

    def can_be_restored(self) -> bool:
        return all(map(is_at, self._buffers, self._versions))

    def restore(self) -> None:
        self._device.set_random_state(self._random)


class _Forward:
    """In place of a module's forward. Never copied or pickled: a copy of the module would run in this model's session."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session, self.module = session, module
        self.plain = type(module).forward

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy()


class RegionForward(_Forward):
    def __init__(self, session: Session, module: nn.Module, name: str) -> None:
        super().__init__(session, module)
        self.name = name
        self.buffers = tuple(module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.run_region(self, args, kwargs)


class RootForward(_Forward):
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # who compiles a fitted model gets the plan, whose regions are compiled, rather than the model without it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.run_root(args, kwargs)


def session_of(model: nn.Module) -> Session | None:
    """The session the model runs in."""
    root = _root_in(model.__dict__.get("forward"))
    return root.session if root is not None and not root.session.is_closed else None


def _root_in(forward: Any) -> RootForward | None:
    """The root behind what others have wrapped around it, such as accelerate's mixed precision; functools.wraps leaves a trail."""
    while forward is not None and not isinstance(forward, RootForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def requested_bytes(error: BaseException) -> int:
    """What was asked for when memory ran out, as far as the error says it."""
    own = getattr(error, "requested_bytes", None)
    if own is not None:
        return int(own)
    found = re.search(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", str(error))
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]]) if found else 0


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(_opened(value)) if isinstance(leaf, torch.Tensor)]


def _opened(value: Any) -> Any:
    """Mappings that are no dicts, such as the outputs of Hugging Face models, as dicts."""
    return dict(value) if isinstance(value, Mapping) else value


def _refuse_copy() -> NoReturn:
    raise BadInput(
        "a model under tierwise.fit cannot be copied or pickled whole: the copy would share its plan and its memory; "
        "save model.state_dict(), or call tierwise.release(model) first and fit the copy"
    )


def _refuse_own_forward(module: nn.Module, what: str) -> None:
    own = module.__dict__.get("forward")
    if isinstance(own, _Forward):
        raise BadInput(f"{what} is already under tierwise.fit; call tierwise.release(model) first")
    if own is not None:
        raise BadInput(f"{what} has a forward of its own in place of its class's ({own!r}), put there by another tool; fit the model before that")
