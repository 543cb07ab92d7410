"""Captured steps small enough to write down: these ops, these bytes."""

import pytest
import torch
import torch.nn.functional as F
from capture.models import OneLinear, Transformer, named, storage, storage_names, tokens
from torch import nn

from tierwise.capture import capture, capture_step, on_fake_tensors
from tierwise.ir import Graph, Phase, Role, check_graph, serial


def lines(graph):
    """One line per op: phase, name, what it reads, writes and mutates."""
    return [
        f"{op.phase} {op.name}: {' '.join(storage_names(graph, op.reads))} -> {' '.join(storage_names(graph, op.writes))}"
        + (f" mutates {' '.join(storage_names(graph, op.mutates))}" if op.mutates else "")
        for op in graph.ops
    ]


def test_one_linear_layer_is_these_ops():
    graph = capture(OneLinear(), {"x": torch.ones(5, 4)}, optimizer="adamw")
    w, b = "linear.weight", "linear.bias"
    assert lines(graph) == [
        f"forward linear.addmm: {b} batch.x {w} -> linear.addmm",
        "forward sum: linear.addmm -> sum",
        "backward backward.ones_like:  -> backward.ones_like",
        # the gradient of sum is one number seen as a 5×3 matrix, so the matmul and the sum read the number itself
        f"backward linear.addmm.backward.mm: backward.ones_like batch.x -> {w}.grad",
        f"backward linear.addmm.backward.sum: backward.ones_like -> {b}.grad",
        "backward release batch.x and 1 more: batch.x sum -> ",
        f"update {w}.update: {w}.grad ->  mutates {w} {w}.exp_avg {w}.exp_avg_sq",
        f"update {b}.update: {b}.grad ->  mutates {b} {b}.exp_avg {b}.exp_avg_sq",
    ]
    assert [(found.name, found.nbytes, found.role, found.lasting) for found in graph.storages] == [
        (w, 48, Role.PARAM, True), (b, 12, Role.PARAM, True), ("batch.x", 80, Role.INPUT, False), ("linear.addmm", 60, Role.ACTIVATION, False),
        ("sum", 4, Role.ACTIVATION, False), ("backward.ones_like", 4, Role.ACTIVATION, False), (f"{w}.grad", 48, Role.GRAD, False),
        (f"{b}.grad", 12, Role.GRAD, False), (f"{w}.exp_avg", 48, Role.OPTIMIZER_STATE, True), (f"{w}.exp_avg_sq", 48, Role.OPTIMIZER_STATE, True),
        (f"{b}.exp_avg", 12, Role.OPTIMIZER_STATE, True), (f"{b}.exp_avg_sq", 12, Role.OPTIMIZER_STATE, True),
    ]  # fmt: skip
    matmul = graph.ops[0]
    assert (matmul.kind, matmul.flops, matmul.precision) == ("matmul", 2 * 5 * 4 * 3, "fp32")
    assert [op.kind for op in graph.ops][3:] == ["matmul_backward", "sum_backward", "release", "update", "update"]


def test_a_captured_graph_is_the_same_every_time_and_survives_a_file():
    batch = {"ids": tokens(), "labels": tokens()}
    first = capture(Transformer(), batch)
    assert first == capture(Transformer(), batch)
    check_graph(first)
    assert serial.loads(serial.dumps(first), Graph) == first


def test_what_the_model_is_built_on_does_not_matter():
    batch = {"ids": tokens(), "labels": tokens()}
    real = capture(Transformer(), batch)
    with on_fake_tensors():
        fake_model, fake_batch = Transformer(), {"ids": torch.zeros(4, 16, dtype=torch.int64), "labels": torch.zeros(4, 16, dtype=torch.int64)}
    with torch.device("meta"):
        meta_model = Transformer()
    assert capture(fake_model, fake_batch) == real
    assert capture(meta_model, batch) == real


