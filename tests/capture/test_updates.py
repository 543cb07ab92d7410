"""What an optimizer keeps for each parameter, byte by byte, against torch's own."""

import pytest
import torch
from capture.models import OneLinear, Transformer, named, storage, storage_names, tokens
from torch import nn

from tierwise.capture import capture
from tierwise.errors import BadInput, UnknownName
from tierwise.ir import Role


class Matrix(nn.Module):
    """One matrix of 64 by 128: 8192 elements; and a vector of 64."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(128, 64, dtype=dtype)

    def forward(self, x):
        return self.linear(x).sum()


def states(graph):
    return {found.name.removeprefix("linear."): found.nbytes for found in graph.storages if found.role is Role.OPTIMIZER_STATE}


def matrix(dtype=torch.float32, **options):
    return capture(Matrix(dtype), (torch.ones(4, 128, dtype=dtype),), **options)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sgd", {}),
        ("sgd-momentum", {"weight.momentum_buffer": 32768, "bias.momentum_buffer": 256}),
        ("adam", {"weight.exp_avg": 32768, "weight.exp_avg_sq": 32768, "bias.exp_avg": 256, "bias.exp_avg_sq": 256}),
        ("adafactor", {"weight.row_var": 64 * 4, "weight.col_var": 128 * 4, "bias.variance": 64 * 4}),
        # one byte an element, one fp32 scale per 256; the vector is too small and stays in fp32
        (
            "adamw8bit",
            {"weight.state1": 8192, "weight.state2": 8192, "weight.absmax1": 128, "weight.absmax2": 128, "bias.state1": 256, "bias.state2": 256},
        ),
    ],
)
def test_state_by_name(optimizer, expected):
    assert states(matrix(optimizer=optimizer)) == expected


def test_state_is_of_the_parameters_type_and_masters_are_fp32():
    assert states(matrix(torch.bfloat16, optimizer="adamw"))["weight.exp_avg"] == 16384
    graph = matrix(torch.bfloat16, optimizer="adamw", masters="fp32")
    assert states(graph) == {
        f"{part}.{name}": 4 * elements for part, elements in (("weight", 8192), ("bias", 64)) for name in ("master", "exp_avg", "exp_avg_sq")
    }
    update = named(graph, "linear.weight.update")
    assert storage_names(graph, update.mutates) == ["linear.weight", "linear.weight.master", "linear.weight.exp_avg", "linear.weight.exp_avg_sq"]
    assert update.precision == "fp32"
    assert states(matrix(optimizer="adamw", masters="fp32")) == states(matrix(optimizer="adamw"))  # an fp32 parameter is its own master


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters),
        torch.optim.Adafactor,
        lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),  # asked by running a step of it
        torch.optim.Adagrad,
    ],
)
def test_state_of_an_optimizer_is_what_it_keeps_after_a_real_step(make):
    model = Matrix()
    optimizer = make(model.parameters())
    captured = states(capture(model, (torch.ones(4, 128),), optimizer=optimizer))
    model(torch.ones(4, 128)).backward()
    optimizer.step()
    kept = [value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    assert sorted(captured.values()) == sorted(kept)


def test_only_parameters_that_the_optimizer_holds_are_updated():
    model = Matrix()
    graph = capture(model, (torch.ones(4, 128),), optimizer=torch.optim.AdamW([model.linear.bias]))
    assert [op.name for op in graph.ops if op.kind == "update"] == ["linear.bias.update"]


def test_accumulated_gradients_last_and_are_added_to():
    graph = capture(OneLinear(), {"x": torch.ones(5, 4)}, optimizer="sgd", accumulation=True)
    grad = storage(graph, "linear.weight.grad")
    assert (grad.role, grad.lasting) == (Role.GRAD, True)
    assert storage_names(graph, named(graph, "linear.weight.grad.add").mutates) == ["linear.weight.grad"]
    assert storage_names(graph, named(graph, "linear.weight.update").reads) == ["linear.weight.grad"]


def test_accumulation_leaves_out_parameters_that_get_no_gradient():
    class Unused(OneLinear):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(4, 4)

    graph = capture(Unused(), {"x": torch.ones(5, 4)}, accumulation=True)
    assert {found.name for found in graph.storages if found.role is Role.GRAD} == {"linear.weight.grad", "linear.bias.grad"}


def test_bf16_parameters_have_bf16_gradients():
    graph = capture(Transformer().to(torch.bfloat16), {"ids": tokens(), "labels": tokens()}, masters="fp32")
    assert storage(graph, "embedding.weight.grad").nbytes == 97 * 32 * 2


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'adamw'"):
        matrix(optimizer="admw")
    with pytest.raises(BadInput, match="masters='fp16'"):
        matrix(masters="fp16")
    with pytest.raises(BadInput, match="holds none of the model's parameters"):
        matrix(optimizer=torch.optim.SGD(Matrix().parameters()))
    with pytest.raises(BadInput, match="optimizer is a int"):
        matrix(optimizer=3)
