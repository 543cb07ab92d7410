"""Small models to capture, small enough for every byte to be counted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from problems import machine
from torch import nn

from tierwise.ir import Costs, Graph, Phase, Problem, Role, peak_bytes
from tierwise.policies import plan


class OneLinear(nn.Module):
    """y = x W^T + b of 5 samples from 4 to 3, and the sum of y."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).sum()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Three equal blocks; the head is the embedding's weight."""

    def __init__(self, vocabulary: int = 97, width: int = 32, heads: int = 4, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class ConvNet(nn.Module):
    """Batch norm, a residual sum, and ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images, labels):
        x = F.relu(self.norm1(self.conv1(images)), inplace=True)
        x = F.max_pool2d(x, 2)
        x = F.relu(self.norm2(self.conv2(x)) + x, inplace=True)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), labels)


def tokens(batch: int = 4, length: int = 16, vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def kept_peak_bytes(graph: Graph) -> int:
    """The peak of keep_all, which the judge has accepted, beyond what is there when the step begins."""
    problem = Problem(graph, machine(hbm=1 << 50), Costs({(op.id, "gpu"): 0.0 if op.kind == "release" else 1.0 for op in graph.ops}))
    before = sum(storage.nbytes for storage in graph.storages if storage.lasting or storage.role is Role.INPUT)
    return peak_bytes(problem, plan(problem, "keep_all"))["hbm"] - before


def saved_bytes(graph: Graph) -> list[int]:
    """The bytes of each storage that forward makes and backward still uses, smallest first, without what only the loop itself still holds."""
    held_by_loop = max(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    assert graph.ops[held_by_loop].kind == "release"
    found = []
    for storage in graph.storages:
        producer = graph.producer(storage.id)
        if producer is not None and not storage.lasting and graph.ops[producer].phase is Phase.FORWARD:
            found += [storage.nbytes] * any(graph.ops[use].phase is Phase.BACKWARD for use in graph.uses[storage.id] if use != held_by_loop)
    return sorted(found)


def named(graph: Graph, name: str):
    """The op of this name."""
    return next(op for op in graph.ops if op.name == name)


def storage(graph: Graph, name: str):
    return next(found for found in graph.storages if found.name == name)


def storage_names(graph: Graph, ids) -> list[str]:
    return [graph.storages[number].name for number in ids]
