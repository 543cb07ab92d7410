"""Hugging Face Trainer, and what derives from it, such as TRL's SFTTrainer; with peft or without.

    from tierwise.integrations.huggingface import fit_trainer

    fit_trainer(trainer, budget="20GiB").train()

The model is fitted when training begins, after accelerate has prepared it, and given back when it ends.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..errors import BadInput
from ..execute.session import session_of
from ..fitting import fit, release
from ..fitting.wrapped import inside

__all__ = ["FitCallback", "fit_trainer"]


def fit_trainer(trainer: Any, *, budget: str | int | float | None = None, **settings: Any) -> Any:
    """Let trainer.train() hold a budget of device memory; `settings` are those of tierwise.fit. Returns the trainer."""
    trainer.add_callback(FitCallback(budget=budget, **settings))
    return trainer


class FitCallback(TrainerCallback):  # type: ignore[misc]
    """For Trainer(callbacks=[FitCallback(budget="20GiB")])."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.world_size > 1:
            raise BadInput(f"{args.world_size} processes train together here; Tierwise plans for one so far: start one")
        if args.n_gpu > 1:
            raise BadInput(f"Trainer copies the model to {args.n_gpu} cards in every step; let one be seen: CUDA_VISIBLE_DEVICES=0")
        if getattr(args, "deepspeed", None):
            raise BadInput("DeepSpeed moves the model's memory itself; train without a deepspeed config, or without Tierwise")
        self._release(given["model"])  # of a training that was stopped by an error
        fit(given["model"], given["optimizer"], **self.settings)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._release(given["model"])

    def _release(self, model: Any) -> None:
        if session_of(inside(model)) is not None:
            release(model)
