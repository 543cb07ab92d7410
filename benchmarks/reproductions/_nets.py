"""Networks that published tables are about and the zoo does not have."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MegatronLayer(nn.Module):
    """A layer as Korthikanti et al. draw it: attention written out, with its dropout."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.projection(self._attention(self.attention_norm(x))), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), self.dropout)

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(hidden // self.heads)).masked_fill(later, -1e4)
        mixed = F.dropout(scores.softmax(-1), self.dropout) @ v
        return mixed.transpose(1, 2).reshape(batch, length, hidden)


class Layers(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MegatronLayer(hidden, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, width 1."""

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        self.stem, channels, blocks = _conv(3, 32, 3, 2), 32, []
        for expand, width, repeats, stride in self.STAGES:
            for place in range(repeats):
                blocks.append(Inverted(channels, width, expand, stride if place == 0 else 1))
                channels = width
        self.blocks, self.last, self.head = nn.ModuleList(blocks), _conv(channels, 1280, 1), nn.Linear(1280, 1000)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(F.dropout(self.last(x).mean((2, 3)), 0.2)), labels)


class Inverted(nn.Module):
    def __init__(self, channels: int, width: int, expand: int, stride: int) -> None:
        super().__init__()
        inner = channels * expand
        widen = [_conv(channels, inner, 1)] if expand != 1 else []
        self.inside = nn.Sequential(*widen, _conv(inner, inner, 3, stride, groups=inner), _conv(inner, width, 1, act=False))
        self.adds = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x) if self.adds else self.inside(x)


def _conv(channels: int, width: int, window: int, stride: int = 1, *, groups: int = 1, act: bool = True, clip: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(channels, width, window, stride, window // 2, groups=groups, bias=False), nn.BatchNorm2d(width)]
    if act:
        parts.append(nn.ReLU6(inplace=True) if clip else nn.ReLU(inplace=True))
    return nn.Sequential(*parts)


class GoogLeNet(nn.Module):
    """Szegedy et al. 2015, with batch norm and without the two side heads, which MONeT's table does not mention."""

    STAGES = (
        ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)),
        ((480, 192, 96, 208, 16, 48, 64), (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64), (512, 112, 144, 288, 32, 64, 64),
         (528, 256, 160, 320, 32, 128, 128)),
        ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), _relu(64, 64, 1), _relu(64, 192, 3), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList(nn.ModuleList(Inception(*shape) for shape in stage) for stage in self.STAGES)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(1024, 1000)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(pixels)
        for place, stage in enumerate(self.stages):
            x = self.pool(x) if place else x
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
        return F.cross_entropy(self.head(F.dropout(x.mean((2, 3)), 0.2)), labels)


class Inception(nn.Module):
    def __init__(self, channels: int, one: int, before_three: int, three: int, before_five: int, five: int, pooled: int) -> None:
        super().__init__()
        self.one = _relu(channels, one, 1)
        self.three = nn.Sequential(_relu(channels, before_three, 1), _relu(before_three, three, 3))
        self.five = nn.Sequential(_relu(channels, before_five, 1), _relu(before_five, five, 3))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _relu(channels, pooled, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.one(x), self.three(x), self.five(x), self.pooled(x)), 1)


def _relu(channels: int, width: int, window: int, stride: int = 1) -> nn.Sequential:
    return _conv(channels, width, window, stride, clip=False)


def _images(batch: int) -> dict[str, Tensor]:
    return {"pixels": torch.empty(batch, 3, 224, 224), "labels": torch.empty(batch, dtype=torch.int64)}


def mobilenet_v2(batch: int = 64) -> tuple[nn.Module, dict[str, Tensor]]:
    return MobileNetV2(), _images(batch)


def googlenet(batch: int = 64) -> tuple[nn.Module, dict[str, Tensor]]:
    return GoogLeNet(), _images(batch)


def unet(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """The zoo's, on MONeT's images of 416 by 608."""
    from tierwise.zoo.unet import UNet

    model = UNet(image=0)  # its example is not asked for
    return model, {"pixels": torch.empty(batch, 1, 416, 608), "labels": torch.zeros(batch, 416, 608, dtype=torch.int64)}


class Body(nn.Module):
    """A language model up to its last norm: what is in front of the vocabulary, with a loss that costs nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.blocks, self.norm = model.blocks, model.norm

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.token_embedding(input_ids) + self.position_embedding(torch.arange(input_ids.shape[1], device=input_ids.device))  # type: ignore[operator]
        for block in self.blocks:  # type: ignore[union-attr]
            x = block(x)
        return self.norm(x).float().mean()  # type: ignore[operator]


def gpt(layers: int, hidden: int, heads: int, batch: int, seq: int, *, body: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-3's shapes with the zoo's GPT-2."""
    from tierwise.zoo.gpt2 import GPT2

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = GPT2(vocab=50257, positions=seq, layers=layers, hidden=hidden, heads=heads)
    finally:
        torch.set_default_dtype(usual)
    tokens = torch.empty(batch, seq, dtype=torch.int64)
    return (Body(model), {"input_ids": tokens}) if body else (model, {"input_ids": tokens, "labels": tokens})


def gpt_13b(batch: int = 8, seq: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    return gpt(40, 5120, 40, batch, seq)


def gpt_13b_body(batch: int = 8, seq: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    return gpt(40, 5120, 40, batch, seq, body=True)


def gpt_175b_body(batch: int = 8, seq: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    return gpt(96, 12288, 96, batch, seq, body=True)
