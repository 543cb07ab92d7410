"""Regions found by themselves: repeated blocks as one class, the rest as classes of their own, what is no function of its arguments as glue."""

import torch
import torch.nn.functional as F
from capture.models import Block, Transformer, named, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierwise.capture import capture, capture_step
from tierwise.ir import Phase


def classes(graph):
    return [(region.kind, [call.module for call in graph.calls if call.region == region.id]) for region in graph.regions]


def test_blocks_are_one_class_and_the_rest_classes_of_their_own():
    graph = capture(Transformer(), {"ids": tokens(), "labels": tokens()})
    assert classes(graph) == [
        ("Embedding", ["embedding"]),
        ("Block", ["blocks.0", "blocks.1", "blocks.2"]),
        ("LayerNorm", ["norm"]),
        ("Linear", ["head"]),
    ]


def test_backward_ops_carry_the_call_of_their_forward():
    graph = capture(Transformer(), {"ids": tokens(), "labels": tokens()})
    for call in graph.calls:
        ops = [op for op in graph.ops if op.region == call.id]
        assert {op.phase for op in ops} == {Phase.FORWARD, Phase.BACKWARD}
        assert [op.name for op in ops if call.module not in op.name and op.kind != "release"] == []
    counts = [sum(op.region == call.id for op in graph.ops) for call in graph.calls if call.module.startswith("blocks")]
    assert counts[0] == counts[1] == counts[2]
    assert [op.name for op in graph.ops if op.region == -1 and op.phase is Phase.FORWARD] == ["log_softmax", "nll_loss_forward"]


def test_a_block_of_another_shape_is_another_class():
    class Bottleneck(nn.Module):
        def __init__(self, width_in, width_out):
            super().__init__()
            self.one, self.two = nn.Linear(width_in, width_out), nn.Linear(width_out, width_out)

        def forward(self, x):
            return self.two(self.one(x).relu())

    model = nn.Sequential(Bottleneck(8, 16), Bottleneck(16, 16), Bottleneck(16, 16), nn.Flatten(), nn.Linear(16, 1))
    graph = capture(model, torch.ones(4, 8), loss=lambda out: out.sum())
    assert classes(graph) == [("Bottleneck", ["0"]), ("Bottleneck", ["1", "2"]), ("Linear", ["4"])]  # Flatten does nothing


def test_one_module_called_twice_is_two_calls_of_one_class():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(16, 2, 0.0)

        def forward(self, x):
            for _ in range(3):  # shared weights
                x = self.block(x)
            return x.sum()

    assert classes(capture(Loop(), (torch.ones(2, 4, 16, requires_grad=True),))) == [("Block", ["block"] * 3)]
    # Without a gradient for the input, the first call has less to do in backward.
    assert classes(capture(Loop(), (torch.ones(2, 4, 16),))) == [("Block", ["block"]), ("Block", ["block"] * 2)]


def test_control_flow_between_blocks():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(16, 2, 0.0) for _ in range(4))

        def forward(self, x, skip: int):
            for number, block in enumerate(self.blocks):
                if number != skip:
                    x = x + F.silu(block(x)) if number % 2 else block(x)
            return x.sum()

    graph = capture(Odd(), {"x": torch.ones(2, 4, 16, requires_grad=True), "skip": 1})
    assert classes(graph) == [("Block", ["blocks.0", "blocks.2", "blocks.3"])]
    assert named(graph, "silu").region == -1


def test_recomputed_ops_belong_to_the_call_that_was_checkpointed():
    class Checkpointed(Transformer):
        def forward(self, ids, labels):
            x = self.embedding(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    graph = capture(Checkpointed(), {"ids": tokens(), "labels": tokens()})
    assert classes(graph)[1] == ("Block", ["blocks.0", "blocks.1", "blocks.2"])
    call = next(call for call in graph.calls if call.module == "blocks.1")
    again = [op for op in graph.ops if op.region == call.id and op.phase is Phase.BACKWARD and op.kind in ("layer_norm", "softmax", "gelu")]
    assert [op.kind for op in again] == ["layer_norm", "softmax", "layer_norm", "gelu"]
    assert "blocks.1.attention.softmax.2" in [op.name for op in again]


def test_a_block_that_reads_what_it_was_not_given_is_glue_and_said_so():
    class Peeking(nn.Module):
        def __init__(self, notes):
            super().__init__()
            self.linear, self.notes = nn.Linear(8, 8), notes

        def forward(self, x):
            return self.linear(x) + self.notes[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.notes = [None]
            self.first = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(Peeking(self.notes) for _ in range(2))

        def forward(self, x):
            self.notes[0] = x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x.sum()

    captured = capture_step(Model(), (torch.ones(4, 8),))
    assert classes(captured.graph) == [("Linear", ["first"]), ("Peeking", ["blocks.0"])]  # the first block is given it as its argument
    assert captured.notes == (
        "blocks.1 (Peeking) could not be captured as a region and is captured as eager glue: it reads first.addmm, which is not among its arguments",
    )
    assert named(captured.graph, "blocks.1.linear.addmm").region == -1


def test_a_block_that_leaves_a_tensor_behind_is_glue_and_said_so():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            self.penalty = self.linear(x).square().mean()
            return x + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Leaving() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum() + sum(block.penalty for block in self.blocks)

    captured = capture_step(Model(), (torch.ones(4, 8),))
    assert captured.graph.regions == ()
    assert captured.notes[0].endswith("it makes blocks.0.mean, which add reads though it was not returned")
