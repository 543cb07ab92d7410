"""Optimizers without a formula of ours and without pieces: torch's own step on whole parameters, where their state is.

On the device that is the user's optimizer as it is, on the parameters of a unit. On the host it is an optimizer of the same class over copies of the
parameters in host memory; its state is whatever torch makes there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from .torchs import check_options, shadow_of
from .units import Slot


class Whole:
    """The arithmetic of any torch optimizer."""

    masters = False
    states: tuple[str, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_options(optimizer)
        self._optimizer = optimizer
        self.kept: dict[Slot, dict[str, Any]] = {}  # of parameters that are updated on the host

    def settle(self, group: int, step: int) -> Any:
        settings = {key: value for key, value in self._optimizer.param_groups[group].items() if key != "params"}
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}

    def run(self, pieces: Any) -> NoReturn:
        raise NotImplementedError("whole parameters are updated by run_unit")

    def start(self, pieces: Any) -> NoReturn:
        raise NotImplementedError("whole parameters are updated by run_unit")

    def run_unit(self, settled: Mapping[Slot, Any], weights: Mapping[Slot, torch.Tensor], gradients: Mapping[Slot, torch.Tensor]) -> None:
        """Update host copies, each with its parameter's shape, in place."""
        groups: dict[int, dict[str, Any]] = {}
        state: Any = defaultdict(dict)
        pieces = {}
        for slot, weight in weights.items():
            pieces[slot] = piece = weight.detach()
            piece.grad = gradients[slot]
            groups.setdefault(slot.group, {**settled[slot], "params": []})["params"].append(piece)
            if slot in self.kept:
                state[piece] = self.kept[slot]
        shadow_of(self._optimizer, list(groups.values()), state).step()
        for slot, piece in pieces.items():
            piece.grad = None
            self.kept[slot] = state[piece]


def step_on_device(optimizer: torch.optim.Optimizer, slots: Iterable[Slot]) -> None:
    """The user's optimizer on some of its parameters, its state where torch keeps it."""
    wanted = {slot.parameter for slot in slots}
    groups = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in optimizer.param_groups]
    shadow_of(optimizer, [group for group in groups if group["params"]], optimizer.state).step()
