"""Real copies of a region on fake tensors: shapes, strides, sharing and flags are kept, and nothing is shared between two copies."""

from __future__ import annotations

import torch
from torch import nn

from tierwise.capture import RegionExample, on_fake_tensors
from tierwise.capture.materialise import materialise

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.empty(4), requires_grad=False)
        self.table = torch.empty(3, 4)  # neither parameter nor buffer

    def forward(self, tokens, mask):
        x = self.norm(self.embedding(tokens)) * self.frozen + self.table.sum(0)
        return self.head(torch.where(mask, x, 0.0))


def example() -> RegionExample:
    with on_fake_tensors():
        return RegionExample(Tied(), (torch.empty(64, dtype=torch.long),), {"mask": torch.empty(64, 1, dtype=torch.bool).expand(64, 4)})


def test_it_runs():
    real = materialise(example(), CPU)
    out = real.module(*real.args, **real.kwargs)
    out.sum().backward()
    assert out.shape == (64, 7) and torch.isfinite(out).all()
    assert real.module.embedding.weight.grad is not None and real.module.frozen.grad is None


def test_sharing_strides_and_flags_are_kept():
    real = materialise(example(), CPU)
    assert real.module.head.weight is real.module.embedding.weight
    assert not real.module.frozen.requires_grad
    assert type(real.module.table) is torch.Tensor and real.module.table.shape == (3, 4)
    assert real.kwargs["mask"].stride() == (1, 0) and real.kwargs["mask"].all()


def test_indices_are_those_of_the_embedding_and_variances_are_positive():
    real = materialise(example(), CPU)
    assert real.args[0].min() >= 0 and 3 < real.args[0].max() < 7  # of 64 draws from 7
    assert (real.module.norm.running_var > 0).all()


def test_two_copies_share_nothing():
    wanted = example()
    one, two = materialise(wanted, CPU), materialise(wanted, CPU)
    places = [{t.untyped_storage().data_ptr() for t in (*real.module.parameters(), *real.module.buffers(), *real.args)} for real in (one, two)]
    assert not places[0] & places[1]


def test_activations_that_want_gradients_are_leaves():
    with on_fake_tensors():
        wanted = RegionExample(nn.Linear(2, 2), (torch.empty(3, 2).requires_grad_(),), {})
    (x,) = materialise(wanted, CPU).args
    assert x.is_leaf and x.requires_grad
