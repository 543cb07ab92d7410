"""Whatever people do between steps, wherever state lives: the same losses and the same bits as the same things done to a plain model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from execute.states.people import AFTER, ALWAYS, Person
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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9)


def days(update: str) -> st.SearchStrategy[list[tuple[dict[str, Placement], list[str]]]]:
    """On each of which the model is placed anew."""
    things = st.lists(st.sampled_from(AFTER if update == "after" else ALWAYS), min_size=1, max_size=5)
    return st.lists(st.tuples(st.dictionaries(st.sampled_from(PATHS), PLACES), things), min_size=1, max_size=2)


CASES = st.sampled_from(["after", "backward"]).flatmap(lambda update: st.tuples(st.just(update), days(update)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(CASES, st.sampled_from(["fp32", None]), st.sampled_from([adamw, sgd]))
@example(("backward", [({"layers.1": AWAY, "head": DISK}, ["step", "read", "step", "step"])]), "fp32", adamw)  # went over the update in backward
@example(("after", [({}, ["step", "write"]), ({}, ["step"])]), "fp32", adamw)  # masters given back were those of before
@example(("after", [({"layers.0": AWAY}, ["step", "average", "step"])]), "fp32", sgd)  # masters were rounded
@example(("backward", [({"head": AWAY}, ["forward", "write", "evaluate"])]), None, sgd)  # stayed for a backward, and what was written was lost
def test_whatever_people_do(case, masters, make):
    update, course = case
    model, plain = net(), net()
    optimizer, plain_optimizer = make(model), make(plain)
    what_is_what = loss_of, "layers.1", ("layers.1.norm.weight", "head.bias")
    one = Person(model, optimizer, None, *what_is_what)
    other = Person(plain, plain_optimizer, Mastered(plain_optimizer) if masters else None, *what_is_what)
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
