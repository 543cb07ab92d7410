"""A plain training loop that knows nothing of Tierwise. Under a budget, without a change: tierwise run --budget 8MiB examples/train_llama.py"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.hidden * 11 // 4, "num_hidden_layers": options.layers}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes)
    model = LlamaForCausalLM(config).to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        tokens = torch.randint(16, (8, options.tokens), generator=torch.Generator().manual_seed(step)).to(options.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
