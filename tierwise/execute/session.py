"""A fitted model at run time: its regions run as planned, its saved tensors travel, and it can be given back as it was.

A region's module gets a `forward` of its own in place of its class's, and so does the model itself, whose call is a pass. Hooks, parameters,
state_dict and everything else of the modules stay as they are. Calls without gradients (evaluation, generation) run the class's forward.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import BadInput, CannotCapture
from .copies import Copies
from .device import Device
from .passes import Pass, RegionPlan, RegionRun

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


class Session:
    """`before_pass(args, kwargs)` is asked for the plans of each pass; it may plan then, or change what earlier passes ran by."""

    def __init__(self, model: nn.Module, device: Device, before_pass: Callable[[tuple[Any, ...], dict[str, Any]], Plans | None]) -> None:
        self.model, self.device = model, device
        self.copies: Copies | None = None  # made when a plan sends something
        self.events = Events()
        self.passes = 0
        self.retries = 0
        self._before_pass = before_pass
        self._current: Pass | None = None
        self._installed: dict[str, nn.Module] = {}
        self._root = _RootForward(self, model)

    @property
    def current(self) -> Pass | None:
        return self._current

    def install_root(self) -> None:
        _refuse_own_forward(self.model, "the model")
        self.model.__dict__["forward"] = self._root
        self.model.__dict__["__deepcopy__"] = _refuse_copy

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Let these submodules run through the session; the others as they are."""
        for name, module in modules.items():
            if name not in self._installed:
                module.__dict__["forward"] = _RegionForward(self, module, name)
                self._installed[name] = module

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was, for as long as it is looked at or copied."""
        mine = [(module, dict(module.__dict__)) for module in (self.model, *self._installed.values())]
        for module, _ in mine:
            module.__dict__.pop("forward", None)
            module.__dict__.pop("__deepcopy__", None)
        try:
            yield
        finally:
            for module, before in mine:
                module.__dict__.update({name: before[name] for name in ("forward", "__deepcopy__") if name in before})

    def close(self) -> None:
        """Give the model back as it was and let go of everything held for it."""
        for module in (self.model, *self._installed.values()):
            if isinstance(module.__dict__.get("forward"), (_RootForward, _RegionForward)):
                del module.__dict__["forward"]
        self.model.__dict__.pop("__deepcopy__", None)
        self._installed.clear()
        if self.copies is not None:
            copies, self.copies = self.copies, None
            copies.drain()

    # -- a pass ---------------------------------------------------------------------------------------------------------------------

    def run_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._current is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        plans = self._before_pass(args, kwargs)
        if plans is None or self.copies is None:
            return forward(*args, **kwargs)
        self._current = Pass(self.copies, plans)
        self.passes += 1
        try:
            return forward(*args, **kwargs)
        finally:
            over, self._current = self._current, None
            over.over()

    def run_region(self, region: _RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        current = self._current
        if current is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return region.plain(region.module, *args, **kwargs)
        run = current.enter(region.name)
        try:
            out = self._attempt(region, run, args, kwargs)
        except torch.OutOfMemoryError as error:
            self.make_room(region.name, error)
            out = self._attempt(region, run, args, kwargs)
        current.leave(run, region.module, (args, kwargs), out)
        return out

    def _attempt(self, region: _RegionForward, run: RegionRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = region.plain if run.plan is None else run.plan.forward
        with saved_tensors_hooks(run.pack, run.unpack):
            try:
                return forward(region.module, *args, **kwargs)
            except CannotCapture as error:
                self.events.say(f"{region.name} runs as it is, without a choice of what it saves: {error.reason}")
                return region.plain(region.module, *args, **kwargs)

    def make_room(self, where: str, error: BaseException) -> None:
        """The device is full in spite of the plan: free what can be freed."""
        self.retries += 1
        self.events.say(f"the device ran out of memory in {where} although the plan fits; what could be freed was freed, and the call runs again")
        del error
        if self.copies is not None:
            self.copies.release_sent()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


class _Forward:
    """In place of a module's forward. Never copied or pickled: a copy of the module would run in this model's session."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session, self.module = session, module
        self.plain = type(module).forward

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(None)


class _RegionForward(_Forward):
    def __init__(self, session: Session, module: nn.Module, name: str) -> None:
        super().__init__(session, module)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.run_region(self, args, kwargs)


class _RootForward(_Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.plain(self.module, *args, **kwargs)

        return self.session.run_root(forward, args, kwargs)


def _refuse_copy(memo: Any) -> NoReturn:
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
