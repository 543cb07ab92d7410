"""Inception-v4 (Szegedy et al. 2017): branches of factored convolutions side by side, joined along the channels; the names are the paper's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import MeanCrossEntropy, image_batch, init_convolutions


class Conv(nn.Module):
    """Convolution, BatchNorm, rectifier. Sides of 3 and more keep the image's size unless `valid`."""

    def __init__(self, inputs: int, outputs: int, height: int, width: int, *, stride: int = 1, valid: bool = False) -> None:
        super().__init__()
        padding = (0, 0) if valid else (height // 2, width // 2)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class MaxPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, stride=2)


class AveragePool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class Fork(nn.Module):
    """Branches of one input, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class InceptionV4(nn.Module):
    def __init__(
        self, *, image: int, blocks: tuple[int, int, int] = (4, 7, 3), width: float = 1.0, classes: int = 1000, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.loss = MeanCrossEntropy()
        self.image = image

        def channels(published: int) -> int:
            return max(1, round(published * width))

        def path(inputs: int, *layers: tuple[int, int, int], last: nn.Module | None = None) -> nn.Sequential:
            """Convolutions of (outputs, height, width) one after the other; `last` follows them."""
            made: list[nn.Module] = []
            for outputs, rows, columns in layers:
                made.append(Conv(inputs, channels(outputs), rows, columns))
                inputs = channels(outputs)
            return nn.Sequential(*made, *([last] if last else []))

        def shrink(inputs: int, outputs: int, *, stride: int = 2) -> Conv:
            return Conv(channels(inputs), channels(outputs), 3, 3, stride=stride, valid=True)

        def inception_a(inputs: int) -> Fork:
            return Fork(
                path(inputs, (96, 1, 1)),
                path(inputs, (64, 1, 1), (96, 3, 3)),
                path(inputs, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
                nn.Sequential(AveragePool(), Conv(inputs, channels(96), 1, 1)),
            )

        def inception_b(inputs: int) -> Fork:
            return Fork(
                path(inputs, (384, 1, 1)),
                path(inputs, (192, 1, 1), (224, 1, 7), (256, 7, 1)),
                path(inputs, (192, 1, 1), (192, 7, 1), (224, 1, 7), (224, 7, 1), (256, 1, 7)),
                nn.Sequential(AveragePool(), Conv(inputs, channels(128), 1, 1)),
            )

        def cross(inputs: int) -> Fork:
            return Fork(Conv(channels(inputs), channels(256), 1, 3), Conv(channels(inputs), channels(256), 3, 1))

        def inception_c(inputs: int) -> Fork:
            return Fork(
                path(inputs, (256, 1, 1)),
                path(inputs, (384, 1, 1), last=cross(384)),
                path(inputs, (384, 1, 1), (448, 3, 1), (512, 1, 3), last=cross(512)),
                nn.Sequential(AveragePool(), Conv(inputs, channels(256), 1, 1)),
            )

        self.stem = nn.Sequential(
            Conv(3, channels(32), 3, 3, stride=2, valid=True),
            shrink(32, 32, stride=1),
            path(channels(32), (64, 3, 3)),
            Fork(MaxPool(), shrink(64, 96)),
        )
        at = channels(64) + channels(96)
        self.stem.append(
            Fork(
                path(at, (64, 1, 1), last=shrink(64, 96, stride=1)),
                path(at, (64, 1, 1), (64, 1, 7), (64, 7, 1), last=shrink(64, 96, stride=1)),
            )
        )
        at = 2 * channels(96)
        self.stem.append(Fork(Conv(at, channels(192), 3, 3, stride=2, valid=True), MaxPool()))
        at += channels(192)

        self.blocks_a = nn.ModuleList()
        for _ in range(blocks[0]):
            self.blocks_a.append(inception_a(at))
            at = 4 * channels(96)
        self.reduction_a = Fork(
            Conv(at, channels(384), 3, 3, stride=2, valid=True),
            path(at, (192, 1, 1), (224, 3, 3), last=shrink(224, 256)),
            MaxPool(),
        )
        at += channels(384) + channels(256)

        self.blocks_b = nn.ModuleList()
        for _ in range(blocks[1]):
            self.blocks_b.append(inception_b(at))
            at = channels(384) + 2 * channels(256) + channels(128)
        self.reduction_b = Fork(
            path(at, (192, 1, 1), last=shrink(192, 192)),
            path(at, (256, 1, 1), (256, 1, 7), (320, 7, 1), last=shrink(320, 320)),
            MaxPool(),
        )
        at += channels(192) + channels(320)

        self.blocks_c = nn.ModuleList()
        for _ in range(blocks[2]):
            self.blocks_c.append(inception_c(at))
            at = 6 * channels(256)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(at, classes)
        init_convolutions(self)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks_a:
            x = block(x)
        x = self.reduction_a(x)
        for block in self.blocks_b:
            x = block(x)
        x = self.reduction_b(x)
        for block in self.blocks_c:
            x = block(x)
        logits = self.head(self.dropout(x.mean((2, 3))))
        return logits if labels is None else self.loss(logits, labels)

    def example(self, samples: int) -> dict[str, Tensor]:
        return image_batch(samples, self.image, self.head.out_features)
