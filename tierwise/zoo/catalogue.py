"""Every model of the zoo as a row of data: its family's file, its published shape, and a batch that makes sense for training it.

Standard library only, so that names can be listed and completed without loading torch. The family is the name of a file beside this one and of
the class in it; the shape is that class's arguments. `seq` is None where the inputs are images. The "-tiny" rows have a few thousand parameters
and are meant for tests: they run in milliseconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    family: str
    shape: Mapping[str, Any]
    batch: int
    seq: int | None = None
    dtype: str = "fp32"


def _transformer(family: str, batch: int, seq: int | None, *, dtype: str = "bf16", **shape: Any) -> Entry:
    return Entry(family, MappingProxyType(shape), batch, seq, dtype)


def _gpt2(batch: int, seq: int = 1024, **shape: Any) -> Entry:
    return _transformer("gpt2.GPT2", batch, seq, vocab=50257, positions=1024, **shape)


def _llama(batch: int, seq: int = 2048, *, vocab: int = 32000, **shape: Any) -> Entry:
    return _transformer("llama.Llama", batch, seq, vocab=vocab, **shape)


def _llama3(batch: int, seq: int = 4096, **shape: Any) -> Entry:
    return _llama(batch, seq, vocab=128256, kv_heads=8, rotary_base=500_000.0, **shape)


def _qwen(batch: int, seq: int = 4096, *, vocab: int = 151936, **shape: Any) -> Entry:
    return _llama(batch, seq, vocab=vocab, qkv_bias=True, rotary_base=1_000_000.0, norm_eps=1e-6, **shape)


def _t5(batch: int, seq: int = 512, **shape: Any) -> Entry:
    return _transformer("t5.T5", batch, seq, vocab=32128, head_width=64, **shape)


def _net(family: str, batch: int, seq: int | None = None, **shape: Any) -> Entry:
    return Entry(family, MappingProxyType(shape), batch, seq)


ENTRIES: Mapping[str, Entry] = MappingProxyType({
    # Radford et al. 2019
    "gpt2-small": _gpt2(16, layers=12, hidden=768, heads=12),
    "gpt2-medium": _gpt2(8, layers=24, hidden=1024, heads=16),
    "gpt2-large": _gpt2(8, layers=36, hidden=1280, heads=20),
    "gpt2-xl": _gpt2(4, layers=48, hidden=1600, heads=25),
    "gpt2-tiny": _transformer("gpt2.GPT2", 2, 16, dtype="fp32", vocab=64, positions=32, layers=2, hidden=16, heads=2),
    # GPT-3's two smallest shapes (Brown et al. 2020) with Llama's block
    "llama-125m": _llama(16, layers=12, hidden=768, intermediate=2048, heads=12),
    "llama-350m": _llama(16, layers=24, hidden=1024, intermediate=2816, heads=16),
    # a round shape of each size: intermediate = 2.75 hidden, heads of 128
    "llama-1.4b": _llama(8, layers=24, hidden=2048, intermediate=5632, heads=16),
    "llama-3.2b": _llama(8, layers=26, hidden=3072, intermediate=8448, heads=24),
    # Touvron et al. 2023 (7b and 13b are the same shape in Llama 1 and 2)
    "llama-7b": _llama(4, layers=32, hidden=4096, intermediate=11008, heads=32),
    "llama-13b": _llama(4, layers=40, hidden=5120, intermediate=13824, heads=40),
    "llama-70b": _llama(1, 4096, layers=80, hidden=8192, intermediate=28672, heads=64, kv_heads=8),
    # Grattafiori et al. 2024, and the 3.2 release
    "llama3-1b": _llama3(4, layers=16, hidden=2048, intermediate=8192, heads=32, tied=True),
    "llama3-3b": _llama3(2, layers=28, hidden=3072, intermediate=8192, heads=24, tied=True),
    "llama3-8b": _llama3(2, layers=32, hidden=4096, intermediate=14336, heads=32),
    "llama3-70b": _llama3(1, layers=80, hidden=8192, intermediate=28672, heads=64),
    "llama-tiny": _llama(2, 16, dtype="fp32", vocab=64, layers=2, hidden=16, intermediate=40, heads=2),
    # Qwen2.5, Yang et al. 2024
    "qwen-0.5b": _qwen(8, layers=24, hidden=896, intermediate=4864, heads=14, kv_heads=2, tied=True),
    "qwen-1.5b": _qwen(4, layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, tied=True),
    "qwen-7b": _qwen(2, vocab=152064, layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4),
    "qwen-tiny": _qwen(2, 16, dtype="fp32", vocab=64, layers=2, hidden=16, intermediate=40, heads=4, kv_heads=2, tied=True),
    # Jiang et al. 2024
    "mixtral-8x7b": _transformer("mixtral.Mixtral", 1, 4096, vocab=32000, layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8),
    "mixtral-tiny": _transformer("mixtral.Mixtral", 2, 16, dtype="fp32", vocab=64, layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2),
    # Devlin et al. 2019
    "bert-base": _transformer("bert.Bert", 32, 512, vocab=30522, positions=512, layers=12, hidden=768, heads=12),
    "bert-large": _transformer("bert.Bert", 16, 512, vocab=30522, positions=512, layers=24, hidden=1024, heads=16),
    "bert-tiny": _transformer("bert.Bert", 2, 16, dtype="fp32", vocab=64, positions=32, layers=2, hidden=16, heads=2),
    # Raffel et al. 2020
    "t5-base": _t5(16, layers=12, hidden=768, intermediate=3072, heads=12),
    "t5-large": _t5(8, layers=24, hidden=1024, intermediate=4096, heads=16),
    "t5-tiny": _transformer("t5.T5", 2, 16, dtype="fp32", vocab=64, layers=2, hidden=16, intermediate=32, heads=2, head_width=8),
    # Dosovitskiy et al. 2021
    "vit-base-16": _transformer("vit.ViT", 64, None, image=224, patch=16, layers=12, hidden=768, heads=12),
    "vit-large-16": _transformer("vit.ViT", 32, None, image=224, patch=16, layers=24, hidden=1024, heads=16),
    "vit-tiny": _transformer("vit.ViT", 2, None, dtype="fp32", image=16, patch=4, layers=2, hidden=16, heads=2, classes=10),
    # He et al. 2016, Simonyan & Zisserman 2015, Szegedy et al. 2017
    "resnet-50": _net("resnet.ResNet", 128, image=224, blocks=(3, 4, 6, 3)),
    "resnet-101": _net("resnet.ResNet", 64, image=224, blocks=(3, 4, 23, 3)),
    "resnet-152": _net("resnet.ResNet", 64, image=224, blocks=(3, 8, 36, 3)),
    "resnet-tiny": _net("resnet.ResNet", 2, image=32, blocks=(2, 2), width=4, classes=10),
    "vgg-16": _net("vgg.VGG", 64, image=224, stages=((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)),
    "vgg-tiny": _net("vgg.VGG", 2, image=16, stages=((4, 4), (8, 8)), fully_connected=16, pooled=2, classes=10),
    "inception-v4": _net("inception.InceptionV4", 64, image=299),
    "inception-tiny": _net("inception.InceptionV4", 2, image=75, blocks=(1, 1, 1), width=1 / 32, classes=10),
    # Ronneberger et al. 2015
    "unet": _net("unet.UNet", 8, image=512),
    "unet-tiny": _net("unet.UNet", 2, image=16, width=4, depth=2),
    # Zaremba et al. 2014
    "lstm-medium": _net("lstm.LSTM", 20, 35, vocab=10000, layers=2, hidden=650, dropout=0.5),
    "lstm-large": _net("lstm.LSTM", 20, 35, vocab=10000, layers=2, hidden=1500, dropout=0.65),
    "lstm-tiny": _net("lstm.LSTM", 2, 8, vocab=64, layers=2, hidden=16, dropout=0.5),
})  # fmt: skip
