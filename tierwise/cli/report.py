"""tierwise report: the page for one run, or for several side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from ._inputs import JsonOption


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs, as plan, simulate, compare or training write them; or timelines.", show_default=False)
    ],
    out: Annotated[str | None, typer.Option("-o", "--out", metavar="FILE", help="Write the page: one HTML file.", show_default=False)] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace, for ui.perfetto.dev.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what runs did: as text, as one HTML page, as a trace."""
    import dataclasses
    import json

    from .. import report
    from ..ir import serial
    from . import _terminal as terminal

    found = report.read_runs(runs)
    summary = report.summarize(found)
    written = []
    if out is not None:
        serial.write(report.render(found, summary), out)
        written.append(out)
    if trace is not None:
        timed = [run for run in found if run.predicted is not None or run.measured is not None]
        titled = [(run, one.title) for run, one in zip(timed, summary.runs, strict=True)]
        serial.write(json.dumps(report.chrome_trace(titled), separators=(",", ":")), trace)
        written.append(trace)
    if as_json:
        terminal.print_json(dataclasses.asdict(summary))
    elif not written:
        for line in report.lines(summary):
            print(line)
    for name in written:
        terminal.say(f"Wrote {name}.")
    if out is None:
        return terminal.say_next("tierwise", "report", *runs, "-o", "report.html")
    if trace is None:
        terminal.say_next("tierwise", "report", *runs, "--trace", "trace.json")
