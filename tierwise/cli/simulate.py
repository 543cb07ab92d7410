"""tierwise simulate: check a schedule file against a step and predict its time."""

from __future__ import annotations

from typing import Annotated

import typer

from ._inputs import JsonOption, MachineOption, StepArgument


def simulate(
    step: StepArgument,
    schedule: Annotated[str, typer.Argument(metavar="SCHEDULE", help="A schedule, or a run as `tierwise plan -o` writes it.", show_default=False)],
    machine: MachineOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="B", help="Device bytes, such as 24GiB or 0.5 of the card. Default: the card.", show_default=False),
    ] = None,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write a run: problem, schedule and prediction.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge a schedule and predict when everything runs."""
    import dataclasses

    from .. import pipeline, simulate
    from ..errors import BadInput
    from ..ir import Run, Schedule, check_schedule, serial
    from ..units import format_bytes, format_seconds
    from . import _inputs, _rows
    from . import _terminal as terminal

    problem = pipeline.make_problem(step, machine, budget)
    file: Schedule | Run = serial.load(schedule, (Schedule, Run), graph=problem.graph)
    found = file if isinstance(file, Schedule) else file.schedule
    if found is None:
        raise BadInput(f"{schedule} is a run without a schedule; name one that `tierwise plan -o` wrote")
    if isinstance(file, Run) and file.problem is not None and file.problem.graph == problem.graph:
        problem = pipeline.with_choices_of(problem, file.problem)
    check_schedule(problem, found)
    with terminal.progress(1) as begin:
        begin("simulating")
        timeline = simulate.simulate(problem, found)
        kept = pipeline.reference(problem).row
        bound = simulate.lower_bound_seconds(problem)
    row = pipeline.relate(pipeline.describe(problem, schedule, found, timeline), kept.seconds or 0.0, bound)
    if out is not None:
        policy = (file.policy if isinstance(file, Run) else "") or _inputs.stem(schedule)
        mine = dataclasses.replace(row, policy=policy)
        run = _rows.as_run(step, problem, found, timeline, policy=policy, kept=kept, row=mine, bound_seconds=bound)
        serial.save(run, out, graph=problem.graph)
    if as_json:
        facts = {key: value for key, value in dataclasses.asdict(row).items() if key not in ("policy", "peak_bytes", "planning_seconds")}
        terminal.print_json(
            {"schedule": schedule, "bound_seconds": bound, "busy_seconds": timeline.busy_seconds(), "peak_bytes": dict(timeline.peak_bytes)} | facts
        )
    else:
        columns = (terminal.Column("schedule", right=False), *_rows.COLUMNS[1:-1])
        terminal.print_table(columns, [dataclasses.replace(line := _rows.line(row), cells=line.cells[:-1])])
        print()
        left = terminal.Column("lane", right=False)
        busy = sorted(timeline.busy_seconds().items())
        terminal.print_table(
            (left, terminal.Column("busy"), terminal.Column("share")),
            [
                terminal.Line((lane, format_seconds(seconds), f"{seconds / timeline.seconds:.0%}" if timeline.seconds else "-"))
                for lane, seconds in busy
            ],
        )
        print()
        terminal.print_table(
            (terminal.Column("tier", right=False), terminal.Column("peak"), terminal.Column("of")),
            [terminal.Line((t.name, format_bytes(timeline.peak_bytes[t.name]), format_bytes(t.capacity_bytes))) for t in problem.machine.tiers],
        )
    if out is not None:
        terminal.say(f"Wrote {out}.")
        return terminal.say_next("tierwise", "report", out, "-o", "report.html")
    given = ["--machine", machine] if machine else []
    terminal.say_next("tierwise", "compare", step, *given, *(["--budget", budget] if budget else []))
