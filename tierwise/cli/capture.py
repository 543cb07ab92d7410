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
    measure: Annotated[bool, typer.Option("--measure", help="Time its blocks and ops on the GPU of this machine; needs --machine.")] = False,
    machine: Annotated[str | None, typer.Option("--machine", metavar="M", help="With --measure: which machine this is.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one training step of a model as a graph that plan, compare and simulate read; with --measure, with its costs."""
    from pathlib import Path

    from .. import machines, measurement, pipeline
    from ..errors import BadInput
    from ..ir import Phase, Role, serial
    from ..report.words import role_words
    from ..units import format_bytes, format_seconds
    from . import _terminal as terminal
    from ._inputs import check_writable

    check_writable(out)
    if measure != (machine is not None):
        raise BadInput("--measure and --machine go together: times are those of a machine; name it (tierwise machine lists some), or leave both out")
    on = machines.load(machine) if machine is not None else None
    if on is not None:
        measurement.gpu(on)
    with terminal.progress(2) as begin:
        begin(f"capturing {model}")
        found = pipeline.capture_model(model, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, lora=lora, masters=masters)
        timed = measurement.measure_step(found, on, optimizer=optimizer, masters=masters, progress=begin) if on is not None else None
        begin("writing")
        target = out or f"{Path(found.name).stem.replace(':', '-')}.step.json"
        serial.save(timed.problem if timed else found.graph, target)
    graph, notes = found.graph, (*found.notes, *(timed.notes if timed else ()))
    seconds = pipeline.reference(timed.problem).row.seconds if timed else None
    by_role = {role: sum(s.nbytes for s in graph.storages if s.role is role) for role in Role}
    by_phase = {phase: sum(op.phase is phase for op in graph.ops) for phase in Phase}
    if as_json:
        terminal.print_json(
            {
                "file": target, "model": found.name, "batch": found.samples_per_step, "tokens_per_step": found.tokens_per_step, "dtype": found.dtype,
                "parameters": found.parameters, "ops": {str(phase): count for phase, count in by_phase.items()},
                "bytes": {str(role): nbytes for role, nbytes in by_role.items()}, "regions": len(graph.regions), "region_calls": len(graph.calls),
                "measured_seconds": seconds, "notes": list(notes),
            }
        )  # fmt: skip
    else:
        tokens = f", {found.tokens_per_step:,} tokens" if found.tokens_per_step else ""
        rows = [
            ("model", f"{found.name}, {found.parameters:,} parameters, {found.dtype}"),
            ("step", f"{found.samples_per_step} samples{tokens}"),
            ("ops", ", ".join(f"{count} {phase}" for phase, count in by_phase.items())),
            ("regions", f"{len(graph.regions)} kinds, {len(graph.calls)} calls"),
            *((role_words(role), format_bytes(nbytes)) for role, nbytes in by_role.items() if nbytes),
            *([("step time", f"{format_seconds(seconds)} with everything kept, from its parts")] if seconds is not None else []),
        ]
        terminal.print_table((terminal.Column("", right=False), terminal.Column("", right=False)), [terminal.Line(row) for row in rows])
    for note in notes:
        terminal.say(f"Note: {note}.")
    terminal.say(f"Wrote {target}.")
    terminal.say_next("tierwise", "compare", target, *(("--budget", "0.5") if timed else ("--machine", "rtx4090")))
