"""tierwise run: an unmodified training script inside a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT ARGS... | -m MODULE ARGS...", help="What Python would run, with its arguments.", show_default=False)
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="B", help="Device bytes, such as 24GiB or 0.8. Default: what is free.", show_default=False)
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="B", help="Host memory that may be used.", show_default=False)] = None,
    pinned: Annotated[str | None, typer.Option("--pinned", metavar="B", help="How much of that may be locked.", show_default=False)] = None,
    nvme: Annotated[str | None, typer.Option("--nvme", metavar="DIR:B", help="A directory for scratch files.", show_default=False)] = None,
    policy: Annotated[str, typer.Option("--policy", metavar="P", help="auto, or a policy of the zoo.")] = "auto",
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Run blocks op by op, with the bits of eager.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Run the first step twice more and compare its gradients.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the numbers of the steps in a line on stderr.")] = False,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE", help="Write the page of the run.", show_default=False)] = None,
) -> int:
    """Run a training script as it is, with its memory held within a budget; its output and exit code stay its own."""
    from ..errors import BadInput
    from ..integrations.script import run_script
    from ..units import parse_bytes, parse_store
    from ._inputs import check_writable, record_of

    if command[0] == "-m" and len(command) == 1:
        raise BadInput("-m takes the name of a module, such as -m package.train")
    for text, parse in ((host, parse_bytes), (pinned, parse_bytes), (nvme, parse_store)):
        if text is not None:
            parse(text)  # what is wrong with the command line is said before the script runs for an hour
    if budget is not None:
        parse_bytes(budget, of=1 << 40)
    _known(policy)
    check_writable(report, None if report is None else record_of(report))
    ended = run_script(
        command, watch=watch, budget=budget, host=host, pinned=pinned, nvme=nvme, policy=policy, compile=False if no_compile else None, verify=verify
    )
    if report is not None:
        _report(report, ended.run)
    return ended.code


def split(words: Sequence[str], values: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those from the script's name, or its -m, on. `values` are our options that take one."""
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-m", "--"):
        place += 2 if words[place] in values else 1
    rest = list(words[place:])
    return list(words[:place]), rest[1:] if rest[:1] == ["--"] else rest


def _known(policy: str) -> None:
    from .. import policies
    from ..errors import UnknownName

    if policy not in (known := ["auto", *policies.names()]):
        raise UnknownName("policy", policy, known)


def _report(name: str, run: object) -> None:
    from .. import report
    from ..ir import Run, serial
    from . import _terminal as terminal
    from ._inputs import record_of

    if not isinstance(run, Run):
        return terminal.say(f"No report: nothing was planned, so {name} was not written.")
    record = record_of(name)
    serial.save(run, record)
    serial.write(report.render([run], report.summarize([run])), name)
    terminal.say(f"Wrote {name} and {record}.")
