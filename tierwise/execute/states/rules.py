"""One formula for each optimizer, with the same bits on every processor.

A formula is a fixed sequence of single IEEE operations in fp32 (add, multiply, divide, square root), each rounded by itself: never a fused
multiply-add, never an approximate division, every number of the optimizer rounded to fp32 once. So the loop of torch ops below, the pass in C++
(cpu_pass.py) and the kernel for the card (cuda_pass.py) agree bit for bit, however the elements are cut into pieces.

    Adam, AdamW   g = g·sign + w·l2          w = w·decay
                  m = m·β1 + g·(1-β1)        v = v·β2 + (g·g)·(1-β2)
                  w = w - (m / (sqrt(v)·(1/sqrt(1-β2^t)) + eps))·(lr/(1-β1^t))
    SGD           g = g·sign + w·l2          m = m·keep + g·take          w = w - (g·direct + m·through)·lr
    SGD, plain    g = g·sign + w·l2          w = w - g·lr

They are used with masters="fp32". Without masters the user's arithmetic is torch's own code (torchs.py).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import BadInput

CHUNK_ELEMENTS = 1 << 18  # 5 MiB in all: stays in the cache of a few cores from the first op of a formula to the last


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer whose update is one formula, element by element."""

    name: str
    states: tuple[str, ...]  # names under which torch keeps them
    numbers: Callable[[Mapping[str, Any], int], tuple[float, ...]]  # of a parameter group, at a parameter's t-th step


def _adam_numbers(group: Mapping[str, Any], step: int, *, decoupled: bool) -> tuple[float, ...]:
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], float(group["weight_decay"])
    beta1, beta2 = float(beta1), float(beta2)
    return _fp32(
        _sign(group),
        0.0 if decoupled else decay,
        1 - lr * decay if decoupled else 1.0,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        float(group["eps"]),
        lr / (1 - beta1**step),
    )


def _momentum_numbers(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    momentum = float(group["momentum"])
    first = step == 1  # torch starts with the gradient itself, without dampening
    keep, take = (0.0, 1.0) if first else (momentum, 1 - float(group["dampening"]))
    direct, through = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return _fp32(_sign(group), float(group["weight_decay"]), keep, take, direct, through, float(group["lr"]))


def _plain_numbers(group: Mapping[str, Any], step: int) -> tuple[float, ...]:
    return _fp32(_sign(group), float(group["weight_decay"]), float(group["lr"]))


ADAM = Rule("adam", ("exp_avg", "exp_avg_sq"), lambda group, step: _adam_numbers(group, step, decoupled=False))
ADAMW = Rule("adam", ("exp_avg", "exp_avg_sq"), lambda group, step: _adam_numbers(group, step, decoupled=True))
MOMENTUM = Rule("momentum", ("momentum_buffer",), _momentum_numbers)
PLAIN = Rule("plain", (), _plain_numbers)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The formula of a torch optimizer; refused for those that have none here."""
    kind = type(optimizer)
    groups = optimizer.param_groups
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if any(group["amsgrad"] for group in groups):
            raise BadInput("masters='fp32' has no formula for amsgrad=True; use amsgrad=False, or masters=None for torch's own arithmetic")
        decoupled = {bool(group.get("decoupled_weight_decay", kind is torch.optim.AdamW)) for group in groups}
        if len(decoupled) > 1:
            raise BadInput("some parameter groups decouple the weight decay and some do not; use one optimizer class for all of them")
        return ADAMW if decoupled == {True} else ADAM
    if kind is torch.optim.SGD:
        moving = {bool(group["momentum"]) for group in groups}
        if len(moving) > 1:
            raise BadInput("some parameter groups of SGD have momentum and some have none; give all of them momentum, or none")
        return MOMENTUM if moving == {True} else PLAIN
    raise BadInput(f"masters='fp32' knows Adam, AdamW and SGD, not {kind.__name__}; use masters=None to run {kind.__name__} as it is")


def apply_rule(
    rule: Rule,
    numbers: Sequence[float],
    weights: torch.Tensor,
    gradient: torch.Tensor,
    states: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> None:
    """Update fp32 `weights` and `states` in place from a gradient of any float type times `scale`; `out` gets the new weights in its own type.

    All are one-dimensional. Op by op, in chunks that stay in the cache.
    """
    formula = _FORMULAS[rule.name]
    count = weights.numel()
    scratch = torch.empty((2, min(count, chunk_elements)), dtype=torch.float32, device=weights.device)
    for start in range(0, count, max(1, chunk_elements)):
        part = slice(start, min(start + chunk_elements, count))
        size = part.stop - part.start
        g, a = scratch[0, :size], scratch[1, :size]
        g.copy_(gradient[part])
        if scale != 1.0:  # as gradient.mul_(scale) would have left it, in the gradient's own type
            g.mul_(scale)
            if gradient.dtype != torch.float32:
                g.copy_(g.to(gradient.dtype))
        w = weights[part]
        g.mul_(numbers[0])
        g.add_(torch.mul(w, numbers[1], out=a))
        formula(numbers[2:], w, g, a, [state[part] for state in states])
        if out is not None:
            out[part].copy_(w)


def _adam(numbers: Sequence[float], w: torch.Tensor, g: torch.Tensor, a: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    decay, beta1, rest1, beta2, rest2, root, eps, step = numbers
    m, v = states
    w.mul_(decay)
    m.mul_(beta1)
    m.add_(torch.mul(g, rest1, out=a))
    v.mul_(beta2)
    v.add_(torch.mul(g, g, out=a).mul_(rest2))
    _root(v, a).mul_(root).add_(eps)
    w.sub_(torch.div(m, a, out=a).mul_(step))


def _root(v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Correctly rounded: torch's own square root of CPU tensors is not where it comes from MKL (6 of 1000 numbers are off by one bit)."""
    if v.device.type != "cpu":
        return torch.sqrt(v, out=out)
    np.sqrt(v.numpy(), out=out.numpy())
    return out


def _momentum(numbers: Sequence[float], w: torch.Tensor, g: torch.Tensor, a: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    keep, take, direct, through, lr = numbers
    (m,) = states
    m.mul_(keep)
    m.add_(torch.mul(g, take, out=a))
    g.mul_(direct)
    g.add_(torch.mul(m, through, out=a))
    w.sub_(g.mul_(lr))


def _plain(numbers: Sequence[float], w: torch.Tensor, g: torch.Tensor, a: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    (lr,) = numbers
    w.sub_(g.mul_(lr))


_FORMULAS = {"adam": _adam, "momentum": _momentum, "plain": _plain}


def _sign(group: Mapping[str, Any]) -> float:
    return -1.0 if group["maximize"] else 1.0


def _fp32(*numbers: float) -> tuple[float, ...]:
    """Rounded here, once, and not by each processor in its own way."""
    return tuple(ctypes.c_float(number).value for number in numbers)
