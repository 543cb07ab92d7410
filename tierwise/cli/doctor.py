"""tierwise doctor: what on this machine will hurt, and the command that mends it."""

from __future__ import annotations

from typing import Annotated

import typer

from ._inputs import JsonOption


def doctor(
    disk: Annotated[str, typer.Option("--disk", metavar="DIR", help="A folder on the disk to look at.")] = ".",
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure the disk.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Look for what will hurt on this machine. Exit code 1 if something makes it unusable."""
    import dataclasses
    from pathlib import Path

    from ..profile.doctor import Level, examine, unusable
    from ..profile.surroundings import look_around
    from . import _terminal as terminal

    with terminal.progress(2) as begin:
        here = look_around(Path(disk), measure=not quick, progress=begin)
    findings = examine(here)
    code = 1 if unusable(findings) else 0
    if as_json:
        terminal.print_json({"usable": not code, "findings": [dataclasses.asdict(finding) for finding in findings], "here": dataclasses.asdict(here)})
        return code
    styles = {Level.OK: "", Level.WARN: "yellow", Level.BAD: "bold red"}
    columns = (terminal.Column("", right=False), terminal.Column("", right=False), terminal.Column("", right=False))
    lines = []
    for finding in findings:
        lines.append(terminal.Line((finding.level, finding.name), rest=finding.found, style=styles[finding.level]))
        if finding.mend:
            lines.append(terminal.Line(("", ""), rest=f"→ {finding.mend}", style="dim"))
    terminal.print_table(columns, lines)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    terminal.say(f"{counts[Level.OK]} ok, {counts[Level.WARN]} to mend, {counts[Level.BAD]} that make it unusable.")
    terminal.say_next("tierwise", "machine", "--probe", "-o", "machine.json")
    return code
