"""ResNet with bottlenecks (He et al. 2016), the stride in the 3×3 convolution as everyone trains it ("v1.5")."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, image_batch, init_convolutions

EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.middle_norm = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.reduce_norm(self.reduce(x)), inplace=True)
        y = F.relu(self.middle_norm(self.middle(y)), inplace=True)
        return F.relu(self.expand_norm(self.expand(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, *, image: int, blocks: tuple[int, ...], width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.image = image
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        inputs = width
        for stage, count in enumerate(blocks):
            for index in range(count):
                self.blocks.append(Bottleneck(inputs, width << stage, stride=2 if stage and not index else 1))
                inputs = EXPANSION * (width << stage)
        self.head = nn.Linear(inputs, classes)
        init_convolutions(self)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = F.relu(self.stem_norm(self.stem(pixels)), inplace=True)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int) -> dict[str, Tensor]:
        return image_batch(samples, self.image, self.head.out_features)
