"""BERT (Devlin et al. 2019) in pre-training: LayerNorm after each half, dropout, masked words and next sentence.

As in the authors' code, only the masked positions (15 % of each text) go through the vocabulary, and they come as indices with the batch.
Texts are full, so there is no padding mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import FeedForward, MeanCrossEntropy, SelfAttention, init_normal

MASKED_SHARE = 0.15


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, causal=False, dropout=dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.feed_forward = FeedForward(hidden, 4 * hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Bert(nn.Module):
    def __init__(self, *, vocab: int, positions: int, layers: int, hidden: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.word_embedding = nn.Embedding(vocab, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.segment_embedding = nn.Embedding(2, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.next_sentence = nn.Linear(hidden, 2)
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.vocab_bias = nn.Parameter(torch.zeros(vocab))
        init_normal(self)

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor,
        masked_positions: Tensor,
        masked_labels: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embedding(input_ids) + self.position_embedding(positions) + self.segment_embedding(segment_ids)
        x = self.dropout(self.embedding_norm(x))
        for block in self.blocks:
            x = block(x)
        masked = x.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        masked = self.transform_norm(F.gelu(self.transform(masked)))
        words = F.linear(masked, self.word_embedding.weight, self.vocab_bias)
        if masked_labels is None or next_sentence_labels is None:
            return words
        follows = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        return self.loss(words, masked_labels) + self.loss(follows, next_sentence_labels)

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        vocab, masked = self.word_embedding.num_embeddings, max(1, round(MASKED_SHARE * tokens))
        return {
            "input_ids": torch.randint(vocab, (samples, tokens)),
            "segment_ids": torch.randint(2, (samples, tokens)),
            "masked_positions": torch.randint(tokens, (samples, masked)),
            "masked_labels": torch.randint(vocab, (samples, masked)),
            "next_sentence_labels": torch.randint(2, (samples,)),
        }