def test_a_gpu_being_there_does_not_matter(monkeypatch):
    batch = {"ids": tokens(), "labels": tokens()}
    without = capture(Transformer(), batch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert capture(Transformer(), batch) == without


def test_the_model_is_left_as_it_was():
    class Counting(OneLinear):
        def forward(self, x):
            self.seen = x
            return super().forward(x)

    model = Counting()
    before = model.linear.weight.clone()
    capture(model, {"x": torch.ones(5, 4)})
    assert not hasattr(model, "seen")
    assert model.linear.weight.grad is None
    assert torch.equal(model.linear.weight, before)


def test_an_in_place_op_hands_its_bytes_on():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return F.relu(self.linear(x), inplace=True).sum()

    graph = capture(InPlace(), (torch.ones(5, 4),))
    relu = named(graph, "relu")
    assert [storage_names(graph, pair) for pair in relu.in_place] == [["linear.addmm", "relu"]]
    assert storage_names(graph, named(graph, "relu.backward").reads)[1] == "relu"  # backward reads the result


def test_tied_weights_are_one_storage_with_one_gradient_and_one_update():
    graph = capture(Transformer(), {"ids": tokens(), "labels": tokens()})
    assert [found.name for found in graph.storages if found.nbytes == 97 * 32 * 4 and found.role is Role.PARAM] == ["embedding.weight"]
    assert sum(op.name == "embedding.weight.update" for op in graph.ops) == 1
    # The head's part is there first; the embedding's is added to it in place.
    grads = [found for found in graph.storages if found.role is Role.GRAD and found.nbytes == 97 * 32 * 4]
    total = next(op for op in graph.ops if storage(graph, "embedding.weight.grad").id in op.writes)
    assert total.kind == "add_backward"
    assert {graph.storages[old].name for old, _ in total.in_place} <= {found.name for found in grads}


def test_batch_norm_marks_the_buffers_it_overwrites():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    graph = capture(model, [torch.ones(2, 3, 6, 6)], loss=lambda out: out.sum())
    norm, running = named(graph, "1.batch_norm"), named(graph, "1.batch_norm.running")
    assert storage_names(graph, running.mutates) == ["1.running_mean", "1.running_var"]
    assert running.reads == norm.writes[1:]
    assert norm.mutates == ()  # so it can be computed again
    assert storage_names(graph, named(graph, "1.add").mutates) == ["1.num_batches_tracked"]
    assert [graph.storages[number].nbytes for number in norm.writes] == [2 * 8 * 4 * 4 * 4, 8 * 4, 8 * 4]
    assert named(graph, "0.convolution").kind == "conv2d"
    assert named(graph, "0.convolution.backward").kind == "conv2d_backward"


def test_what_python_holds_longer_is_released_where_it_lets_go():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            y = x + 1  # nobody saves it, and no op after the next reads it, but the name keeps it
            z = y + 1
            return self.linear(z).sum()

    graph = capture(Holding(), (torch.ones(5, 4),))
    names = [op.name for op in graph.ops]
    assert names[:5] == ["add", "add.2", "linear.mm", "sum", "release add"]
    assert named(graph, "release add").kind == "release"


@pytest.mark.parametrize("hold_output", [True, False])
def test_the_output_is_held_until_backward_is_done_if_the_loop_holds_it(hold_output):
    graph = capture(Transformer(), {"ids": tokens(), "labels": tokens()}, hold_output=hold_output)
    last_use = graph.ops[graph.uses[storage(graph, "head.mm").id][-1]]
    assert last_use.kind == "release"
    assert last_use.phase is (Phase.BACKWARD if hold_output else Phase.FORWARD)


def test_a_parameter_without_gradient_is_noted_and_frozen_ones_are_not():
    class Unused(OneLinear):
        def __init__(self):
            super().__init__()
            self.spare, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

    captured = capture_step(Unused(), {"x": torch.ones(5, 4)})
    assert captured.notes == ("spare.weight and 1 more got no gradient: no update and no optimizer state is counted, as torch does",)
    assert {found.name for found in captured.graph.storages if found.role is Role.OPTIMIZER_STATE} == {
        f"linear.{part}.{state}" for part in ("weight", "bias") for state in ("exp_avg", "exp_avg_sq")
    }


def test_a_model_in_eval_mode_is_noted():
    (note,) = capture_step(OneLinear().eval(), {"x": torch.ones(5, 4)}).notes
    assert note.startswith("the model is in eval mode")


def test_code_that_says_cuda_means_the_device_of_the_step():
    class SaysCuda(OneLinear):
        def forward(self, x):
            y = self.linear(x.to("cuda")) + torch.arange(3, device="cuda:0")
            return (y * torch.ones(3, device=torch.device("cuda"))).cuda().sum()

    assert [op.kind for op in capture(SaysCuda(), {"x": torch.ones(5, 4)}).ops][:5] == ["matmul", "arange", "add", "ones", "mul"]


def test_values_that_follow_from_the_batch_may_decide():
    class Deciding(OneLinear):
        def forward(self, x, mask):
            y = self.linear(x)
            if not mask.all():
                y = y[mask]
            return y.sum() / mask.sum().item()

    full = capture(Deciding(), {"x": torch.ones(5, 4), "mask": torch.ones(5, dtype=torch.bool)})
    part = capture(Deciding(), {"x": torch.ones(5, 4), "mask": torch.tensor([True, True, False, False, True])})
    assert "index" not in [op.kind for op in full.ops]
    assert storage(part, "index").nbytes == 3 * 3 * 4


def test_a_random_number_for_skipping_layers_is_taken_to_be_one_half():
    class Skipping(OneLinear):
        def forward(self, x):
            return super().forward(x) if torch.rand([]) > 0.1 else x.sum()

    captured = capture_step(Skipping(), {"x": torch.ones(5, 4)})
    assert captured.notes == ("a random number drawn with torch.rand([]), which models do to skip a layer now and then, was taken to be 0.5",)
    assert "linear.addmm" in [op.name for op in captured.graph.ops]
