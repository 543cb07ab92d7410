"""A dozen families of models, each as small as it can be and still send something: (model, the batch of step n)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from blocks import ConvBlock, ExpertsBlock
from torch import Tensor, nn

from tierwise.zoo.gpt2 import GPT2
from tierwise.zoo.llama import Llama
from tierwise.zoo.lstm import LSTM
from tierwise.zoo.t5 import T5
from tierwise.zoo.unet import UNet
from tierwise.zoo.vit import ViT

Batch = Callable[[int], dict[str, Any]]


def tokens(rows: int = 4, length: int = 16, vocab: int = 64) -> Batch:
    def batch(number: int) -> dict[str, Any]:
        found = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(number))
        return {"input_ids": found, "labels": found.roll(-1, 1)}

    return batch


def noise(name: str, *shape: int, labels: int = 0) -> Batch:
    def batch(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        found: dict[str, Any] = {name: torch.randn(shape, generator=generator)}
        if labels:
            found["labels"] = torch.randint(labels, (shape[0],), generator=generator)
        return found

    return batch


class Chain(nn.Module):
    """Layers one behind the other, and a loss. The first is a simple one, so that the blocks behind it are all given something to differentiate."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.square() * torch.linspace(0.5, 1.5, x.shape[-1])).mean()


def dropout() -> tuple[nn.Module, Batch]:
    return GPT2(vocab=64, positions=16, layers=2, hidden=16, heads=2, dropout=0.1), tokens()


def batch_norm() -> tuple[nn.Module, Batch]:
    return Chain(nn.Conv2d(8, 8, 1), ConvBlock(), ConvBlock()), noise("x", 4, 8, 6, 6)


class Tied(nn.Module):
    """The head's weight is the embedding's, and a block is called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x + torch.tanh(self.inner(self.norm(x))) * (table + 1)[:16].mean(0)  # the tied weight goes in as an argument, too

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Tied.Block() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, self.embedding.weight)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tied_weights() -> tuple[nn.Module, Batch]:
    return Tied(), tokens(rows=8)


def skip_connections() -> tuple[nn.Module, Batch]:
    def batch(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        return {"pixels": torch.randn(2, 1, 16, 16, generator=generator), "labels": torch.randint(2, (2, 16, 16), generator=generator)}

    return UNet(image=16, width=4, depth=1), batch


def experts() -> tuple[nn.Module, Batch]:
    return Chain(nn.Linear(16, 16), ExpertsBlock(), ExpertsBlock()), noise("x", 8, 8, 16)


def lora() -> tuple[nn.Module, Batch]:
    from peft import LoraConfig, get_peft_model

    base = Llama(vocab=64, layers=2, hidden=16, intermediate=32, heads=2)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)), tokens()


def vision_transformer() -> tuple[nn.Module, Batch]:
    return ViT(image=16, patch=4, layers=2, hidden=16, heads=2, classes=8), noise("pixels", 4, 3, 16, 16, labels=8)


def gpt() -> tuple[nn.Module, Batch]:
    return Llama(vocab=64, layers=2, hidden=16, intermediate=32, heads=2), tokens()


def t5() -> tuple[nn.Module, Batch]:
    model = T5(vocab=64, layers=1, hidden=16, intermediate=32, heads=2, head_width=8, dropout=0.1)

    def batch(number: int) -> dict[str, Any]:
        found = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(number))
        return {"input_ids": found, "labels": found.flip(1)}

    return model, batch


def lstm() -> tuple[nn.Module, Batch]:
    return LSTM(vocab=64, layers=2, hidden=32, dropout=0.1), tokens(rows=8, length=6)


class Clipped(torch.autograd.Function):
    """A function with a backward of its own, which is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (0.5 + 0.5 * (x.abs() < 1))


class ClippedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(Clipped.apply(self.one(x)))


def own_function() -> tuple[nn.Module, Batch]:
    return Chain(nn.Linear(16, 16), ClippedBlock(), ClippedBlock()), noise("x", 64, 16)


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Llama(vocab=64, layers=2, hidden=16, intermediate=32, heads=2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids, labels)


def autocast() -> tuple[nn.Module, Batch]:
    return UnderAutocast(), tokens()


MODELS = {
    make.__name__: make
    for make in (dropout, batch_norm, tied_weights, skip_connections, experts, lora, vision_transformer, gpt, t5, lstm, own_function, autocast)
}


def around(name: str) -> Any:
    """What the forward runs in."""
    return torch.autocast("cpu", torch.bfloat16) if name == "autocast" else contextlib.nullcontext()
