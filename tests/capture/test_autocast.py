"""torch.autocast on CUDA, captured on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from capture.models import named, storage
from torch import nn

from tierwise.capture import capture
from tierwise.errors import BadInput, UnknownName


class Twice(nn.Module):
    """One weight used twice, a softmax, a layer norm, an exponential."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        h = self.norm(self.linear(F.gelu(self.linear(x))))
        return F.cross_entropy(h.softmax(-1).exp(), torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bf16"])
def test_matmuls_are_low_precision_and_softmax_norm_and_loss_are_fp32(dtype):
    graph = capture(Twice(), (torch.ones(8, 16),), autocast=dtype)
    low = "fp16" if dtype is torch.float16 else "bf16"
    precision = {op.name: op.precision for op in graph.ops if op.phase == "forward"}
    assert (precision["linear.addmm"], precision["linear.addmm.2"], precision["gelu"]) == (low, low, low)
    assert precision["norm.layer_norm"] == precision["softmax"] == precision["exp"] == precision["nll_loss_forward"] == "fp32"
    assert storage(graph, "norm.layer_norm:0").nbytes == 8 * 16 * 4


def test_a_weight_is_cast_once_a_step():
    graph = capture(Twice(), (torch.ones(8, 16),), autocast=torch.bfloat16)
    weight = storage(graph, "linear.weight").id
    assert sum(op.kind == "cast" and weight in op.reads for op in graph.ops) == 1
    assert storage(graph, "linear.weight.grad").nbytes == 16 * 16 * 4


def test_a_context_that_the_model_opens_itself_for_cuda_acts():
    class Inside(Twice):
        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                assert torch.is_autocast_enabled()
                h = self.linear(x)
            with torch.autocast("cuda"):
                h = self.linear(h)
            with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast(device_type=x.device.type, enabled=False):
                return self.linear(h.float()).sum()

    graph = capture(Inside(), (torch.ones(8, 16),))
    assert [op.precision for op in graph.ops if op.kind == "matmul"] == ["bf16", "fp16", "fp32"]


def test_norms_of_one_weight_follow_the_list_of_the_torch_that_runs():
    graph = capture(nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16)), torch.ones(8, 16), autocast=torch.bfloat16, loss=lambda out: out.sum())
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):  # since torch 2.12
        assert named(graph, "1.rms_norm").precision == "fp32"
    else:
        assert "rsqrt" in [op.kind for op in graph.ops]


def test_other_types_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'bf16'"):
        capture(Twice(), (torch.ones(8, 16),), autocast="bf61")
    with pytest.raises(BadInput, match="casts to torch"):
        capture(Twice(), (torch.ones(8, 16),), autocast=torch.float64)
