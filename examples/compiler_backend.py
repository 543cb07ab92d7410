"""torch.compile with a bound on what the compiled graph saves for backward, and nothing else of Tierwise."""

from __future__ import annotations

import argparse

import torch

from tierwise.zoo.gpt2 import GPT2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saved", default="1MiB", help="bytes, a share such as 0.5, or keep, cheap or checkpoint")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2(vocab=256, positions=64, layers=2, hidden=64, heads=4).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = torch.compile(model, backend="tierwise", options={"saved": options.saved}, dynamic=False)
    for step in range(options.steps):
        tokens = torch.randint(16, (8, 65), generator=torch.Generator().manual_seed(step)).to(device)
        kept: dict[int, int] = {}  # what autograd holds between forward and backward, by address
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: _noted(tensor, kept), lambda tensor: tensor):
            loss = compiled(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}, {sum(kept.values()) / 2**20:.2f} MiB saved, parameters and inputs among them")


def _noted(tensor: torch.Tensor, kept: dict[int, int]) -> torch.Tensor:
    kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor


if __name__ == "__main__":
    main()
