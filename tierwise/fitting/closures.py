"""optimizer.step(closure): the closure first, then the step.

Torch calls a closure from within its own step. A plan that is made by the forward in there may take the optimizer's state over, and the step it was
called from would go on with a state that is no longer its own. Torch's optimizers call a closure once and first, so nothing changes for them;
LBFGS, and optimizers of others, are left as they are.
"""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from ..errors import BadInput


def closures_first(optimizer: Optimizer) -> Callable[[], None]:
    """Returns what takes it back."""
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, LBFGS):
        return lambda: None
    if _is_stepping(optimizer):
        raise BadInput("tierwise.fit was called by a closure, in the middle of optimizer.step; call it before that step")
    plain, before = optimizer.step, optimizer.__dict__.get("step")

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return plain()
        mine = self.__dict__.get("step")
        with torch.enable_grad():
            loss = closure()
        now = self.__dict__.get("step")
        (plain if now is mine or now is None else now)()  # another one: the state was taken over
        return loss

    if hasattr(plain, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or a scheduler warns that its count is lost
    token = object()
    step.put_back = (token, before)  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = types.MethodType(step, optimizer)
    return partial(_take_back, weakref.ref(optimizer), token)


def _take_back(reference: weakref.ref[Optimizer], token: object) -> None:
    """Holds nothing of the optimizer: a script decides how long that lives."""
    if (optimizer := reference()) is None:
        return
    mine, before = getattr(getattr(optimizer.__dict__.get("step"), "__func__", None), "put_back", (None, None))
    if mine is token:
        del optimizer.__dict__["step"]
        if before is not None:
            optimizer.__dict__["step"] = before


def _is_stepping(optimizer: Optimizer) -> bool:
    """Whether this is called from within its own class's step."""
    code = inspect.unwrap(type(optimizer).step).__code__
    frame = sys._getframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is optimizer):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
