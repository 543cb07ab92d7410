"""From a spec to a model and a batch: which kind it is, its number formats, its adapters."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadFile, BadInput, UnknownName
from . import ModelAndBatch, names
from .catalogue import ENTRIES
from .factory import call_factory, looks_like_factory
from .huggingface import from_config_file
from .lora import add_lora
from .torch_compat import models_built_on_fake_tensors

PARAMETER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "amp-bf16": torch.float32}
AUTOCAST_DTYPES = {"amp-bf16": torch.bfloat16}


def build_entry(name: str, *, batch: int | None, seq: int | None, dtype: str | None, lora: int | None) -> ModelAndBatch:
    if name not in ENTRIES:
        raise UnknownName("model", name, names())
    _check_options(batch, seq, dtype, lora)
    entry = ENTRIES[name]
    if seq is not None and entry.seq is None:
        raise BadInput(f"{name} takes images of {entry.shape['image']}×{entry.shape['image']} pixels and has no seq; leave seq out")
    positions = entry.shape.get("positions")
    if seq is not None and positions is not None and seq > positions:
        raise BadInput(f"{name} has {positions} learned positions, and seq is {seq}; use at most {positions}, or a model with rotary positions")
    file, class_name = entry.family.split(".")
    family = getattr(importlib.import_module(f".{file}", __package__), class_name)
    dtype = dtype or entry.dtype
    sizes = (batch or entry.batch,) if entry.seq is None else (batch or entry.batch, seq or entry.seq)
    with _seeded(), _default_dtype(PARAMETER_DTYPES[dtype]):
        model = family(**entry.shape)
        if lora is not None:
            add_lora(model, lora, name=name)
        data = model.example(*sizes)
    return _pack(name, model, data, dtype)


def resolve_spec(spec: str, *, batch: int | None, seq: int | None, dtype: str | None, lora: int | None) -> ModelAndBatch:
    if spec in ENTRIES:
        return build_entry(spec, batch=batch, seq=seq, dtype=dtype, lora=lora)
    _check_options(batch, seq, dtype, lora)
    parameter_dtype = None if dtype is None else PARAMETER_DTYPES[dtype]
    with models_built_on_fake_tensors():
        if spec.endswith(".json") or Path(spec).is_dir():
            with _seeded():
                model, data = from_config_file(Path(spec), batch=batch, seq=seq, dtype=parameter_dtype)
        elif looks_like_factory(spec):
            model, data = call_factory(spec, batch=batch, seq=seq)
            if parameter_dtype is not None:
                model = model.to(parameter_dtype)
                data = {key: value.to(parameter_dtype) if value.is_floating_point() else value for key, value in data.items()}
        elif "/" in spec:
            raise BadFile(
                f"{spec} is no file here; give the path of a Hugging Face config.json (download it first), a zoo name, or package.module:factory"
            )
        else:
            raise UnknownName("model", spec, names())
        if lora is not None:
            with _seeded():
                add_lora(model, lora, name=spec)
    return _pack(spec, model.train(), data, dtype or _dtype_name(model))


def find_loss(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if found is None:
        found = output
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{type(found).__name__}"
        raise BadInput(f"the model returned {what} where the loss should be; return a scalar loss, or an object with it under .loss")
    return found


def _pack(name: str, model: nn.Module, data: Mapping[str, Tensor], dtype: str) -> ModelAndBatch:
    tensors = list(data.values())
    return ModelAndBatch(
        name=name,
        model=model,
        batch=dict(data),
        samples_per_step=next((value.shape[0] for value in tensors if value.dim()), 1),
        tokens_per_step=_tokens(model, data),
        dtype=dtype,
        autocast=AUTOCAST_DTYPES.get(dtype),
    )


def _tokens(model: nn.Module, data: Mapping[str, Tensor]) -> int:
    source = data.get("input_ids", next(iter(data.values())))
    if source.is_floating_point() or source.dim() != 2:
        return 0
    tokens = source.numel()
    if getattr(getattr(model, "config", model), "is_encoder_decoder", False):
        target = data.get("decoder_input_ids", data.get("labels"))
        tokens += 0 if target is None else target.numel()
    return tokens


def _dtype_name(model: nn.Module) -> str:
    """The number format of most of the parameters."""
    numbers: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
    most = max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)
    return next((name for name, dtype in PARAMETER_DTYPES.items() if dtype == most), str(most).removeprefix("torch."))


def _check_options(batch: int | None, seq: int | None, dtype: str | None, lora: int | None) -> None:
    for option, value in (("batch", batch), ("seq", seq), ("lora", lora)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise BadInput(f"{option} is {value!r}; it must be a whole number of at least 1")
    if dtype is not None and dtype not in PARAMETER_DTYPES:
        raise UnknownName("dtype", dtype, PARAMETER_DTYPES)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed 0 within, and the generators as they were after."""
    device = torch.get_default_device()
    own = device.type not in ("cpu", "meta")  # an accelerator has a generator of its own
    with torch.random.fork_rng(devices=[device] if own else [], device_type=device.type if own else "cuda"):
        torch.manual_seed(0)
        yield
