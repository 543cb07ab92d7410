"""What an update computes: our formula over fp32 masters, or torch's own code in the user's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .passes import Passes
from .rules import rule_of
from .torchs import check_options, state_names, update_piece


class Arithmetic(Protocol):
    states: tuple[str, ...]  # what it keeps for each element, by torch's names
    masters: bool  # whether it keeps fp32 masters of narrower parameters

    def settle(self, group: int, step: int) -> Any:
        """Everything of a parameter group that its `step`-th update needs, read now: the next line of the loop may change it."""

    def run(
        self,
        settled: Any,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        scale: float,
    ) -> None:
        """Update a piece in place, and write the new weights to `out`."""


class Formula:
    """masters="fp32": the same bits wherever it runs."""

    masters = True

    def __init__(self, optimizer: torch.optim.Optimizer, passes: Passes) -> None:
        self._rule = rule_of(optimizer)
        check_options(optimizer)
        self._optimizer, self._passes = optimizer, passes
        self.states = self._rule.states

    def settle(self, group: int, step: int) -> Any:
        return self._rule.numbers(self._optimizer.param_groups[group], step)

    def run(
        self,
        settled: Any,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        scale: float,
    ) -> None:
        self._passes(self._rule, settled, weights, gradient, states, out, scale=scale)


class Torchs:
    """masters=None: the optimizer's own class, on pieces."""

    masters = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_options(optimizer)
        self._optimizer = optimizer
        self.states = state_names(optimizer)

    def settle(self, group: int, step: int) -> Any:
        settings = {key: value for key, value in self._optimizer.param_groups[group].items() if key != "params"}
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}, step

    def run(
        self,
        settled: Any,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        scale: float,
    ) -> None:
        settings, step = settled
        with torch.no_grad():
            update_piece(self._optimizer, settings, step, weights, gradient if scale == 1.0 else gradient * scale, states)
            if out is not None:
                out.copy_(weights)
