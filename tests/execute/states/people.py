"""What people do with a model and an optimizer between steps, and with the same arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from execute.states.training import Mastered
from torch import nn

ALWAYS = ("step", "step", "read", "average", "evaluate", "forward", "fail in forward", "write", "save and load", "settings")
AFTER = (*ALWAYS, "accumulate", "clip", "skip", "fail in backward")  # what update="backward" is not for


class Failed(Exception):
    pass


class Person:
    """Does things with a model and an optimizer, or with masters by hand in its place; what was seen is noted. `loss` is that of a model in the step
    of a number, `inner` the module in which things fail, `written` parameters that are written to."""

    def __init__(
        self, model: nn.Module, optimizer: Any, by_hand: Mastered | None, loss: Callable[[nn.Module, int], torch.Tensor], inner: str,
        written: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.by_hand = model, optimizer, by_hand
        self._loss, self._inner, self._written = loss, inner, written
        self.seen: list[float] = []
        self.batch = 0

    def does(self, what: str) -> None:
        self.batch += 1
        getattr(self, "_" + what.replace(" ", "_"))()

    def _update(self) -> None:
        stepper = self.by_hand or self.optimizer
        stepper.step()
        stepper.zero_grad()

    def _step(self) -> None:
        loss = self._loss(self.model, self.batch)
        loss.backward()
        self._update()
        self.seen.append(loss.item())

    @torch.no_grad()
    def _read(self) -> None:
        self.seen.append(float(sum(parameter.float().norm() for parameter in self.model.parameters())))

    def _average(self) -> None:
        """Other values for an evaluation, and then those that were there."""
        kept = [parameter.data.clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data.copy_(parameter.data / 2)
        self._evaluate()
        for parameter, value in zip(self.model.parameters(), kept, strict=True):
            parameter.data.copy_(value)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.seen.append(self._loss(self.model, self.batch).item())

    def _forward(self) -> None:
        self.seen.append(self._loss(self.model, self.batch).item())

    def _fail_in_forward(self) -> None:
        self._fails(self.model.get_submodule(self._inner).register_forward_hook, lambda: self._loss(self.model, self.batch))

    def _fail_in_backward(self) -> None:
        self._fails(self.model.get_submodule(self._inner).register_full_backward_hook, lambda: self._loss(self.model, self.batch).backward())
        (self.by_hand or self.optimizer).zero_grad()

    def _fails(self, hooked: Any, run: Any) -> None:
        def fail(*_: Any) -> None:
            raise Failed

        handle = hooked(fail)
        with pytest.raises(Failed):
            run()
        handle.remove()

    @torch.no_grad()
    def _write(self) -> None:
        for name in self._written:
            parameter = self.model.get_parameter(name)
            parameter.mul_(0.5)
            if self.by_hand is not None and parameter in self.by_hand.kept:
                master, written = self.by_hand.kept[parameter][0], parameter.flatten()
                master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))

    def _save_and_load(self) -> None:
        self.model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})
        if self.by_hand is None:
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _settings(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def _accumulate(self) -> None:
        for part in range(2):
            (self._loss(self.model, 100 + 2 * self.batch + part) / 2).backward()
        self._update()

    def _clip(self) -> None:
        self._loss(self.model, self.batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self._update()

    def _skip(self) -> None:
        self._loss(self.model, self.batch).backward()
        (self.by_hand or self.optimizer).zero_grad()
