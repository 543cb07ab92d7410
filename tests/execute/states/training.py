"""A small model, a loop, and the same arithmetic without any homes: what every placement is compared with."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.nvme import NvmeStore
from tierwise.execute.states.placement import Placement
from tierwise.execute.states.rules import apply_rule, rule_of
from tierwise.execute.states.states import States

MIB = 1 << 20
WIDTH = 16
CHUNK = 512  # elements: every unit has several chunks, and parameters are cut by them


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 3, width: int = WIDTH, vocab: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


REGIONS = ("embedding", "layers.0", "layers.1", "layers.2", "head")


def net(dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 24, (2, 5), generator=generator)
    return tokens, tokens.roll(1, dims=1)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, labels = batch(step)
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As people do: no decay for biases and norms."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, **options)


class Mastered:
    """An optimizer's formula over fp32 masters, by hand: what masters="fp32" must equal."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rule = optimizer, rule_of(optimizer)
        self.kept: dict[Any, tuple[torch.Tensor, list[torch.Tensor], list[int]]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                master, states, steps = self.kept.setdefault(p, (p.float().flatten(), [torch.zeros(p.numel()) for _ in self.rule.states], [0]))
                steps[0] += 1
                apply_rule(self.rule, self.rule.numbers(group, steps[0]), master, p.grad.flatten(), states)
                p.copy_(master.view_as(p))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


Loop = Callable[[nn.Module, Any, int], float]
"""One step of training: the loss before it."""


def plain_loop(model: nn.Module, optimizer: Any, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def clipped_loop(model: nn.Module, optimizer: Any, step: int) -> float:
    """Accumulation over two batches, clipping by norm."""
    total = 0.0
    for part in (0, 1):
        loss = loss_of(model, 2 * step + part) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return total


@dataclass
class Result:
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    state: dict[str, Any] = field(default_factory=dict)


def reference(steps: int = 20, *, masters: str | None = "fp32", loop: Loop = plain_loop, dtype: torch.dtype = torch.bfloat16,
              make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, schedule: Any = None) -> Result:  # fmt: skip
    model = net(dtype)
    optimizer: Any = make(model)
    scheduler = schedule(optimizer) if schedule else None
    stepper = Mastered(optimizer) if masters else optimizer
    losses = []
    for step in range(steps):
        losses.append(loop(model, stepper, step))
        if scheduler:
            scheduler.step()
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


@contextlib.contextmanager
def placed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    placements: Mapping[str, Placement],
    *,
    directory: Path | None = None,
    delay: float = 0.001,
    seed: int = 0,
    capacity: int = 64 * MIB,
    before_copy: Any = None,
    drive: bool = True,
    pool_is_ours: bool = False,
    **options: Any,
) -> Iterator[States]:
    """Lasting state on the null device, taken away again at the end; no copy may have been lost."""
    device = NullDevice(capacity, max_delay_seconds=delay, seed=seed, before_copy=before_copy)
    pool = HostPool(8 * MIB, device)
    store = NvmeStore(directory, 4 * MIB, pool, block_bytes=4096, requests=2) if directory is not None else None
    free_bytes = pool.free_bytes
    options = {"stream_chunk_elements": CHUNK, "cpu_chunk_elements": 2 * CHUNK, "threads": 2, **options}
    gc.freeze()  # what is made from now on is searched for garbage; to search all of torch, too, takes longer than most of these tests
    try:
        states = States(model, optimizer, placements, device, **options)
        states.install(pool=pool, store=store, drive=drive, pool_is_ours=pool_is_ours)
        try:
            yield states
        finally:
            states.close()
        gc.collect()
        gradients = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
        given_back = {gradient.untyped_storage().data_ptr(): gradient for gradient in gradients if device.owns(gradient)}.values()
        assert device.memory().allocated_bytes == sum(gradient.untyped_storage().nbytes() for gradient in given_back)
        assert pool.free_bytes == free_bytes  # nothing else is kept
    finally:
        gc.unfreeze()
        if store is not None:
            store.close()
        device.close()
        pool.close()
    assert device.lost_copies == 0


def everywhere(placement: Placement) -> dict[str, Placement]:
    return dict.fromkeys(REGIONS, placement)
