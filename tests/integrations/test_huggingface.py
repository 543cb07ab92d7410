"""Trainer, with a LoRA adapter: the same losses with a budget as without, through a checkpoint and a resumed training, too."""

from __future__ import annotations

import pytest
import torch
from fitting.training import batch, tower
from integrations.examples import example
from torch import nn

import tierwise
from tierwise.errors import BadInput, TierwiseError

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")

BUDGET = "4.6MiB"


@pytest.fixture(scope="module")
def training():
    return example("huggingface_trainer")


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plans(trainer) -> list[str]:
    """What was planned while it trained: afterwards the model is given back."""
    seen = []

    class Look(type(trainer.callback_handler.callbacks[0])):
        def on_step_end(self, args, state, control, *, model, **kwargs):
            seen.append("\n".join(tierwise.plan_of(model).words()))

    trainer.add_callback(Look())
    return seen


def test_a_lora_adapter(training, tmp_path):
    from tierwise.integrations.huggingface import fit_trainer

    def trainer():
        return training.make_trainer(str(tmp_path), 2, use_cpu=True, save_strategy="no")

    untouched, planned = trainer(), trainer()
    untouched.train()
    seen = plans(fit_trainer(planned, budget=BUDGET))
    planned.train()
    assert losses(planned) == losses(untouched)
    assert len(set(seen)) == 1 and "sends" in seen[0]
    with pytest.raises(BadInput, match="not under"):
        tierwise.plan_of(planned.model)


class WithLoss(nn.Module):
    """Any module will do that returns a loss by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    def forward(self, x, target):
        return {"loss": self.tower(x, target)}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in batch(index, rows=1).items()}


def make_trainer(folder, steps, **more):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=512, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant", **more,
    )  # fmt: skip
    return Trainer(WithLoss(), arguments, train_dataset=Rows())


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> list[float]:
    trainer = make_trainer(tmp_path_factory.mktemp("untouched"), 4, save_strategy="no")
    trainer.train()
    return losses(trainer)


def test_a_training_that_is_saved_and_resumed(untouched, tmp_path):
    from tierwise.integrations.huggingface import fit_trainer

    first = fit_trainer(make_trainer(tmp_path, 2, save_steps=2), budget="1MiB")
    first.train()
    second = fit_trainer(make_trainer(tmp_path, 4, save_strategy="no"), budget="1MiB")
    second.train(resume_from_checkpoint=True)
    assert losses(first) == untouched[:2]
    assert losses(second) == untouched


def test_a_training_that_fails_can_be_started_again(untouched, tmp_path):
    from tierwise.integrations.huggingface import FitCallback

    trainer = make_trainer(tmp_path, 4, save_strategy="no")
    callback = FitCallback(budget="200KiB")
    trainer.add_callback(callback)
    with pytest.raises(TierwiseError, match="too small"):
        trainer.train()
    callback.settings["budget"] = "1MiB"
    trainer.train()
    assert losses(trainer) == untouched


@pytest.mark.parametrize(
    ("change", "reason"), [({"world_size": 2}, "2 processes"), ({"n_gpu": 2}, "CUDA_VISIBLE_DEVICES=0"), ({"deepspeed": "x.json"}, "DeepSpeed moves")]
)
def test_what_cannot_be_planned_is_refused(change, reason):
    from types import SimpleNamespace

    from tierwise.integrations.huggingface import FitCallback

    args = SimpleNamespace(**{"world_size": 1, "n_gpu": 0, "deepspeed": None, **change})
    with pytest.raises(BadInput, match=reason):
        FitCallback(budget="1GiB").on_train_begin(args, None, None, model=None, optimizer=None)


def test_trl_sft_with_peft(tmp_path):
    """Where TRL is installed. Its loss works on 32768 words at a time, however few there are: 66 MB here."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import pyarrow
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from tierwise.integrations.huggingface import fit_trainer

    def trained(budget: str | None) -> list[float]:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4)
        rows = [torch.randint(16, (64,), generator=torch.Generator().manual_seed(row)).tolist() for row in range(16)]
        arguments = trl.SFTConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=8, max_length=64, logging_steps=1, use_cpu=True, bf16=False, save_strategy="no",
            report_to=[], gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            LlamaForCausalLM(config), arguments, processing_class=letters(), peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
            train_dataset=datasets.Dataset(pyarrow.table({"input_ids": rows, "labels": rows}), fingerprint="rows"),
        )  # fmt: skip
        seen = plans(fit_trainer(trainer, budget=budget)) if budget is not None else []
        trainer.train()
        assert all("sends" in summary for summary in seen)
        return losses(trainer)

    assert trained("71MiB") == trained(None)


def letters():
    """A tokenizer that needs no download."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate("epabcdefgh")}, unk_token="e"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="e", pad_token="p")
