"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each half, output tied to the embedding.

No dropout by default, as it is pre-trained today; the paper's is 0.1, on embeddings, attention and what each half adds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import FeedForward, MeanCrossEntropy, SelfAttention, init_normal, next_token_batch


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, heads, causal=True, dropout=dropout)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, 4 * hidden, approximate="tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT2(nn.Module):
    def __init__(self, *, vocab: int, positions: int, layers: int, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.token_embedding = nn.Embedding(vocab, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        init_normal(self)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        return next_token_batch(samples, tokens, self.token_embedding.num_embeddings)
