"""What an option needs while it runs op by op: by hand, and as the allocator sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from blocks import ExpertsBlock, example
from torch import Tensor, nn

from tierwise.profile.memory import measured_bytes
from tierwise.regions import options
from tierwise.regions.compiled import compile_option
from tierwise.regions.held import workspace_of
from tierwise.regions.joint import look_at

CPU = torch.device("cpu")


class Mlp(nn.Module):
    """Four rows of 8 numbers become 32 and 8 again: 128 bytes, 512, 512 behind the activation function, 128."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def needs(block: nn.Module, x: Tensor):
    look = look_at(type(block).forward, block, (x,), compile=False)
    return {option.name: (option, workspace_of(look, option)) for option in options(look.seen)}


def test_forward_by_hand():
    found = {name: need.forward_bytes for name, (_, need) in needs(Mlp(), torch.randn(4, 8, requires_grad=True)).items()}
    assert found["keep"] == 0  # everything it makes it leaves
    assert found["cheap"] == 512  # both sides of the function at once, 1024, or the kept side, the other and the result, 1152; it leaves 512 + 128
    assert found["checkpoint"] == 1024 - 128  # both sides; only the result is left


def test_backward_by_hand():
    """In the end it leaves the gradients, 1024 + 1024 of the weights, 128 + 32 of the biases, 128 of the input; the last of these, the bias in front,
    is added up from the gradient behind it, of 512 bytes, with all the others there."""
    found = {name: need.backward_bytes for name, (_, need) in needs(Mlp(), torch.randn(4, 8, requires_grad=True)).items()}
    assert found["checkpoint"] == 512
    assert found["keep"] == 0  # 1024 bytes of what was saved are free by then


@pytest.mark.parametrize("kind", [Mlp, ExpertsBlock])
def test_it_is_what_the_allocator_sees(kind):
    torch.manual_seed(0)
    block = kind()
    x = torch.randn(4, 8) if kind is Mlp else example(block)
    x.requires_grad_()
    for option, need in needs(block, x).values():
        forward, out = compile_option(kind.forward, option, compile=False), []
        tangent = torch.randn_like(forward(block, x))

        def run(forward=forward, out=out):
            out.append(forward(block, x))

        ahead = measured_bytes(run, CPU)

        def run_backward(out=out, tangent=tangent):
            out.append(torch.autograd.grad(out.pop(), [x, *block.parameters()], tangent))

        behind = measured_bytes(run_backward, CPU)
        assert need.forward_bytes == ahead.peak - ahead.left, option.name
        assert need.backward_bytes == max(0, behind.peak - sum(gradient.nbytes for gradient in out[0])), option.name
