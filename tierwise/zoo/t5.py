"""T5 (Raffel et al. 2020, version 1.0): encoder and decoder, relative positions as a learned bias on attention, one embedding for everything."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, join_heads, split_heads

TARGETS_PER_INPUT = 114 / 512  # tokens of the targets per token of the inputs in pre-training: section 3.1.4 of the paper
FAR_TOKENS = 128  # positions further apart than this share one bucket


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return layer


class RelativeBias(nn.Module):
    """One number per head and bucket of distances; half of the buckets are exact, the others grow with the logarithm of the distance."""

    def __init__(self, heads: int, hidden: int, *, both_ways: bool, buckets: int = 32) -> None:
        super().__init__()
        self.both_ways, self.buckets = both_ways, buckets
        self.embedding = nn.Embedding(buckets, heads)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)

    def forward(self, tokens: int) -> Tensor:
        place = torch.arange(tokens, device=self.embedding.weight.device)
        distance = place[:, None] - place[None, :]  # of a query from its key; negative: the key comes later
        buckets, offset = self.buckets, torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            offset = (distance < 0) * buckets
            distance = distance.abs()
        distance = distance.clamp(min=0)
        exact = buckets // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(FAR_TOKENS / exact) * (buckets - exact)
        far = (exact + growth.long()).clamp(max=buckets - 1)
        bias = self.embedding(offset + torch.where(distance < exact, distance, far)).permute(2, 0, 1)
        if self.both_ways:
            return bias
        return bias.masked_fill(place[:, None] < place[None, :], float("-inf"))


class Attention(nn.Module):
    """No biases and no scaling by the width: the initialisation takes its place."""

    def __init__(self, hidden: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        inner = heads * head_width
        self.query = _linear(hidden, inner, (hidden * head_width) ** -0.5)
        self.key = _linear(hidden, inner, hidden**-0.5)
        self.value = _linear(hidden, inner, hidden**-0.5)
        self.out = _linear(inner, hidden, inner**-0.5)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in (self.query(x), self.key(source), self.value(source)))
        dropout = self.dropout if self.training else 0.0
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)))


class FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int, dropout: float) -> None:
        super().__init__()
        self.up = _linear(hidden, intermediate, hidden**-0.5)
        self.down = _linear(intermediate, hidden, intermediate**-0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.relu(self.up(x))))


class EncoderBlock(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = Attention(hidden, heads, head_width, dropout)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.feed_forward = FeedForward(hidden, intermediate, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderBlock(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = Attention(hidden, heads, head_width, dropout)
        self.cross_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.cross_attention = Attention(hidden, heads, head_width, dropout)
        self.feed_forward_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.feed_forward = FeedForward(hidden, intermediate, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: Tensor, bias: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        x = x + self.dropout(self.cross_attention(self.cross_norm(x), encoded))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class T5(nn.Module):
    is_encoder_decoder = True

    def __init__(self, *, vocab: int, layers: int, hidden: int, intermediate: int, heads: int, head_width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        block = (hidden, intermediate, heads, head_width, dropout)
        self.embedding = nn.Embedding(vocab, hidden)
        nn.init.normal_(self.embedding.weight, std=1.0)
        self.dropout = nn.Dropout(dropout)
        self.encoder_bias = RelativeBias(heads, hidden, both_ways=True)
        self.encoder_blocks = nn.ModuleList(EncoderBlock(*block) for _ in range(layers))
        self.encoder_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.decoder_bias = RelativeBias(heads, hidden, both_ways=False)
        self.decoder_blocks = nn.ModuleList(DecoderBlock(*block) for _ in range(layers))
        self.decoder_norm = nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        encoded = self.dropout(self.embedding(input_ids))
        bias = self.encoder_bias(input_ids.shape[1])
        for block in self.encoder_blocks:
            encoded = block(encoded, bias)
        encoded = self.dropout(self.encoder_norm(encoded))

        x = self.dropout(self.embedding(F.pad(labels[:, :-1], (1, 0))))  # shifted right; 0 starts every target
        bias = self.decoder_bias(labels.shape[1])
        for block in self.decoder_blocks:
            x = block(x, encoded, bias)
        x = self.dropout(self.decoder_norm(x))
        logits = F.linear(x * x.shape[-1] ** -0.5, self.embedding.weight)
        return self.loss(logits, labels)

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        vocab, targets = self.embedding.num_embeddings, max(1, round(tokens * TARGETS_PER_INPUT))
        return {"input_ids": torch.randint(vocab, (samples, tokens)), "labels": torch.randint(vocab, (samples, targets))}
