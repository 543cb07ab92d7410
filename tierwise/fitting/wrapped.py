"""The model behind what other tools put around it: torch.compile, DistributedDataParallel, accelerate's mixed precision.

A plan is for the module that is trained. Wrappers stay where they are and keep what they are for; only a compiler's shortcut past the
module's own call is set aside for as long as the model is fitted, because it would run the model without the plan.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import BadInput
from .torch_compat import compiled_call, is_compiled, original, set_compiled_call, set_forward

_log = logging.getLogger("tierwise")


def inside(model: nn.Module) -> nn.Module:
    """The module that is trained; refuses wrappers that spread it over several devices."""
    while True:
        if is_compiled(model):
            model = original(model)
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            if (ranks := torch.distributed.get_world_size(model.process_group)) > 1:
                raise BadInput(f"the model is trained by {ranks} processes together; Tierwise plans for one so far: start one process")
            model = model.module
        elif isinstance(model, nn.DataParallel):
            raise BadInput("nn.DataParallel copies the model to several cards in every step; let one be seen: CUDA_VISIBLE_DEVICES=0")
        else:
            return _alone(model)


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer that makes the steps, out of accelerate's and Lightning's wrappers."""
    while type(optimizer).__name__ in ("AcceleratedOptimizer", "LightningOptimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class Aside:
    """What was set aside, and how to give it back."""

    def __init__(self) -> None:
        self._back: list[Callable[[], Any]] = []
        self._after: list[Callable[[], Any]] = []

    def take(self, back: Callable[[], Any], after: Callable[[], Any] | None = None) -> None:
        """`back` puts it back; `after` is called when the model is fitted."""
        self._back.append(back)
        self._after += [after] if after else []

    def belongs_to(self, fitted: Any) -> None:
        """From now on `fitted` gives it back."""
        for after in self._after:
            after()
        fitted.set_aside += self._back
        self._back = []

    def give_back(self) -> None:
        while self._back:
            self._back.pop()()


@contextlib.contextmanager
def set_aside(model: nn.Module) -> Iterator[Aside]:
    """Take out of the way what would run the model without its plan; given back at once if it could not be fitted."""
    aside, trained = Aside(), inside(model)
    compiled = [module for module in _wrappers(model) if is_compiled(module)]
    shortcuts = [module for module in {*_wrappers(model), *trained.modules()} if compiled_call(module) is not None]
    try:
        for name, module in trained.named_modules():
            if name and is_compiled(module):
                raise BadInput(
                    f"{name} is a module that torch.compile returned; fit compiles repeated blocks itself: give it the model without that, "
                    "or use module.compile(), which can be set aside"
                )
        for module in compiled:
            aside.take(partial(set_forward, module, set_forward(module, original(module))))
        for module in shortcuts:
            aside.take(partial(set_compiled_call, module, compiled_call(module)))
            set_compiled_call(module, None)
        if compiled or shortcuts:
            _log.warning("the model was compiled by torch.compile; until it is released it runs as fit has it, which compiles repeated blocks itself")
        if "_original_forward" in trained.__dict__:
            from ..integrations.accelerate import mixed_precision_set_aside

            mixed_precision_set_aside(trained, aside)
        yield aside
    finally:
        aside.give_back()


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model as it was given, and what is inside of it, down to the module that is trained."""
    yield model
    while is_compiled(model) or isinstance(model, nn.parallel.DistributedDataParallel):
        model = original(model) if is_compiled(model) else model.get_submodule("module")
        yield model


def _alone(model: nn.Module) -> nn.Module:
    kinds = {base.__name__ for base in type(model).__mro__}
    if sharded := kinds & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}:
        raise BadInput(f"the model is sharded by {sharded.pop()}, which moves its parameters itself; give fit the model without that, in one process")
    return model
