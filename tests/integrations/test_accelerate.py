"""accelerate in one process: prepare before fit and after it, with and without mixed precision, accumulation, clipping and a scheduler."""

from __future__ import annotations

import pytest
import torch
from fitting.training import batch, equal, sgd, tower

import tierwise
from tierwise.errors import BadInput

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16


def train(precision: str, fit_when: str | None):
    """Losses, parameters, and the evaluation after release."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = tower()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    budget = "1MiB" if precision == "no" else "0.65MiB"
    if fit_when == "before":
        tierwise.fit(model, optimizer, budget=budget)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if fit_when == "after":
        tierwise.fit(model, optimizer, budget=budget)
    seen = []
    for number in range(2):
        with accelerator.accumulate(model):
            loss = model(**batch(number))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
    if fit_when:
        plan = tierwise.plan_of(model)
        assert tierwise.stats(model)["step"] == 2
        assert {plan.choice for plan in plan.program.calls.values()} != {"keep"} or any(plan.sent for plan in plan.program.calls.values())
        tierwise.release(model)
        with pytest.raises(BadInput, match="not under"):
            tierwise.plan_of(model)
    seen += [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]
    model.eval()
    with torch.no_grad():
        seen.append(model(batch(9)["x"]))
    return seen, accelerator


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_same_bits(precision):
    expected, _ = train(precision, None)
    for fit_when in ("before", "after"):
        seen, accelerator = train(precision, fit_when)
        assert equal(seen, expected)
        assert seen[-1].dtype == torch.float32  # prepare's forward is still there
        (model,) = accelerator._models
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # as accelerate does when it saves a model
        assert plain(batch(9)["x"]).dtype == torch.float32
