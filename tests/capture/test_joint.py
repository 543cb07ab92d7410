"""The joint view of region classes."""

import torch
import torch.nn.functional as F
from capture.models import Transformer, tokens
from torch import nn

from tierwise.capture import capture, capture_joints
from tierwise.ir import Phase, Role, check_graph


class TwoLayers(nn.Module):
    """Two blocks of a linear layer and a GELU: 8 samples of 16 features."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, x):
            return F.gelu(self.linear(x))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def values(found):
    return [(value.kind, value.name, value.nbytes) for value in found]


def test_a_linear_layer_and_a_gelu():
    model, batch = TwoLayers(), (torch.ones(8, 16, requires_grad=True),)
    graph = capture(model, batch)
    joints = capture_joints(model, batch, graph)
    assert joints.notes == ()
    (joint,) = joints.by_region.values()
    assert joint.module == "blocks.0"
    assert values(joint.inputs) == [("param", "linear.weight", 1024), ("activation", "primals_2", 512), ("tangent", "tangents_1", 512)]
    assert [(value.kind, value.nbytes) for value in joint.outputs] == [("output", 512), ("grad", 1024), ("grad", 512)]
    assert values(joint.saved) == [("needed", "primals_2", 512), ("needed", "mm", 512), ("possible", "gelu", 512)]
    assert [(op.kind, op.phase) for op in joint.graph.ops] == [
        ("matmul", Phase.FORWARD),
        ("gelu", Phase.FORWARD),
        ("gelu_backward", Phase.BACKWARD),
        ("matmul_backward", Phase.BACKWARD),
        ("matmul_backward", Phase.BACKWARD),
    ]
    assert [found.role for found in joint.graph.storages[:3]] == [Role.PARAM, Role.INPUT, Role.INPUT]
    assert joint.graph.ops[0].flops == 2 * 8 * 16 * 16
    check_graph(joint.graph)


def test_the_fx_graph_computes_what_the_module_does():
    model, batch = TwoLayers(), (torch.ones(8, 16, requires_grad=True),)
    (joint,) = capture_joints(model, batch, capture(model, batch)).by_region.values()
    x, weight, grad = torch.randn(8, 16, requires_grad=True), model.blocks[0].linear.weight, torch.randn(8, 16)
    out = model.blocks[0](x)
    expected = [out, *torch.autograd.grad(out, (weight, x), grad)]
    with torch.no_grad():
        computed = torch.fx.Interpreter(joint.graph_module).run(weight, x, grad)
    assert all(torch.allclose(got, want, atol=1e-6) for got, want in zip(torch.utils._pytree.tree_leaves(computed), expected, strict=True))


def test_attention_stays_one_op_and_autocast_is_followed():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2).flatten(-2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Attending() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.float().sum()

    model, batch = Model(), (torch.ones(2, 8, 32),)
    graph = capture(model, batch, autocast="bf16")
    joints = capture_joints(model, batch, graph, autocast="bf16")
    assert joints.notes == ()
    ops = joints.by_region[0].graph.ops
    assert [(op.kind, op.precision) for op in ops if "attention" in op.kind] == [("attention", "bf16"), ("attention_backward", "bf16")]


def test_a_region_that_autograd_cannot_export_is_noted():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask):
            return self.linear(x) if mask.all() else x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Branching() for _ in range(2))

        def forward(self, x, mask):
            for block in self.blocks:
                x = block(x, mask)
            return x.sum()

    model, batch = Model(), {"x": torch.ones(4, 8, requires_grad=True), "mask": torch.ones(4, dtype=torch.bool)}
    joints = capture_joints(model, batch, capture(model, batch))
    assert joints.by_region == {}
    assert joints.notes[0].startswith("blocks.0 (Branching) has no joint graph and runs eagerly: DataDependentOutputException")


def test_every_region_of_a_transformer_has_a_joint_graph():
    model, batch = Transformer(blocks=2), {"ids": tokens(), "labels": tokens()}
    graph = capture(model, batch)
    joints = capture_joints(model, batch, graph)
    assert set(joints.by_region) == {region.id for region in graph.regions}
    block = next(joint for joint in joints.by_region.values() if joint.module == "blocks.0")
    eager = [op for op in graph.ops if op.region == 1 and op.phase is Phase.FORWARD and op.kind == "matmul"]
    assert sum(op.flops for op in block.graph.ops if op.kind == "matmul") == sum(op.flops for op in eager)


def test_real_attention_has_its_gradient_after_a_joint_graph_was_captured():
    """Torch remembers which kernel an op resolves to; what it saw while CUDA's semantics were on must not outlive them."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    x = torch.randn(1, 3, 8)
    graph = capture(model, (x,), loss=lambda out: out.sum())
    capture_joints(model, (x,), graph)
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(query, query.detach(), query.detach(), dropout_p=0.1)
    torch.nn.functional.dropout(out, 0.5).sum().backward()
    assert query.grad is not None
