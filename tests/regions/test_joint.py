"""What is seen of a module call: its values, and the reason when there is no one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocks import LlamaBlock, example
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tierwise.errors import CannotCapture
from tierwise.regions import JointGraph, Kind, options
from tierwise.regions.compiled import compile_option
from tierwise.regions.joint import describe


class Scale(nn.Module):
    """One product and a rectifier; `how` says what else it does."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "branch":
            y = y if y.sum() > 0 else -y
        if self.how == "select":
            y = y[y[:, 0] > 0]
        return F.relu(y)


def seen(module: nn.Module, x: Tensor, **switches: bool) -> JointGraph:
    return describe(type(module).forward, module, (x,), compile=False, **switches)


def test_the_values_of_a_product_and_a_rectifier():
    joint = seen(Scale(), torch.randn(3, 4))
    weight, x, turned, product, result = joint.values[:5]
    assert {weight.kind, x.kind} == {Kind.PARAMETER, Kind.INPUT}
    if weight.kind is Kind.INPUT:
        weight, x = x, weight
    assert (weight.nbytes, x.nbytes) == (64, 48)
    assert (turned.kind, turned.nbytes) == (Kind.VIEW, 0)
    assert (product.kind, product.nbytes, product.flops) == (Kind.MATMUL, 48, 2 * 3 * 4 * 4)
    assert product.label == "linear"
    assert set(product.made_from) == {x.name, turned.name}
    assert (result.kind, result.made_from, result.is_output) == (Kind.POINTWISE, (product.name,), True)
    assert joint.keep == (result.name,)  # the rectifier's gradient needs its result, and the product's needs x
    assert JointGraph.from_json(joint.to_json()) == joint


def test_fake_tensors_give_the_same_graph():
    block = LlamaBlock()
    real = seen(block, example(block).requires_grad_())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = seen(LlamaBlock(), torch.empty(2, 12, 32, requires_grad=True))
    assert fake == real


def test_a_call_that_needs_no_gradients_has_no_values():
    frozen = Scale().requires_grad_(False)
    joint = seen(frozen, torch.randn(3, 4))
    assert (joint.values, joint.keep) == ((), ())
    (option,) = options(joint)
    x = torch.randn(3, 4)
    assert torch.equal(compile_option(Scale.forward, option, compile=False)(frozen, x), frozen(x))


@pytest.mark.parametrize(
    ("how", "reason"), [("branch", "[Dd]ata-dependent"), ("select", "known only when it runs|[Dd]ynamic shape|[Dd]ata.dependent")]
)
def test_what_is_not_one_graph_is_refused_with_the_reason(how, reason):
    with pytest.raises(CannotCapture, match=reason) as caught:
        seen(Scale(how), torch.randn(3, 4))
    assert "\n" not in str(caught.value)


def test_an_option_for_one_graph_is_refused_on_another():
    module = Scale()
    option = options(seen(module, torch.randn(3, 4)))[0]
    forward = compile_option(Scale.forward, option, compile=False)
    forward(module, torch.randn(3, 4))
    with pytest.raises(CannotCapture, match="gradients for the same inputs"):
        forward(module, torch.randn(3, 4, requires_grad=True))
    assert torch.equal(forward(module, torch.ones(5, 4)), module(torch.ones(5, 4)))  # other sizes are welcome
