"""U-Net for 2-D medical images (Ronneberger et al. 2015): down, across, up again; every pixel gets a class.

As it is trained today: the convolutions keep the image's size (the paper cropped) and are followed by BatchNorm.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, init_convolutions


class Level(nn.Module):
    """Two 3×3 convolutions, each with BatchNorm and a rectifier."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(x)), inplace=True)


class UNet(nn.Module):
    def __init__(self, *, image: int, width: int = 64, depth: int = 4, channels: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.image, self.channels, self.classes = image, channels, classes
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(Level(before, after) for before, after in pairwise([channels, *widths]))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in reversed(widths[:-1]))
        self.up = nn.ModuleList(Level(2 * wide, wide) for wide in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)
        init_convolutions(self)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = pixels
        across: list[Tensor] = []
        for level in self.down:
            if across:
                x = F.max_pool2d(x, 2)
            x = level(x)
            across.append(x)
        for enlarge, level, beside in zip(self.enlarge, self.up, reversed(across[:-1]), strict=True):
            x = level(torch.cat((beside, enlarge(x)), dim=1))
        logits = self.head(x).permute(0, 2, 3, 1)
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int) -> dict[str, Tensor]:
        return {
            "pixels": torch.randn(samples, self.channels, self.image, self.image),
            "labels": torch.randint(self.classes, (samples, self.image, self.image)),
        }
