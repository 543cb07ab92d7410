"""Mixtral (Jiang et al. 2024): Llama's attention, and a mixture of experts of which each token visits two.

Which tokens go to which expert is data, so a graph captured without data needs a form whose shapes are not. Here each expert has a fixed
number of seats, its fair share: tokens × 2 / experts; tokens beyond it skip the expert (Lepikhin et al. 2020, Fedus et al. 2022). The bytes
and the flops are those of the published model, which drops no token: there too the experts' tokens sum to twice the tokens, whatever the
routing. The other static form, all experts on all tokens with mostly zero weights, would cost four times as much.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import Attention, rotary_tables
from .parts import MeanCrossEntropy, init_normal, next_token_batch


class Experts(nn.Module):
    """SwiGLU experts with stacked weights, the router, and the loss that keeps the experts equally busy."""

    def __init__(self, hidden: int, intermediate: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.up = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        seats = -(-tokens.shape[0] * self.chosen // self.experts)

        chance = self.router(tokens).float().softmax(-1)
        weight, expert = chance.topk(self.chosen, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        visits = F.one_hot(expert.flatten(), self.experts)  # (tokens * chosen, experts), token after token
        place = ((visits.cumsum(0) - 1) * visits).sum(-1)
        spare = self.experts * seats  # the seat of those who find no place: it belongs to no expert
        seat = torch.where(place < seats, expert.flatten() * seats + place, spare)

        visitor = torch.arange(seat.shape[0], device=x.device) // self.chosen
        seated = seat.new_zeros(spare + 1).scatter(0, seat, visitor)[:-1]  # an empty seat works on token 0, and nobody collects the result
        worked = self._work(tokens.index_select(0, seated).unflatten(0, (self.experts, seats)))
        collected = F.pad(worked.flatten(0, 1), (0, 0, 0, 1)).index_select(0, seat).unflatten(0, (-1, self.chosen))
        mixed = (collected * weight.to(x.dtype).unsqueeze(-1)).sum(1)

        share = visits.float().mean(0) * self.chosen
        balance = self.experts * (share * chance.mean(0)).sum()
        return mixed.view_as(x), balance

    def _work(self, seated: Tensor) -> Tensor:
        """(experts, seats, hidden) -> the same"""
        return torch.bmm(F.silu(torch.bmm(seated, self.gate)) * torch.bmm(seated, self.up), self.down)


class Block(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = Attention(hidden, heads, kv_heads)
        self.experts_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.experts = Experts(hidden, intermediate, experts, chosen)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        mixed, balance = self.experts(self.experts_norm(x))
        return x + mixed, balance


class Mixtral(nn.Module):
    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        experts: int = 8,
        chosen: int = 2,
        balance_weight: float = 0.001,
        rotary_base: float = 1_000_000.0,
    ) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.head_width, self.rotary_base, self.balance_weight = hidden // heads, rotary_base, balance_weight
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, intermediate, heads, kv_heads, experts, chosen) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab, bias=False)
        init_normal(self)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        cos, sin = rotary_tables(input_ids.shape[1], self.head_width, self.rotary_base, like=x)
        balances = []
        for block in self.blocks:
            x, balance = block(x, cos, sin)
            balances.append(balance)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return self.loss(logits, labels) + self.balance_weight * torch.stack(balances).mean()

    def example(self, samples: int, tokens: int) -> dict[str, Tensor]:
        return next_token_batch(samples, tokens, self.embedding.num_embeddings)
