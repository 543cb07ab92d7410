"""What more than one family uses: batches of random data, the losses, initialisation, the heads of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def next_token_batch(samples: int, tokens: int, vocab: int) -> dict[str, Tensor]:
    """Random text. labels[:, i] is what follows input_ids[:, i], shifted here and not in the model, so that no logits are sliced away."""
    input_ids = torch.randint(vocab, (samples, tokens))
    return {"input_ids": input_ids, "labels": input_ids.roll(-1, dims=1)}


def image_batch(samples: int, size: int, classes: int) -> dict[str, Tensor]:
    return {"pixels": torch.randn(samples, 3, size, size), "labels": torch.randint(classes, (samples,))}


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """In fp32, as everyone trains: the log of a sum over a vocabulary loses too much in 16 bits."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class MeanCrossEntropy(nn.Module):
    """The loss as a part of the model: the logits and their gradients are most of what its tail holds, so it is a region to be planned."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return mean_cross_entropy(logits, labels)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(samples, tokens, heads * width) -> (samples, heads, tokens, width)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def init_normal(module: nn.Module, *, std: float = 0.02) -> None:
    """GPT-2's initialisation, which BERT, ViT and Llama share up to details: normal weights, zero biases."""
    for child in module.modules():
        if isinstance(child, (nn.Linear, nn.Embedding)):
            nn.init.normal_(child.weight, std=std)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)


def init_convolutions(module: nn.Module) -> None:
    """He et al. 2015: keeps the variance through rectifiers."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")


class SelfAttention(nn.Module):
    """Multi-head attention with one joint projection and biases, as in GPT-2, BERT and ViT."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)))


class FeedForward(nn.Module):
    """Up, GELU, down."""

    def __init__(self, hidden: int, intermediate: int, *, approximate: str = "none") -> None:
        super().__init__()
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))
