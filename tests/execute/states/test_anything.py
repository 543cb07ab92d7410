"""Whatever people do between steps, wherever state lives: the same losses and the same bits as the same things done to a plain model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from execute.states.training import Mastered, adamw, groups, loss_of, net, placed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tierwise.ir.placement import ON_DEVICE, Placement

CPU, STREAMED = Placement("host", "cpu", gradients="host"), Placement("host", "streamed")
AWAY, STREAMED_AWAY = Placement("host", "cpu", "host", "host"), Placement("host", "streamed", "host", "device")
DISK, STREAMED_DISK = Placement("nvme", "cpu", "nvme", "host"), Placement("nvme", "streamed", "nvme", "host")
PLACES = st.sampled_from([ON_DEVICE, CPU, STREAMED, AWAY, STREAMED_AWAY, DISK, STREAMED_DISK])
PATHS = ("embedding", "layers.0", "layers.0.up", "layers.1", "layers.2.down", "head")
ALWAYS = ("step", "step", "read", "average", "evaluate", "forward", "fail in forward", "write", "save and load", "settings")
AFTER = (*ALWAYS, "accumulate", "clip", "skip", "fail in backward")  # what update="backward" is not for


class Failed(Exception):
    pass


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9)


class Person:
    """Does things with a model and an optimizer, or with masters by hand in its place; what was seen is noted."""

    def __init__(self, model: nn.Module, optimizer: Any, by_hand: Mastered | None = None) -> None:
        self.model, self.optimizer, self.by_hand = model, optimizer, by_hand
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
        loss = loss_of(self.model, self.batch)
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
        self.seen.append(loss_of(self.model, self.batch).item())

    def _forward(self) -> None:
        self.seen.append(loss_of(self.model, self.batch).item())

    def _fail_in_forward(self) -> None:
        self._fails(self.model.get_submodule("layers.1").register_forward_hook, lambda: loss_of(self.model, self.batch))

    def _fail_in_backward(self) -> None:
        self._fails(self.model.get_submodule("layers.1.up").register_full_backward_hook, lambda: loss_of(self.model, self.batch).backward())
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
        for name in ("layers.1.norm.weight", "head.bias"):
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
            (loss_of(self.model, 100 + 2 * self.batch + part) / 2).backward()
        self._update()

    def _clip(self) -> None:
        loss_of(self.model, self.batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self._update()

    def _skip(self) -> None:
        loss_of(self.model, self.batch).backward()
        (self.by_hand or self.optimizer).zero_grad()


def days(update: str) -> st.SearchStrategy[list[tuple[dict[str, Placement], list[str]]]]:
    """On each of which the model is placed anew."""
    things = st.lists(st.sampled_from(AFTER if update == "after" else ALWAYS), min_size=1, max_size=5)
    return st.lists(st.tuples(st.dictionaries(st.sampled_from(PATHS), PLACES), things), min_size=1, max_size=2)


CASES = st.sampled_from(["after", "backward"]).flatmap(lambda update: st.tuples(st.just(update), days(update)))


@settings(max_examples=40, deadline=None)
@given(CASES, st.sampled_from(["fp32", None]), st.sampled_from([adamw, sgd]))
@example(("backward", [({"layers.1": AWAY, "head": DISK}, ["step", "read", "step", "step"])]), "fp32", adamw)  # went over the update in backward
@example(("after", [({}, ["step", "write"]), ({}, ["step"])]), "fp32", adamw)  # masters given back were those of before
@example(("after", [({"layers.0": AWAY}, ["step", "average", "step"])]), "fp32", sgd)  # masters were rounded
@example(("backward", [({"head": AWAY}, ["forward", "write", "evaluate"])]), None, sgd)  # stayed for a backward, and what was written was lost
def test_whatever_people_do(case, masters, make):
    update, course = case
    model, plain = net(), net()
    optimizer, plain_optimizer = make(model), make(plain)
    one, other = Person(model, optimizer), Person(plain, plain_optimizer, Mastered(plain_optimizer) if masters else None)
    for placements, things in course:
        with (
            tempfile.TemporaryDirectory() as directory,
            placed(model, optimizer, placements, directory=Path(directory), masters=masters, update=update, delay=0.001),
        ):
            for what in things:
                one.does(what)
        for what in things:
            other.does(what)
    assert one.seen == other.seen
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
