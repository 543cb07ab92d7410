"""VGG (Simonyan & Zisserman 2015): stages of 3×3 convolutions, and most of the parameters in two fully connected layers."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, image_batch, init_convolutions


class ConvReLU(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x), inplace=True)


class VGG(nn.Module):
    def __init__(
        self,
        *,
        image: int,
        stages: tuple[tuple[int, ...], ...],
        fully_connected: int = 4096,
        pooled: int = 7,
        classes: int = 1000,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.image, self.pooled = image, pooled
        self.stages = nn.ModuleList()
        inputs = 3
        for widths in stages:
            self.stages.append(nn.Sequential(*(ConvReLU(before, after) for before, after in pairwise((inputs, *widths)))))
            inputs = widths[-1]
        self.first = nn.Linear(inputs * pooled * pooled, fully_connected)
        self.second = nn.Linear(fully_connected, fully_connected)
        self.head = nn.Linear(fully_connected, classes)
        self.dropout = nn.Dropout(dropout)
        init_convolutions(self)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = pixels
        for stage in self.stages:
            x = F.max_pool2d(stage(x), 2)
        x = F.adaptive_avg_pool2d(x, self.pooled).flatten(1)
        x = self.dropout(F.relu(self.first(x), inplace=True))
        x = self.dropout(F.relu(self.second(x), inplace=True))
        logits = self.head(x)
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int) -> dict[str, Tensor]:
        return image_batch(samples, self.image, self.head.out_features)
