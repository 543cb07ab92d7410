"""What cannot be captured is refused in one sentence that names the place."""

import threading
from pathlib import Path

import pytest
import torch
from capture.models import OneLinear
from torch import nn

from tierwise.capture import capture
from tierwise.errors import CaptureError, UnknownName

HERE = __file__
X = {"x": torch.ones(5, 4)}


def refusal(model, batch=X, **options):
    with pytest.raises(CaptureError) as caught:
        capture(model, batch, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_of(text):
    lines = Path(HERE).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


class AsksValue(OneLinear):
    def forward(self, x):
        y = self.linear(x)
        return y.sum() if y.max() > 0 else y.mean()  # asks a value


class PicksByValue(OneLinear):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()  # picks by value


def test_control_flow_on_an_activation():
    said = refusal(AsksValue())
    assert f"{HERE}:{line_of('# asks a value')}" in said
    assert "the forward looks at the values of a tensor" in said


def test_shapes_that_depend_on_an_activation():
    assert f"{HERE}:{line_of('# picks by value')}" in refusal(PicksByValue())


def test_a_batch_of_the_wrong_shape():
    said = refusal(OneLinear(), {"x": torch.ones(5, 7)})
    assert "the batch is x: float32[5, 7]" in said
    assert "check that its names, shapes and types are what the model takes" in said


def test_a_batch_with_a_wrong_name():
    assert "unexpected keyword argument 'y'" in refusal(OneLinear(), {"y": torch.ones(5, 4)})


def test_a_model_without_loss():
    said = refusal(nn.Linear(4, 3), torch.ones(5, 4))
    assert said.startswith("the model returned a tensor of shape (5, 3) and no loss")
    assert refusal(nn.Linear(4, 3), torch.ones(5, 4), loss=lambda out: out).startswith("loss= returned a tensor of shape (5, 3)")


def test_a_model_with_nothing_to_train():
    assert refusal(OneLinear().requires_grad_(False)).startswith("the loss depends on no parameter that requires a gradient")


def test_a_model_that_cannot_be_copied():
    model = OneLinear()
    model.lock = threading.Lock()
    assert refusal(model).startswith("OneLinear cannot be copied: TypeError: cannot pickle '_thread.lock' object")


def test_sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4, sparse=True)

        def forward(self, ids):
            return self.embedding(ids).sum()

    assert "sparse=False" in refusal(Sparse(), {"ids": torch.tensor([1, 2])})


def test_an_error_in_the_models_own_backward():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no backward today")  # breaks

    class Model(OneLinear):
        def forward(self, x):
            return Broken.apply(self.linear(x)).sum()

    said = refusal(Model())
    assert f"the backward of this model on this batch fails at {HERE}:{line_of('# breaks')} with ValueError: no backward today" in said


def test_an_op_without_a_shape_rule():
    @torch.library.custom_op("tierwise_test::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    class Model(OneLinear):
        def forward(self, x):
            return unknown(x).sum() + self.linear(x).sum()

    assert "register_fake" in refusal(Model())


def test_an_unknown_view():
    with pytest.raises(UnknownName, match="did you mean 'eager'"):
        capture(OneLinear(), X, view="eagr")
