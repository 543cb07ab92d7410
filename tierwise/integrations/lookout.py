"""Finds the model and the optimizer of a training that is about to begin, without being told, and fits them.

Optimizers are noted. The first call of a module, with gradients, that holds most of what one of them trains is where training begins: that module
is fitted, and then the call goes on. Plain loops, Trainer, accelerate and Lightning all come to that call.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import BadInput
from ..execute.session import session_of
from ..fitting import fit, fitted_of
from ..fitting.closures import closures_first
from ..fitting.fitted import Fitted
from ..fitting.torch_compat import load_compiler
from ..fitting.wrapped import inside
from ..ir import Run
from ..units import format_bytes
from .progress import Teller
from .watching import watch

MOST = 0.5  # of the bytes an optimizer trains: a module with less is a part of what is trained, not the model
ALMOST_ALL = 0.95
RECORDED_STEP = 3  # the first has compilations in it, the second the making of optimizer state


@dataclass(frozen=True, slots=True)
class Trained:
    """A module, who trains it, and how much of what the first of those trains it is."""

    module: nn.Module
    optimizers: tuple[Optimizer, ...]
    share: float

    @property
    def name(self) -> str:
        return f"{type(inside(self.module)).__name__} with {type(self.optimizers[0]).__name__}"

    def not_planned(self) -> Iterator[str]:
        if self.share < ALMOST_ALL:
            yield f"{1 - self.share:.0%} of what the optimizer trains belongs to other modules, which run as they are"
        if others := len(self.optimizers) - 1:
            yield f"{others} more optimizers train it, and their state is not in the plan"


class Lookout:
    """Looks as long as it is entered; what it has fitted stays so."""

    def __init__(self, settings: dict[str, Any], *, watch: bool = False) -> None:
        self._settings = settings
        self._shown = watch
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._settled: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # nothing is left to do for these
        self._parts: dict[str, float] = {}  # modules that train but are too small a part of what is trained
        self._watch: _Watch | None = None
        self._failed = self._by_script = False
        self._inside = threading.local()
        self._plain_call: Any = None
        self._undo: list[Callable[[], None]] = []
        self._handle: Any = None

    def __enter__(self) -> Lookout:
        load_compiler()  # it looks up nn.Module's own call when it is loaded, and must not find ours

        self._handle = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_looking()
        self._handle.remove()
        while self._undo:
            self._undo.pop()()

    def note(self, optimizer: Optimizer) -> None:
        """There is an optimizer; what it trains may be called any time."""
        self._optimizers.append(weakref.ref(optimizer))
        self._undo.append(closures_first(optimizer))
        self._start_looking()

    @property
    def fitted(self) -> Fitted | None:
        """Of the model that was fitted last, if it is still there."""
        return self._watch.fitted if self._watch is not None else None

    # -- what happens --------------------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.stepped(optimizer)

    def _start_looking(self) -> None:
        if self._plain_call is not None:
            return
        self._plain_call = plain = nn.Module.__call__
        lookout, inside_call = self, self._inside

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(inside_call, "yes", False) or not torch.is_grad_enabled():
                return plain(module, *args, **kwargs)
            inside_call.yes = True  # what is called within is a part of this
            try:
                return lookout._called(module, plain, args, kwargs)
            finally:
                inside_call.yes = False

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _stop_looking(self) -> None:
        if self._plain_call is not None:
            nn.Module.__call__, self._plain_call = self._plain_call, None  # type: ignore[method-assign]

    def _called(self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._trained(module)
        if found is None:
            return plain(module, *args, **kwargs)
        self._stop_looking()  # what is traced and compiled from here on sees torch as it is
        self._settled.update(found.optimizers)
        self._failed = True
        with self._beginning(found):
            out = plain(module, *args, **kwargs)
        self._failed = False
        if any(other not in self._settled for other in self._living()):
            self._start_looking()
        return out

    @contextmanager
    def _beginning(self, found: Trained) -> Iterator[None]:
        """The first call of a model: fit before it, and say after it what was planned."""
        if self._watch is not None and self._watch.is_alive():
            say(f"{found.name} trains too, beside {self._watch.name}; one model at a time is planned, so it runs as it is")
            yield
            return
        if session_of(inside(found.module)) is not None:
            say(f"{found.name} was already fitted by the script, which is left as it is")
            self._by_script = True
            yield
            return
        teller = Teller()
        try:
            refuse_several_ranks()
            # The state of an optimizer that trains others, too, stays where it is: only the whole of it can be placed.
            alone = found.optimizers[0] if found.share == 1 else None
            fit(found.module, alone, **self._settings, progress=lambda what: teller(what))
            fitted = fitted_of(found.module)
            yield
        finally:
            teller.over()
        self._watch = _Watch(found.name, fitted, found.optimizers[0])
        if self._shown:
            watch(found.module, show=True)
        planned = fitted.current.words()[0] if fitted.current else "there was nothing to plan in its first call"
        say("; ".join([f"{found.name}: {planned}", *found.not_planned()]))

    # -- which optimizer, which module ----------------------------------------------------------------------------------------------

    def _living(self) -> list[Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _trained(self, module: nn.Module) -> Trained | None:
        """The module and the optimizers that train it, if it is most of what one of them trains."""
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if not own:
            return None
        found: list[tuple[int, float, Optimizer]] = []
        for optimizer in self._living():
            if optimizer not in self._settled:
                trained = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
                total, shared = (sum(parameter.nbytes for parameter in some) for some in (trained, [p for p in trained if id(p) in own]))
                if shared:
                    found.append((shared, shared / total, optimizer))
        found.sort(key=lambda entry: -entry[0])
        if not found or found[0][1] < MOST:
            self._parts.update({type(module).__name__: share for _, share, _ in found[:1]})
            return None
        return Trained(module, tuple(optimizer for *_, optimizer in found), found[0][1])

    # -- the end --------------------------------------------------------------------------------------------------------------------

    def finish(self) -> Run | None:
        """Say what came of it. Never nothing."""
        if self._watch is not None:
            return self._watch.finish()
        if self._failed or self._by_script:
            return None
        if not self._optimizers:
            say("nothing was planned: no torch.optim optimizer was made")
        elif self._parts:
            parts = ", ".join(f"{name} ({share:.0%})" for name, share in self._parts.items())
            say(f"nothing was planned: no module that was called holds most of what an optimizer trains; those that were: {parts}. "
                "Call them from one module's forward, or call tierwise.fit on the largest")  # fmt: skip
        else:
            say("nothing was planned: no module was called with gradients while an optimizer held its parameters "
                "(what a function calls that torch.compile has compiled as a whole cannot be seen)")  # fmt: skip
        return None


class _Watch:
    """The training of one model, from its first call on."""

    def __init__(self, name: str, fitted: Fitted, optimizer: Optimizer) -> None:
        self.name = name
        self.step_seconds: list[float] = []
        self._fitted = weakref.ref(fitted)  # the script decides how long the model lives
        self._optimizer = weakref.ref(optimizer)
        self._last = time.perf_counter()
        self._end: tuple[str, Run] | None = None
        weakref.finalize(fitted, _close, fitted.below, fitted.device)

    @property
    def fitted(self) -> Fitted | None:
        return self._fitted()

    def is_alive(self) -> bool:
        gc.collect()  # a model and what fit leaves with it hold each other
        return self._fitted() is not None

    def stepped(self, optimizer: Optimizer) -> None:
        fitted = self._fitted()
        if fitted is None or optimizer is not self._optimizer():
            return
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now
        if len(self.step_seconds) == RECORDED_STEP - 1:
            fitted.record_next_step()
        elif len(self.step_seconds) == RECORDED_STEP and fitted.current is not None:
            self._end = self._so_far(fitted)

    def finish(self) -> Run | None:
        fitted = self._fitted()
        said, run = (self._so_far(fitted) if fitted is not None and fitted.current is not None else self._end) or (None, None)
        if said is None or run is None:
            return None
        say(said)
        return replace(run, step_seconds=tuple(self.step_seconds))

    def _so_far(self, fitted: Fitted) -> tuple[str, Run]:
        assert fitted.current is not None
        peak = fitted.device.memory().peak_reserved_bytes
        said = f"{len(self.step_seconds)} steps, at most {format_bytes(peak)} of {format_bytes(fitted.settings.budget_bytes)} in use"
        measured = self._end[1].measured if self._end else fitted.measured
        return said, replace(fitted.current.run(self.name, measured=measured), reserved_bytes=peak)


def say(sentence: str) -> None:
    print(f"tierwise: {sentence}", file=sys.stderr, flush=True)


def refuse_several_ranks() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    if ranks > 1:
        raise BadInput(f"{ranks} processes train together here; Tierwise plans for one so far: start one, such as torchrun --nproc-per-node 1")


def _close(below: Any, device: Any) -> None:
    below.close()
    device.close()
