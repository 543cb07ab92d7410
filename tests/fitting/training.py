"""A small model whose activations outweigh its parameters, loops over it, and the same loop with and without a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fit, fitted, fitted_of, release
from tierwise.fitting.fitted import Fitted
from tierwise.ir import INPUTS, CallPlan, Program

MIB = 1 << 20
ROWS, WIDTH, BLOCKS = 512, 16, 4


class Block(nn.Module):
    """Saves 4.5 times what it is given, or with `checkpoint` nothing but that."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Tower(nn.Module):
    """Blocks between two linear layers; the loss is its own where it is told what to predict."""

    def __init__(self, blocks: int = BLOCKS, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.leave(x)
        return found if target is None else (found - target).square().mean()


def tower(**options: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**options).train()


def batch(number: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(rows, 8, generator=generator), "target": torch.randn(rows, 4, generator=generator)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.05, momentum=0.9)


Loop = Callable[[nn.Module, Any], Iterator[Any]]
"""Trains a model and yields tensors on the way, to be compared."""


def steps(loss_of: Callable[[nn.Module, int], Tensor]) -> Loop:
    """Three of them, each of the loss that a model has in the step of this number."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        for number in range(3):
            loss = loss_of(model, number)
            loss.backward()
            yield loss
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    return loop


three_steps = steps(lambda model, number: model(**batch(number)))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]


def trained(loop: Loop, model: nn.Module) -> list[Any]:
    """What the loop yields, then parameters, buffers and the random state after it."""
    torch.manual_seed(1)
    optimizer = sgd(model) if any(weight.requires_grad for weight in model.parameters()) else None
    seen = [_frozen(value) for value in loop(model, optimizer)]
    return [*seen, {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()]


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_frozen(part) for part in value] if isinstance(value, (list, tuple)) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


PLAN_SECONDS = 0.1  # a plan has to be legal here; how good it gets with more time is tested where plans are made


@contextmanager
def fitting(model: nn.Module, *, budget: Any = "1.5MiB", **options: Any) -> Iterator[Fitted]:
    """The model under a budget for as long as this lasts; at the end nothing is in flight, lost or left behind."""
    device = options.pop("device", None) or NullDevice(1 << 30)
    options = {"plan_seconds": PLAN_SECONDS} | options
    fit(
        model, options.pop("optimizer", None), budget=budget, compile=options.pop("compile", False), device=device, progress=lambda _: None, **options
    )
    found = fitted_of(model)
    try:
        yield found
        assert found.below.copies.in_flight() == 0
    finally:
        release(model)
        device.close()
    assert device.lost_copies == 0
    assert not device.pinned
    assert not [name for module in model.modules() for name in ("forward", "__getstate__") if name in module.__dict__]


def same(loop: Loop, model: nn.Module, **options: Any) -> Fitted:
    """The loop gives, bit for bit, the same with a budget as without."""
    expected = trained(loop, copy.deepcopy(model))
    with fitting(model, **options) as found:
        assert equal(trained(loop, model), expected)
        assert found.session.passes > 0
    return found


@contextmanager
def forced(monkeypatch: Any, choice: str | int, *, send: bool, tier: str = "dram", release: int = 1, fetch: int = 1) -> Iterator[None]:
    """Every region call takes this choice of its class, by name or by number, and sends what it saves."""

    def program_for(prepared: Any, *args: Any, **options: Any) -> Any:
        menu = prepared.menu
        calls = {}
        for call in menu.problem.graph.calls:
            if call.region not in menu.choices:
                continue
            offered = menu.choices[call.region]
            taken = next((found for found in offered if found.name == choice), None) or offered[min(_number(choice), len(offered) - 1)]
            sent = (*(value.name for value in taken.saved), *((INPUTS,) if taken.reads_inputs else ())) if send else ()
            calls[call.id] = CallPlan(taken.name, sent, tier, release, fetch)
        return prepared, Program(calls, "forced")

    with monkeypatch.context() as patch:
        patch.setattr(fitted, "program_for", program_for)
        yield


def _number(choice: str | int) -> int:
    return {"keep": 0, "cheap": 1, "dear": 2, "checkpoint": 99}.get(choice, 0) if isinstance(choice, str) else choice
