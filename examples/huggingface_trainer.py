"""Hugging Face Trainer with a LoRA adapter, inside a budget: one line more than without."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tierwise
from tierwise.integrations.huggingface import fit_trainer


class Texts(torch.utils.data.Dataset):
    """Sixteen letters in random order."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(16, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: str, steps: int, **more: Any) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, use_cache=False)
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    return Trainer(model, arguments, train_dataset=Texts())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="5MiB")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, options.steps, use_cpu=not torch.cuda.is_available(), save_strategy="no")
        fit_trainer(trainer, budget=options.budget, progress=print)
        trainer.train()
        print(f"trained within {options.budget} by tierwise {tierwise.__version__}")


if __name__ == "__main__":
    main()
