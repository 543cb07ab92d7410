"""A Hugging Face config.json -> that architecture with its head and loss, and a batch for it. No weights are read, nothing is downloaded."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadFile, BadInput

DEFAULT_BATCH = 4
DEFAULT_SEQ = 2048  # or the config's own limit, if that is less
DEFAULT_IMAGE = 224  # of configs that take any size

Batch = dict[str, Tensor]


def from_config_file(path: Path, *, batch: int | None, seq: int | None, dtype: torch.dtype | None) -> tuple[nn.Module, Batch]:
    path = path / "config.json" if path.is_dir() else path
    model_type = _model_type(path)
    transformers = _transformers(path)
    config = _config(transformers, path, model_type)
    auto_class, make_batch = _task(transformers, path, config)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False  # the cache of keys and values is for generation
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # only its value is missing, and values do not matter here
    data = make_batch(path, config, batch or DEFAULT_BATCH, seq)
    try:
        model: nn.Module = auto_class.from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except Exception as error:
        raise BadInput(f"{path}: transformers {transformers.__version__} cannot build {model_type!r} from this file: "
                       f"{type(error).__name__}: {_first_line(error)}; correct the file, or give a package.module:factory") from error  # fmt: skip
    floats = next(model.parameters()).dtype
    return model, {name: value.to(floats) if value.is_floating_point() else value for name, value in data.items()}


def _model_type(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}; give the path of a Hugging Face config.json") from None
    except ValueError as error:
        raise BadFile(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise BadFile(f'{path} has no "model_type", so it is not a Hugging Face model config; give a model\'s config.json')
    return str(content["model_type"])


def _transformers(path: Path) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise BadInput(f"{path} needs the transformers package; install it with: pip install tierwise[huggingface]") from None


def _config(transformers: ModuleType, path: Path, model_type: str) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        raise BadInput(f"{path}: transformers {transformers.__version__} does not know the model_type {model_type!r}; "
                       "install a version that does, or give a package.module:factory")  # fmt: skip
    try:
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise BadFile(
            f"{path} is not a config that transformers {transformers.__version__} accepts for {model_type!r}: {_first_line(error)}"
        ) from error


def _task(transformers: ModuleType, path: Path, config: Any) -> tuple[Any, Callable[[Path, Any, int, int | None], Batch]]:
    """What to train it for: what the file's "architectures" says, or else the usual task of such a model."""
    tasks = [
        ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", _labelled_tokens),
        ("MASKED_LM", "AutoModelForMaskedLM", _labelled_tokens),  # before CAUSAL_LM, which lists encoders too
        ("CAUSAL_LM", "AutoModelForCausalLM", _labelled_tokens),
        ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification", _labelled_images),
        ("SEQUENCE_CLASSIFICATION", "AutoModelForSequenceClassification", _classified_texts),
        ("TOKEN_CLASSIFICATION", "AutoModelForTokenClassification", _classified_tokens),
    ]
    possible = []
    for mapping_name, auto_name, make_batch in tasks:
        mapping = getattr(transformers, f"MODEL_FOR_{mapping_name}_MAPPING")
        half = mapping_name in ("MASKED_LM", "CAUSAL_LM") and getattr(config, "is_encoder_decoder", False)  # the decoder or encoder alone
        if type(config) in mapping and not half:
            model_class = mapping[type(config)]
            possible.append((model_class if isinstance(model_class, tuple) else (model_class,), getattr(transformers, auto_name), make_batch))
    for classes, auto_class, make_batch in possible:
        if {model_class.__name__ for model_class in classes} & set(config.architectures or ()):
            return auto_class, make_batch
    if not possible:
        raise BadInput(f"{path}: {config.model_type!r} is trained for no task that a batch can be made up for here "
                       "(language modelling, classification of texts, tokens or images); give a package.module:factory")  # fmt: skip
    return possible[0][1:]


def _tokens(path: Path, config: Any, samples: int, seq: int | None) -> Tensor:
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if seq is not None and limit is not None and seq > limit:
        raise BadInput(f"{path} has max_position_embeddings {limit}, and seq is {seq}; use at most {limit}, or raise it in the file")
    return torch.randint(text.vocab_size, (samples, seq or min(DEFAULT_SEQ, limit or DEFAULT_SEQ)))


def _labelled_tokens(path: Path, config: Any, samples: int, seq: int | None) -> Batch:
    input_ids = _tokens(path, config, samples, seq)
    return {"input_ids": input_ids, "labels": input_ids.clone()}  # transformers shifts the labels itself where it has to


def _classified_texts(path: Path, config: Any, samples: int, seq: int | None) -> Batch:
    return {"input_ids": _tokens(path, config, samples, seq), "labels": torch.randint(config.num_labels, (samples,))}


def _classified_tokens(path: Path, config: Any, samples: int, seq: int | None) -> Batch:
    input_ids = _tokens(path, config, samples, seq)
    return {"input_ids": input_ids, "labels": torch.randint(config.num_labels, tuple(input_ids.shape))}


def _labelled_images(path: Path, config: Any, samples: int, seq: int | None) -> Batch:
    if seq is not None:
        raise BadInput(f"{path} is a model of images and has no seq; leave seq out")
    size = getattr(config, "image_size", None) or DEFAULT_IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(samples, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (samples,))}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
