"""Lightning inside a budget: one callback."""

from __future__ import annotations

import argparse

import lightning
import torch
from torch import Tensor

from tierwise.integrations.lightning import FitCallback
from tierwise.zoo.gpt2 import GPT2


class Letters(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(16, (65,), generator=torch.Generator().manual_seed(index))


class Writer(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = GPT2(vocab=256, positions=64, layers=4, hidden=64, heads=4)
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        loss: Tensor = self.network(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def train(steps: int, *callbacks: lightning.Callback) -> Writer:
    lightning.seed_everything(0, verbose=False)
    module = Writer()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="auto", devices=1, gradient_clip_val=1.0, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Letters(), batch_size=8))
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="8MiB")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    for step, loss in enumerate(train(options.steps, FitCallback(budget=options.budget)).losses):
        print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
