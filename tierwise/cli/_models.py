"""How a model is said on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A zoo name, a Hugging Face config.json, or package.module:factory.", show_default=False),
]
BatchOption = Annotated[int | None, typer.Option("--batch", min=1, metavar="N", help="Samples a step.", show_default=False)]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens a sample.", show_default=False)]
DtypeOption = Annotated[str | None, typer.Option("--dtype", metavar="D", help="fp32, bf16, fp16 or amp-bf16.", show_default=False)]
OptimizerOption = Annotated[str, typer.Option("--optimizer", metavar="O", help="adamw, adam, sgd, sgd-momentum, adafactor or adamw8bit.")]
LoraOption = Annotated[int | None, typer.Option("--lora", min=1, metavar="RANK", help="Train adapters of this rank only.", show_default=False)]
MastersOption = Annotated[str | None, typer.Option("--masters", metavar="fp32", help="Keep fp32 copies of 16-bit parameters.", show_default=False)]
