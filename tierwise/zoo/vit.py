"""ViT (Dosovitskiy et al. 2021): an image as a text of patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .parts import FeedForward, MeanCrossEntropy, SelfAttention, image_batch, init_normal


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-6)
        self.attention = SelfAttention(hidden, heads, causal=False)
        self.feed_forward_norm = nn.LayerNorm(hidden, eps=1e-6)
        self.feed_forward = FeedForward(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class ViT(nn.Module):
    def __init__(self, *, image: int, patch: int, layers: int, hidden: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.image = image
        self.patches = nn.Conv2d(3, hidden, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.position_embedding = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, classes)
        init_normal(self)
        nn.init.normal_(self.position_embedding, std=0.02)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, 0]))
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int) -> dict[str, Tensor]:
        return image_batch(samples, self.image, self.head.out_features)
