"""Where CUDA does something else than the CPU, the captured step does what CUDA does."""

import pytest
import torch
import torch.nn.functional as F
from capture.models import named, saved_bytes, storage_names
from torch import nn

from tierwise.capture import capture, capture_step

BATCH, HEADS, LENGTH, SIZE = 2, 4, 40, 16


class Attending(nn.Module):
    """One projection to q, k and v, attention, and the sum."""

    def __init__(self, kv_heads=HEADS, size=SIZE, dtype=torch.bfloat16, **options):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.options = HEADS, kv_heads, size, options
        self.q, self.k, self.v = (nn.Linear(8, heads * size, bias=False, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads))

    def forward(self, x, mask=None):
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return out.transpose(1, 2).reshape(BATCH, LENGTH, -1).sum()  # free: the kernels lay their result out as batch, length, heads, size


def attend(dtype=torch.bfloat16, mask=None, **options):
    batch = {"x": torch.ones(BATCH, LENGTH, 8, dtype=dtype)} | ({} if mask is None else {"mask": mask})
    return capture(Attending(dtype=dtype, **options), batch, optimizer="sgd")


def kinds(graph):
    return [op.kind for op in graph.ops if op.phase != "update" and op.kind != "release"]


def bytes_of(graph, numbers):
    return [graph.storages[number].nbytes for number in numbers]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_attention_in_bf16_is_one_flash_op_each_way(dropout_p):
    graph = attend(dropout_p=dropout_p, is_causal=True)
    assert kinds(graph) == ["matmul"] * 3 + ["attention", "sum", "ones_like_backward", "attention_backward"] + ["matmul_backward"] * 3
    activation = BATCH * HEADS * LENGTH * SIZE * 2
    forward, backward = named(graph, "flash_attention"), named(graph, "flash_attention.backward")
    assert bytes_of(graph, forward.writes)[:2] == [activation, BATCH * HEADS * LENGTH * 4]  # the result, and the log-sum-exp of each row in fp32
    assert all(nbytes <= 16 for nbytes in bytes_of(graph, forward.writes)[2:])  # the random state
    assert bytes_of(graph, backward.writes) == [activation] * 3
    assert set(forward.writes) < set(backward.reads)
    assert forward.precision == "bf16"
    assert forward.flops == 2 * 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE // 2  # two matmuls, half of them masked
    rows = 128  # LENGTH rounded up
    assert backward.workspace_bytes == 4 * BATCH * HEADS * rows * (32 + 1)


def test_attention_in_fp32_is_the_efficient_kernel():
    graph = attend(dtype=torch.float32)
    forward = named(graph, "efficient_attention")
    assert bytes_of(graph, forward.writes)[:2] == [BATCH * HEADS * LENGTH * SIZE * 4, BATCH * HEADS * 64 * 4]  # rows rounded up to 32
    assert kinds(graph).count("attention_backward") == 1


def test_a_mask_becomes_a_bias_of_the_same_type_that_is_saved():
    graph = attend(mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
    assert kinds(graph)[3:7] == ["zeros_like", "logical_not", "masked_fill", "constant_pad_nd"]
    padded = LENGTH * 48 * 2  # rows of 40 are padded to a multiple of 16
    assert padded in saved_bytes(graph)


def test_grouped_queries_are_one_flash_op_and_the_kernel_expands_their_gradients():
    graph = attend(kv_heads=2, enable_gqa=True)
    backward = named(graph, "flash_attention.backward")
    assert bytes_of(graph, backward.writes) == [BATCH * heads * LENGTH * SIZE * 2 for heads in (4, 2, 2)]
    assert backward.workspace_bytes == 4 * BATCH * HEADS * 128 * (32 + 1) + 2 * BATCH * HEADS * LENGTH * SIZE * 2


def test_grouped_queries_in_fp32_have_no_fused_kernel():
    assert "softmax" in kinds(attend(dtype=torch.float32, kv_heads=2, enable_gqa=True))


def test_odd_head_sizes_are_padded_for_flash():
    assert kinds(attend(size=12))[3:7] == ["constant_pad_nd"] * 3 + ["attention"]


def test_dropout_saves_a_mask_of_one_byte_an_element():
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(5, 4), loss=lambda out: out.sum())
    dropout = named(graph, "1.dropout")
    assert bytes_of(graph, dropout.writes) == [5 * 4 * 4, 5 * 4]
    assert storage_names(graph, named(graph, "1.dropout.backward").reads) == ["backward.ones_like", "1.dropout:1"]


@pytest.mark.parametrize(("module", "name"), [(nn.LayerNorm(16), "layer_norm"), (nn.BatchNorm1d(16), "batch_norm"), (nn.RMSNorm(16), "rms_norm")])
def test_the_statistics_of_norms_are_fp32(module, name):
    graph = capture(nn.Sequential(module.to(torch.bfloat16)), torch.ones(8, 16, dtype=torch.bfloat16), loss=lambda out: out.sum())
    statistics = {"layer_norm": [8 * 4, 8 * 4], "batch_norm": [16 * 4, 16 * 4], "rms_norm": [8 * 4]}[name]
    assert bytes_of(graph, named(graph, f"0.{name}").writes) == [8 * 16 * 2, *statistics]
    assert sum(op.kind == f"{name}_backward" for op in graph.ops) == 1


def test_rms_norm_with_a_weight_of_another_type_is_not_fused():
    graph = capture(nn.Sequential(nn.RMSNorm(16)), torch.ones(8, 16, dtype=torch.bfloat16), loss=lambda out: out.sum())
    assert "rsqrt" in kinds(graph)


@pytest.mark.parametrize(("module", "states"), [(nn.LSTM, 6), (nn.GRU, 5), (nn.RNN, 3)])
def test_recurrent_layers_are_one_op_each_way(module, states):
    captured = capture_step(module(8, 16, num_layers=2, batch_first=True), torch.ones(3, 5, 8), loss=lambda out: out[0].sum())
    assert [op.kind for op in captured.graph.ops if "rnn" in op.kind] == ["rnn", "rnn_backward"]
    assert 3 * 5 * 2 * 16 * states * 4 in bytes_of(captured.graph, named(captured.graph, "cudnn_rnn").writes)
    assert "estimated" in captured.notes[0]


def test_softmax_of_fp16_to_fp32_needs_no_cast_and_of_bf16_does():
    class Softmax(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=dtype)

        def forward(self, x):
            return self.linear(x).softmax(-1, dtype=torch.float32).sum()

    assert kinds(capture(Softmax(torch.float16), (torch.ones(2, 4, dtype=torch.float16),)))[:2] == ["matmul", "softmax"]
    assert kinds(capture(Softmax(torch.bfloat16), (torch.ones(2, 4, dtype=torch.bfloat16),)))[:3] == ["matmul", "cast", "softmax"]


def test_real_tensors_keep_their_own_semantics_after_a_capture():
    attend()
    x = torch.randn(2, 3, 4, 8)
    expected = torch.softmax(x @ x.transpose(-1, -2) / 8**0.5, -1) @ x
    assert torch.allclose(F.scaled_dot_product_attention(x, x, x), expected, atol=1e-5)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
