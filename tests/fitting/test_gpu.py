"""On a card: compiled plans give the bits of the compiled step that keeps everything, and hold an enforced cap."""

from __future__ import annotations

import pytest
import torch

from tierwise.fitting import fit, plan_of, release

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_card")]
GIB = 1 << 30


def llama():
    from tierwise.zoo.llama import Llama

    torch.manual_seed(0)
    with torch.device("cuda"):
        return Llama(vocab=2048, layers=8, hidden=512, intermediate=1408, heads=8).to(torch.bfloat16).train()


def trained(model, optimizer, steps=3):
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(2048, (16, 512), device="cuda")
        loss = model(input_ids=tokens, labels=tokens.roll(-1, 1))
        loss.backward()
        seen += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def under(budget, *, cap=False):
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    fit(model, optimizer, budget=budget)
    if cap:
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    try:
        seen = [tensor.cpu() for tensor in trained(model, optimizer)]
        return seen, plan_of(model)
    finally:
        release(model)


def test_tight_plans_give_the_bits_of_the_step_that_keeps_everything():
    kept, everything = under(20 * GIB)
    again, _ = under(20 * GIB)
    assert all(map(torch.equal, kept, again))  # two runs agree, so equality may be asked for
    for share in (0.75, 0.6):
        seen, plan = under(int(everything.keep_all_bytes * share), cap=False)
        assert plan.predicted.seconds > 0
        assert [index for index, (a, b) in enumerate(zip(kept, seen, strict=True)) if not torch.equal(a, b)] == [], plan.summary()
