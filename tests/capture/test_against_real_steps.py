"""The captured step against a real one on the CPU, byte for byte: what autograd saves, and the peak."""

import pytest
import torch
import torch.nn.functional as F
from capture import real
from capture.models import ConvNet, OneLinear, Transformer, kept_peak_bytes, saved_bytes, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierwise.capture import capture


def real_step(model, batch):
    def step():
        out = model(**batch)
        loss = out["loss"] if isinstance(out, dict) else out
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


class Shared(nn.Module):
    """One activation with three users, whose gradients autograd adds up; one of them an expanded view, one a row picked by index."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, rows):
        h = self.first(x)
        y = self.second(h) + h
        return (y + h[rows].sum(0) + h.mean(0, keepdim=True)).square().mean()


class Picking(nn.Module):
    """Ops whose backward formulas write into a tensor of zeros."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, rows, columns):
        h = self.linear(x)
        picked = h.index_select(0, rows).mean() + h.gather(1, columns).mean() + h[rows, :4].mean()
        return picked + F.binary_cross_entropy_with_logits(h, torch.ones_like(h))


class ManyViews(nn.Module):
    """Slices, transposes, an expand, a concatenation, a sum of squares in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x):
        a, b, c = self.linear(x).chunk(3, dim=-1)
        mixed = torch.cat([a.transpose(0, 1), b.transpose(0, 1)], dim=0) + c.mean(0).unsqueeze(1)[:, :8].repeat(2, 1)
        mixed = mixed.square_() if not mixed.requires_grad else mixed.tanh_()
        return mixed[2:, ::2].sum()


class Functions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.exp()


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Functions.apply(self.linear(x)).mean()


class Frozen(nn.Module):
    """A frozen layer between trained ones saves its weight only; one before them saves nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        self.layers[0].requires_grad_(False)
        self.layers[4].requires_grad_(False)

    def forward(self, x):
        return self.layers(x).sum()


def images():
    generator = torch.Generator().manual_seed(0)
    return {"images": torch.randn(4, 3, 16, 16, generator=generator), "labels": torch.randint(0, 10, (4,), generator=generator)}


CASES = {
    "one linear": lambda: (OneLinear(), {"x": torch.ones(5, 4)}),
    "transformer with tied weights": lambda: (Transformer(), {"ids": tokens(), "labels": tokens()}),
    "transformer with dropout": lambda: (Transformer(dropout=0.1), {"ids": tokens(), "labels": tokens()}),
    "conv net with batch norm": lambda: (ConvNet(), images()),
    "shared activation": lambda: (Shared(), {"x": torch.ones(8, 16), "rows": torch.tensor([0, 3, 3])}),
    "picking": lambda: (Picking(), {"x": torch.ones(32, 64), "rows": torch.tensor([1, 2]), "columns": torch.zeros(32, 3, dtype=torch.int64)}),
    "many views": lambda: (ManyViews(), {"x": torch.ones(8, 16)}),
    "custom function": lambda: (WithFunction(), {"x": torch.ones(4, 8)}),
    "frozen layers": lambda: (Frozen(), {"x": torch.ones(64, 8)}),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_storages_and_peak_are_those_of_a_real_step(case, monkeypatch):
    model, batch = CASES[case]()
    graph = capture(model, batch, optimizer="sgd")
    # On CUDA dropout is one op with a mask of one byte an element; the same op exists on the CPU, though eager code does not choose it there.
    monkeypatch.setattr(F, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0] if p else x)
    assert saved_bytes(graph) == real.saved_bytes(model, batch)
    assert kept_peak_bytes(graph) == real.peak_bytes(real_step(model, batch))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.inner = Transformer()

    def forward(self, ids, labels):
        x = self.inner.embedding(ids)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return F.cross_entropy(self.inner.head(self.inner.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_checkpoints_its_blocks_has_the_peak_of_a_real_step(use_reentrant):
    model, batch = Checkpointed(use_reentrant), {"ids": tokens(), "labels": tokens()}
    graph = capture(model, batch, optimizer="sgd")
    assert kept_peak_bytes(graph) == real.peak_bytes(real_step(model, batch))
    assert kept_peak_bytes(graph) < kept_peak_bytes(capture(Transformer(), batch, optimizer="sgd"))


def test_gradients_that_add_up_over_steps():
    model, batch = Transformer(blocks=1), {"ids": tokens(), "labels": tokens()}

    def step():
        model(**batch)["loss"].backward()

    step()  # now every parameter has a gradient
    graph = capture(model, batch, optimizer="sgd", accumulation=True, hold_output=False)
    assert kept_peak_bytes(graph) == real.peak_bytes(step)
