"""Tiny blocks of several families, three steps of training on them, and what a call saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class LlamaBlock(nn.Module):
    """RMSNorm, causal attention with grouped queries, SwiGLU."""

    def __init__(self, hidden: int = 32, intermediate: int = 80, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, width = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.query, self.out = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = nn.Linear(hidden, kv_heads * width, bias=False), nn.Linear(hidden, kv_heads * width, bias=False)
        self.gate, self.up = nn.Linear(hidden, intermediate, bias=False), nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (proj(y).unflatten(-1, (count, -1)).transpose(1, 2) for proj, count in
                   ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads)))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class BertBlock(nn.Module):
    """Post-norm, biases, attention written out, dropout in three places."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = self.norm1(x + self.dropout(self.out((self.dropout(scores) @ v).transpose(1, 2).flatten(-2))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class ConvBlock(nn.Module):
    """A residual block: convolution, batch norm with running statistics, rectifier."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ExpertsBlock(nn.Module):
    """Every token to the best two of four experts, all shapes fixed."""

    def __init__(self, hidden: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * hidden) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 2 * hidden, hidden) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(tokens)
        for place in range(2):
            inner = F.gelu(torch.bmm(tokens.unsqueeze(1), self.up[chosen[:, place]]))
            mixed = mixed.index_add(0, torch.arange(len(tokens)), weights[:, place, None] * torch.bmm(inner, self.down[chosen[:, place]]).squeeze(1))
        return x + mixed.view_as(x)


class RestlessBlock(nn.Module):
    """Overwrites a buffer after reading it."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(hidden))
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x + self.shift)
        self.shift.mul_(0.5)
        return F.dropout(self.linear(y), 0.2)


def example(block: nn.Module) -> Tensor:
    """An input of the block, the same each time."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(block, ConvBlock):
        return torch.randn(2, 8, 6, 6, generator=generator)
    return torch.randn(2, 12, 16 if isinstance(block, ExpertsBlock) else 32, generator=generator)


def train(layers: nn.ModuleList, forward: Callable[..., Tensor]) -> list[Tensor]:
    """Losses, gradients and buffers of three steps of gradient descent in which `forward(layer, x)` runs each layer, and the random state after."""
    torch.manual_seed(2)
    seen = []
    for _ in range(3):
        x = example(layers[0]).requires_grad_()
        y = x
        for layer in layers:
            y = forward(layer, y)
        loss = (y.square() * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).mean()
        layers.zero_grad()
        loss.backward()
        seen += [
            loss.detach(),
            x.grad,
            *(parameter.grad.clone() for parameter in layers.parameters()),
            *(buffer.clone() for buffer in layers.buffers()),
        ]
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter -= 0.1 * parameter.grad
    return [*seen, torch.get_rng_state()]


@contextmanager
def saved_tensors(found: list[Tensor]) -> Iterator[None]:
    """Collects every tensor that the calls within save for backward."""

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def storage_bytes(tensors: list[Tensor], *, without: list[Tensor]) -> int:
    """Bytes of the distinct storages behind tensors, less those of others."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors) if s.data_ptr() not in known}.values())


class GatedBlock(nn.Module):
    """The feed-forward half of a Llama block, with dropout: few kernels, of every kind that matters."""

    def __init__(self, hidden: int = 32, intermediate: int = 80) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, intermediate, bias=False), nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), 0.1)
