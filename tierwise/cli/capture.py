"""tierwise capture: one training step of a model as a graph, with no GPU and no memory."""

from __future__ import annotations

from typing import Annotated

import typer

from ._inputs import JsonOption
from ._models import BatchOption, DtypeOption, LoraOption, MastersOption, ModelArgument, OptimizerOption, SeqOption


def capture(
    model: ModelArgument,
    out: Annotated[str | None, typer.Option("-o", "--out", metavar="FILE", help="Default: MODEL.step.json.", show_default=False)] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = "adamw",
    lora: LoraOption = None,
    masters: MastersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one training step of a model as a graph that plan, compare and simulate read."""
    from pathlib import Path

    from .. import pipeline
    from ..ir import Phase, Role, serial
    from ..units import format_bytes
    from . import _terminal as terminal

    with terminal.progress(2) as begin:
        begin(f"capturing {model}")
        found = pipeline.capture_model(model, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, lora=lora, masters=masters)
        begin("writing")
        target = out or f"{Path(found.name).stem.replace(':', '-')}.step.json"
        serial.save(found.graph, target)
    graph = found.graph
    by_role = {role: sum(s.nbytes for s in graph.storages if s.role is role) for role in Role}
    by_phase = {phase: sum(op.phase is phase for op in graph.ops) for phase in Phase}
    if as_json:
        terminal.print_json(
            {
                "file": target, "model": found.name, "batch": found.samples_per_step, "tokens_per_step": found.tokens_per_step, "dtype": found.dtype,
                "parameters": found.parameters, "ops": {str(phase): count for phase, count in by_phase.items()},
                "bytes": {str(role): nbytes for role, nbytes in by_role.items()}, "regions": len(graph.regions), "region_calls": len(graph.calls),
                "notes": list(found.notes),
            }
        )  # fmt: skip
    else:
        tokens = f", {found.tokens_per_step:,} tokens" if found.tokens_per_step else ""
        rows = [
            ("model", f"{found.name}, {found.parameters:,} parameters, {found.dtype}"),
            ("step", f"{found.samples_per_step} samples{tokens}"),
            ("ops", ", ".join(f"{count} {phase}" for phase, count in by_phase.items())),
            ("regions", f"{len(graph.regions)} kinds, {len(graph.calls)} calls"),
            *((f"{role} bytes", format_bytes(nbytes)) for role, nbytes in by_role.items() if nbytes),
        ]
        terminal.print_table((terminal.Column("", right=False), terminal.Column("", right=False)), [terminal.Line(row) for row in rows])
    for note in found.notes:
        terminal.say(f"Note: {note}.")
    terminal.say(f"Wrote {target}.")
    terminal.say_next("tierwise", "compare", target, "--machine", "rtx4090")
