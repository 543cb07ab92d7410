"""A loop with accelerate, in one process, inside a budget: fit after prepare (or before it)."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import tierwise
from tierwise.zoo.gpt2 import GPT2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="8MiB")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: nn.Module = GPT2(vocab=256, positions=64, layers=4, hidden=64, heads=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tierwise.fit(model, optimizer, budget=options.budget)
    for step in range(options.steps):
        with accelerator.accumulate(model):
            tokens = torch.randint(16, (8, 65), generator=torch.Generator().manual_seed(step)).to(accelerator.device)
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")
    print(tierwise.plan_of(model).summary())
    tierwise.release(model)


if __name__ == "__main__":
    main()
