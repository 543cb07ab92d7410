"""What the model returns besides the loss is in the way of a plan only if the loop holds on to it."""

from __future__ import annotations

import pytest
import torch
from fitting.training import Tower, batch, fitting

from tierwise.errors import InfeasibleBudget
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fitted, plan_of, returned

WIDE = 64
BUDGET = 800_000


class Talkative(Tower):
    """Returns what it predicts, too: 128 KiB that only the loop may need once the loss is there."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks=blocks)
        self.leave = torch.nn.Linear(16, WIDE)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found = self.leave(x)
        return {"loss": found.relu().mean() - target.mean(), "found": found}


@pytest.fixture
def looked_after(monkeypatch):
    monkeypatch.setattr(returned, "SMALLEST_BYTES", 1000)


def _train(model, optimizer, *, hold: bool, steps: int = 3) -> None:
    for number in range(steps):
        out = model(**batch(number))
        loss = out["loss"]
        if not hold:
            del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("hold", [True, False])
def test_a_plan_counts_what_the_loop_holds(looked_after, hold, monkeypatch):
    monkeypatch.setattr(fitted, "WORTH_PLANNING", 0.0)
    torch.manual_seed(0)
    model, device = Talkative().train(), NullDevice(1 << 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fitting(model, optimizer=optimizer, budget=BUDGET, device=device) as found:
        first = found.prepare((), batch(0))
        assert first.holds_output
        _train(model, optimizer, hold=hold, steps=1)
        device.reset_peak()
        _train(model, optimizer, hold=hold, steps=3)
        plan = plan_of(model)
        assert plan.holds_output is hold
        assert device.memory().peak_allocated_bytes <= plan.peak_bytes <= BUDGET
        if not hold:
            assert plan.predicted.seconds <= first.predicted.seconds
            _train(model, optimizer, hold=True, steps=2)  # a loop that begins to hold it is planned for again
            assert plan_of(model).holds_output


def test_a_budget_that_only_holds_without_it_is_not_refused(looked_after):
    """Two blocks: that nothing can be done is found out after everything was tried, and the more there are the longer that takes."""
    torch.manual_seed(0)
    model = Talkative(blocks=2).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fitting(model, optimizer=optimizer, budget=620_000):
        _train(model, optimizer, hold=False)
        assert not plan_of(model).holds_output
        with pytest.raises(InfeasibleBudget) as refused:
            _train(model, optimizer, hold=True)
    assert refused.value.least_bytes > 620_000


def test_a_saved_plan_says_what_its_loop_holds(looked_after, tmp_path, monkeypatch):
    monkeypatch.setattr(fitted, "WORTH_PLANNING", 0.0)
    torch.manual_seed(0)
    for file in (None, tmp_path / "plan.json"):
        model = Talkative().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fitting(model, optimizer=optimizer, budget=BUDGET, plan=file):
            _train(model, optimizer, hold=False)
            assert not plan_of(model).holds_output
            plan_of(model).save(tmp_path / "plan.json")
