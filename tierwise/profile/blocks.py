"""Forward and backward of a repeated block timed as the layers of a step run them: several one behind the other, then one backward through all.

No sum over a block's ops tells what this does: compiled code has no ops, and the host spends its time between ops, in the module's Python and
inside autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .options import tensors_in
from .step import BlockTimes
from .sustained import random_state_kept, sustained


def block_times(calls: Sequence[Callable[[], Any]], leaves: Iterable[torch.Tensor], device: torch.device, *, settle: bool = True) -> BlockTimes:
    """`calls` run equal blocks that share no tensor; `leaves` are all their parameters and inputs, whose .grad is used and cleared."""
    layers = _Layers(calls, [leaf for leaf in leaves if leaf.requires_grad])
    with random_state_kept(device), torch.enable_grad():
        forward, backward, _ = sustained((layers.forward, layers.backward, layers.forget), device, settle=settle)
    return BlockTimes(forward.times(1 / len(calls)), backward.times(1 / len(calls)))


class _Layers:
    def __init__(self, calls: Sequence[Callable[[], Any]], leaves: list[torch.Tensor]) -> None:
        self.calls, self.leaves = calls, leaves
        self.results: list[torch.Tensor] = []
        self.tangents: list[torch.Tensor] = []

    def forward(self) -> None:
        made = [call() for call in self.calls]
        self.results = [tensor for tensor in tensors_in(made) if tensor.requires_grad]

    def backward(self) -> None:
        if not self.results:
            return
        if not self.tangents:  # numbers as random as gradients are: on equal ones a chip draws less power and runs faster than it ever does
            self.tangents = [torch.randn_like(result) for result in self.results]
        torch.autograd.backward(self.results, self.tangents)

    def forget(self) -> None:
        self.results = []
        for leaf in self.leaves:
            leaf.grad = None
