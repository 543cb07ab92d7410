"""What an update computes: our formula over fp32 masters, or torch's own code in the user's types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from .passes import Passes, is_over
from .rules import rule_of
from .torchs import check_options, state_names, update_pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a parameter, with everything their update reads and writes."""

    settled: Any  # the numbers of it
    weights: torch.Tensor
    gradient: torch.Tensor
    states: Sequence[torch.Tensor]
    out: torch.Tensor | None  # where the new weights are written, too
    scale: float  # of the gradient


class Arithmetic(Protocol):
    states: tuple[str, ...]  # what it keeps for each element, by torch's names
    masters: bool  # whether it keeps fp32 masters of narrower parameters

    def settle(self, group: int, step: int) -> Any:
        """Everything of a parameter group that its `step`-th update needs, read now: the next line of the loop may change it."""

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update them in place."""

    def start(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        """The same beside the caller, where that is of use: whoever calls what comes back has them updated."""


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

    def run(self, pieces: Sequence[Piece]) -> None:
        self.start(pieces)()

    def start(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        started = [
            self._passes.start(self._rule, piece.settled, piece.weights, piece.gradient, piece.states, piece.out, scale=piece.scale)
            for piece in pieces
        ]
        return partial(_finish_all, started)


def _finish_all(started: Sequence[Callable[[], None]]) -> None:
    for finish in started:
        finish()


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

    def start(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        self.run(pieces)
        return is_over

    def run(self, pieces: Sequence[Piece]) -> None:
        """Those with the same numbers in one call: on a card every call is a kernel that waits for its turn beside compute."""
        alike: dict[int, list[Piece]] = {}
        for piece in pieces:
            alike.setdefault(id(piece.settled), []).append(piece)
        with torch.no_grad():
            for found in alike.values():
                settings, step = found[0].settled
                gradients = [piece.gradient if piece.scale == 1.0 else piece.gradient * piece.scale for piece in found]
                update_pieces(self._optimizer, settings, step, [piece.weights for piece in found], gradients, [piece.states for piece in found])
            for piece in pieces:
                if piece.out is not None:
                    piece.out.copy_(piece.weights)
