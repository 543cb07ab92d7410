"""Models to plan for: published shapes in plain PyTorch, Hugging Face configs, and the user's own.

    names()                              the zoo, without loading torch
    build("llama-7b", batch=8)           a model of the zoo and a batch of random data
    resolve("my_code.models:make")       a zoo name, a Hugging Face config file, or package.module:factory

Built under FakeTensorMode a model takes no memory, whatever its size. Calling `model(**batch)` gives the loss: a scalar itself, or where `loss_of`
finds it. Weights and batches of the zoo are the same each time: drawn from the seed 0, torch's own generator untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .catalogue import ENTRIES

if TYPE_CHECKING:
    import torch

__all__ = ["ModelAndBatch", "build", "loss_of", "names", "resolve"]


@dataclass(frozen=True, slots=True)
class ModelAndBatch:
    """A model in training mode, and what to call it with."""

    name: str
    model: torch.nn.Module
    batch: Mapping[str, torch.Tensor]
    samples_per_step: int
    tokens_per_step: int
    """Tokens of text, source and target both where a model reads one and writes the other; 0 where the inputs are something else."""
    dtype: str
    """Of the parameters and of the arithmetic: fp32, bf16, fp16, or amp-bf16, where `autocast` is set."""
    autocast: torch.dtype | None
    """The caller runs the forward under torch.autocast with this dtype, if any."""


def names() -> list[str]:
    return sorted(ENTRIES)


def build(name: str, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None, lora: int | None = None) -> ModelAndBatch:
    """A model of the zoo on torch's default device, with a batch of `batch` samples of `seq` tokens; each None means the model's own default.

    dtype is fp32, bf16, fp16 or amp-bf16. lora is the rank of adapters on every linear layer of the blocks; all else is then frozen.
    """
    from .building import build_entry

    return build_entry(name, batch=batch, seq=seq, dtype=dtype, lora=lora)


def resolve(spec: str, *, batch: int | None = None, seq: int | None = None, dtype: str | None = None, lora: int | None = None) -> ModelAndBatch:
    """SPEC is a zoo name, the path of a Hugging Face config.json, or `package.module:factory` that returns (model, batch).

    The options are build's; a factory gets those of batch and seq that it has parameters for.
    """
    from .building import resolve_spec

    return resolve_spec(spec, batch=batch, seq=seq, dtype=dtype, lora=lora)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar loss in what a model returned: itself, `.loss`, ["loss"], or the first of a tuple."""
    from .building import find_loss

    return find_loss(output)
