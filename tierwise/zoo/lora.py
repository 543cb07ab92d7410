"""LoRA (Hu et al. 2022): a frozen linear layer plus a product of two thin ones that learn. The arithmetic, bit for bit, of peft's defaults.

    y = W x + (alpha / rank) · B A dropout(x)        A random, B zero, alpha = 8, no dropout

As in peft, adapters of a 16-bit model are kept in fp32, their input is cast up, and the sum is cast back. Models wrapped by peft itself work too,
given through a factory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..errors import BadInput

ALPHA = 8.0


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, *, alpha: float = ALPHA, dropout: float = 0.0) -> None:
        super().__init__()
        weight = base.weight
        dtype = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
        self.base = base
        self.thin = nn.Linear(base.in_features, rank, bias=False, device=weight.device, dtype=dtype)
        self.wide = nn.Linear(rank, base.out_features, bias=False, device=weight.device, dtype=dtype)
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.thin.weight, a=math.sqrt(5))
        nn.init.zeros_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x)
        adapted = self.wide(self.thin(self.dropout(x.to(self.thin.weight.dtype)))) * self.scale
        return (base + adapted).to(base.dtype)


def add_lora(model: nn.Module, rank: int, *, name: str) -> None:
    """Freezes the model and puts adapters on the linear layers of its repeated blocks, in place.

    A layer of a repeated block has a number in its name, like blocks.3.attention.query; so embeddings and heads are left alone. So are layers
    no wider than the rank (an expert's router): an adapter there would be larger than what it adapts.
    """
    model.requires_grad_(False)
    layers = [
        path
        for path, layer in model.named_modules()
        if type(layer) is nn.Linear and any(part.isdigit() for part in path.split(".")) and rank < min(layer.in_features, layer.out_features)
    ]
    if not layers:
        raise BadInput(f"{name} has no linear layers wider than {rank} in repeated blocks to adapt; leave lora out, use a smaller rank, "
                       "or give a package.module:factory that returns the model with its adapters")  # fmt: skip
    for path in layers:
        parent, _, child = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        setattr(model.get_submodule(parent), child, LoRALinear(layer, rank))
