"""Whatever people do with a fitted model between steps, in whatever budget: the same losses and the same bits as without one."""

from __future__ import annotations

import torch
from execute.states.people import AFTER, ALWAYS, Person
from execute.states.training import Mastered
from fitting.test_states import KIB, Wide, batch
from fitting.training import fitting
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tierwise.errors import InfeasibleBudget

CASES = st.sampled_from(["after", "backward"]).flatmap(
    lambda update: st.tuples(st.just(update), st.lists(st.sampled_from(AFTER if update == "after" else ALWAYS), min_size=2, max_size=6))
)


def loss_of(model: nn.Module, number: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(**{name: value.to(dtype) for name, value in batch(number).items()})
    return loss


def made(masters: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Wide(3).train().to(torch.bfloat16 if masters else torch.float32)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(CASES, st.sampled_from(["fp32", None]), st.integers(560, 1500))
@example(("after", ["step", "accumulate", "step"]), "fp32", 1035)  # was refused, since gradients waited where state passes through
def test_whatever_people_do(case, masters, budget):
    update, things = case
    (model, optimizer), (plain, plain_optimizer) = made(masters), made(masters)
    what_is_what = loss_of, "blocks.1", ("blocks.1.up.weight", "leave.bias")
    one = Person(model, optimizer, None, *what_is_what)
    other = Person(plain, plain_optimizer, Mastered(plain_optimizer) if masters else None, *what_is_what)
    try:
        with fitting(model, optimizer=optimizer, budget=budget * KIB, masters=masters, update=update, plan_seconds=0.05):
            for what in things:
                one.does(what)
    except InfeasibleBudget:
        assume(False)
    for what in things:
        other.does(what)
    assert one.seen == other.seen
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
