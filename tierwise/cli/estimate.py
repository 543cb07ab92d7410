"""tierwise estimate: will it fit, how fast, with which plan; before renting the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ._inputs import JsonOption
from ._models import BatchOption, DtypeOption, LoraOption, MastersOption, ModelArgument, OptimizerOption, SeqOption

if TYPE_CHECKING:
    from ..estimation import Estimate, Range, Way

ROLES = (
    ("parameters", ("param", "buffer")),
    ("gradients", ("grad",)),
    ("optimizer", ("optimizer_state",)),
    ("activations", ("activation", "input")),
    ("workspace", ("workspace", "staging")),
)


def estimate(
    model: ModelArgument,
    gpu: Annotated[str, typer.Option("--gpu", metavar="M", help="A shipped machine or a machine file.", show_default=False)],
    batch: BatchOption = None,
    seq: SeqOption = None,
    budget: Annotated[str | None, typer.Option("--budget", metavar="B", help="Device bytes. Default: the card.", show_default=False)] = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = "adamw",
    lora: LoraOption = None,
    masters: MastersOption = None,
    policies: Annotated[str | None, typer.Option("--policies", metavar="A,B", help="Which to try where it does not fit.", show_default=False)] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time the model's blocks and ops on the GPU of this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a training step fits on a GPU that need not be here, how fast it would be, and with which plan."""
    import dataclasses

    from .. import machines
    from .. import policies as known
    from ..estimation import estimate as make
    from ..units import parse_bytes
    from . import _inputs
    from . import _terminal as terminal

    on = machines.load(gpu)
    capacity = on.capacity(on.device.tier)
    budget_bytes = parse_bytes(budget, of=capacity) if budget is not None else None
    names = _inputs.policy_names(policies) if policies else None
    with terminal.progress(3 + len(names or known.names())) as begin:
        found = make(
            model, on, budget_bytes=budget_bytes, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, lora=lora, masters=masters,
            names=names, measure=measure, progress=begin,
        )  # fmt: skip
    if as_json:
        return terminal.print_json(dataclasses.asdict(found))
    _print(found)
    for note in found.notes:
        terminal.say(f"Note: {note}.")
    size = [word for flag, value in (("--batch", batch), ("--seq", seq), ("--dtype", dtype)) if value is not None for word in (flag, str(value))]
    terminal.say_next("tierwise", "capture", model, *size, "-o", "step.json")


def _print(found: Estimate) -> None:
    from ..units import exact_bytes, format_bytes
    from . import _terminal as terminal

    tokens = f", {found.tokens_per_step:,} tokens" if found.tokens_per_step else ""
    size = f"{found.parameters / 1e9:.3g} B parameters, {found.dtype}, {found.batch} samples{tokens}"
    terminal.console().print(f"{found.model}: {size}, on {found.machine}")
    needed, budget = format_bytes(found.kept.peak_bytes), format_bytes(found.budget_bytes)
    if found.fits:
        verdict = f"Fits: keeping everything takes {needed} of {budget}."
    elif found.planned is not None:
        verdict = f"Does not fit as it is ({needed} of {budget}); fits with {found.planned.policy}."
    elif found.least_bytes is not None:
        verdict = f"Does not fit: it takes {needed} and there are {budget}; the least any policy can do is {exact_bytes(found.least_bytes)}."
    else:
        verdict = f"Does not fit: it takes {needed} and there are {budget}, and no policy has a plan; use a smaller batch or a larger card."
    terminal.console().print(verdict, style="bold")
    print()
    ways = [found.kept, *([found.planned] if found.planned else [])]
    columns = (terminal.Column("at the peak", right=False), *(terminal.Column(way.policy) for way in ways))
    lines = [terminal.Line((label, *(format_bytes(sum(way.bytes_by_role.get(r, 0) for r in roles)) for way in ways))) for label, roles in ROLES]
    lines.append(terminal.Line(("together", *(format_bytes(way.peak_bytes) for way in ways)), style="bold"))
    lines.append(terminal.Line(("unaccounted, about", *(format_bytes(found.unaccounted_bytes) for _ in ways)), style="dim"))
    lines.append(terminal.Line(("step time", *(_seconds(way.seconds_range) for way in ways))))
    if found.tokens_per_step:
        lines.append(terminal.Line(("tokens/s", *(_count(way.tokens_per_second) for way in ways))))
    lines.append(terminal.Line(("samples/s", *(_count(way.samples_per_second) for way in ways))))
    lines.append(terminal.Line(("largest batch", *(_batch(way) for way in ways))))
    terminal.print_table(columns, lines)


def _seconds(found: Range) -> str:
    from ..units import format_seconds

    return format_seconds(found.low) if found.low == found.high else f"{format_seconds(found.low)} to {format_seconds(found.high)}"


def _count(found: Range | None) -> str:
    if found is None:
        return "-"
    return _short(found.low) if found.low == found.high else f"{_short(found.low)} to {_short(found.high)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _batch(way: Way) -> str:
    if way.largest_batch is None:
        return "-"
    return f"{way.largest_batch:,}" if way.policy == "keep_all" else f"at least {way.largest_batch:,}"
