"""Parameters that are not plain: fp8, packed bits, subclasses. Either they train, or one sentence says why not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fitting.training import fitting, same, three_steps, tower
from torch import Tensor, nn

import tierwise
from tierwise.errors import CaptureError


class Fp8Linear(nn.Module):
    """A frozen weight in fp8, and a trained scale; as fp8 checkpoints are fine-tuned."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", base.weight.detach().to(torch.float8_e4m3fn))
        self.scale = nn.Parameter(torch.ones(base.out_features, 1))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class PackedLinear(nn.Module):
    """A frozen weight of four bits, two in a byte, unpacked in forward."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(base.weight.detach().abs().amax(1, keepdim=True) / 7)
        levels = (base.weight.detach() / self.scale.detach()).round().clamp(-7, 7).to(torch.int16) + 8
        self.register_buffer("packed", (levels[:, ::2] + 16 * levels[:, 1::2]).to(torch.uint8))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        low, high = (self.packed % 16).to(x.dtype) - 8, (self.packed // 16).to(x.dtype) - 8
        return F.linear(x, torch.stack([low, high], -1).flatten(-2) * self.scale, self.bias)


class Tagged(Tensor):
    """A subclass that adds nothing, as those of quantised and sharded weights add much."""


@pytest.mark.parametrize("kind", [Fp8Linear, PackedLinear])
def test_frozen_weights_in_few_bits(kind):
    model = tower()
    for block in model.blocks:
        block.up, block.down = kind(block.up), kind(block.down)
    found = same(three_steps, model, budget="0.95MiB")
    assert any(plan.sent or plan.choice != "keep" for plan in found.current.program.calls.values())


def test_a_parameter_of_a_subclass_is_refused_in_one_sentence():
    model = tower()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach().as_subclass(Tagged))
    with pytest.raises(CaptureError, match=r"blocks\.1\.up\.weight is a Tagged; .* before it is sharded or quantised"):
        tierwise.fit(model, budget="1MiB", example={"x": torch.ones(4, 8)})
    assert "forward" not in model.__dict__
    model(torch.ones(4, 8)).sum().backward()  # and the model is as it was


def test_parameters_in_double_and_in_half():
    """Whatever the dtype is when training begins; also when it is changed between two steps."""
    model = tower().double()
    with fitting(model, budget="20MiB") as found:
        rows = torch.ones(64, 8, dtype=torch.double)
        model(rows).sum().backward()
        assert model.leave.weight.grad.dtype == torch.double
        model.zero_grad()
        model.float()
        model(rows.float()).sum().backward()
        assert model.leave.weight.grad.dtype == torch.float
        assert found.session.passes == 2
