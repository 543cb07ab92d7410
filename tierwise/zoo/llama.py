"""Llama (Touvron et al. 2023) and, with biases on the projections and tied embeddings, Qwen2: RMSNorm, rotary positions, SwiGLU, grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, init_normal, join_heads, next_token_batch, split_heads


def rotary_tables(tokens: int, head_width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position × frequency, (tokens, head_width) each, in the dtype of `like`.

    Computed in every step, in fp32, rather than kept as buffers: a model cast to 16 bits would round the frequencies.
    """
    frequencies = base ** (-torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32) / head_width)
    angles = torch.arange(tokens, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        width = hidden // heads
        self.query = nn.Linear(hidden, heads * width, bias=bias)
        self.key = nn.Linear(hidden, kv_heads * width, bias=bias)
        self.value = nn.Linear(hidden, kv_heads * width, bias=bias)
        self.out = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(split_heads(self.query(x), self.heads), cos, sin)
        k = rotate(split_heads(self.key(x), self.kv_heads), cos, sin)
        v = split_heads(self.value(x), self.kv_heads)
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, *, qkv_bias: bool, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=norm_eps)
        self.attention = Attention(hidden, heads, kv_heads, bias=qkv_bias)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=norm_eps)
        self.feed_forward = SwiGLU(hidden, intermediate)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int | None = None,
        qkv_bias: bool = False,
        tied: bool = False,
        rotary_base: float = 10_000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.head_width, self.rotary_base = hidden // heads, rotary_base
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, intermediate, heads, kv_heads or heads, qkv_bias=qkv_bias, norm_eps=norm_eps) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=norm_eps)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        init_normal(self)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(input_ids.shape[1], self.head_width, self.rotary_base, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        return next_token_batch(samples, tokens, self.embedding.num_embeddings)
