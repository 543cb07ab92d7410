"""An LSTM language model (Zaremba et al. 2014): dropout between layers, never along time.

The loop over time is written out instead of nn.LSTM, which is one opaque call with a private reserve on a GPU and another on a CPU: written
out, every step's activations are storages that a plan can keep, move or recompute, the same on both. The input's projection is one matrix
product for all steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parts import MeanCrossEntropy, next_token_batch

INIT_SPAN = 0.05  # section 4.1 of the paper


class Layer(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.from_input = nn.Linear(hidden, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, hidden) -> the same"""
        outputs = []
        state = memory = x.new_zeros(x.shape[0], x.shape[2])
        for projected in self.from_input(self.dropout(x)).unbind(1):
            keep, write, show, value = (projected + self.from_state(state)).chunk(4, dim=-1)
            memory = torch.sigmoid(keep) * memory + torch.sigmoid(write) * torch.tanh(value)
            state = torch.sigmoid(show) * torch.tanh(memory)
            outputs.append(state)
        return torch.stack(outputs, dim=1)


class LSTM(nn.Module):
    def __init__(self, *, vocab: int, layers: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab)
        for weight in self.parameters():
            nn.init.uniform_(weight, -INIT_SPAN, INIT_SPAN)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.dropout(x))
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        return next_token_batch(samples, tokens, self.embedding.num_embeddings)
