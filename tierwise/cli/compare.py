"""tierwise compare: every policy side by side at each budget, with the step time no schedule can beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ._inputs import JsonOption, MachineOption, StepArgument

if TYPE_CHECKING:
    from typing import Any

    from ..ir import Comparison


def compare(
    step: StepArgument,
    machine: MachineOption = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", metavar="B", help="Device bytes, such as 24GiB or 0.5 of the card; give several. Default: the card.", show_default=False
        ),
    ] = None,
    policies: Annotated[str, typer.Option("--policies", metavar="all|A,B", help="Which policies.")] = "all",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-O", "--option", metavar="POLICY.KEY=VALUE", help="An option of one policy; `tierwise policies NAME` lists them.", show_default=False
        ),
    ] = None,
    out: Annotated[str | None, typer.Option("-o", "--out", metavar="FILE", help="Write the tables as a run.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare policies on one step: peak, step time, what is recomputed and copied."""
    import dataclasses

    from .. import machines, pipeline
    from ..ir import Outcome, Run, serial
    from . import _inputs
    from . import _terminal as terminal

    names = _inputs.policy_names(policies)
    options = _options(names, option)
    asked = _inputs.budgets(budget)
    _inputs.check_writable(out)
    on = machines.load(machine) if machine is not None else None
    graph = pipeline.load_step(step)
    problems = [pipeline.make_problem(graph, on, each) for each in asked]
    with terminal.progress(len(problems) * len({*names, pipeline.REFERENCE})) as begin:
        found = [pipeline.compare(problem, names, options=options, on_policy=begin) for problem in problems]
    name = f"{_inputs.stem(step)} on {problems[0].machine.name}"
    if out is not None:
        serial.save(Run(name, comparisons=tuple(found)), out)
    if as_json:
        tables = [dataclasses.asdict(comparison) for comparison in found]
        return terminal.print_json(serial.head(Run) | {"name": name, "step": step, "machine": problems[0].machine.name, "comparisons": tables})
    for comparison in found:
        print_comparison(comparison, problems[0].machine.name, blank=comparison is not found[0])
    if out is not None:
        terminal.say(f"Wrote {out}.")
        return terminal.say_next("tierwise", "report", out, "-o", f"{_inputs.stem(step)}.html")
    exact = (row for comparison in reversed(found) for row in comparison.rows if row.outcome is Outcome.FITS and not row.lossy)
    best = next(exact, None)
    if best is not None:
        where = ["--machine", machine] if machine else []
        size = next(text for text, comparison in reversed(list(zip(asked, found, strict=True))) if best in comparison.rows)
        terminal.say_next("tierwise", "plan", step, *where, *(["--budget", size] if size else []), "--policy", best.policy, "--show")


def print_comparison(comparison: Comparison, machine: str, *, blank: bool) -> None:
    from ..ir import Outcome
    from ..pipeline import REFERENCE
    from ..units import format_bytes
    from . import _rows
    from . import _terminal as terminal

    if blank:
        print()
    title = f"{machine} with a budget of {format_bytes(comparison.budget_bytes)}; keeping everything takes {format_bytes(comparison.keep_all_bytes)}"
    terminal.console().print(title)
    fitting = [row for row in comparison.rows if row.outcome is Outcome.FITS]
    best = min((row for row in fitting if row.policy != REFERENCE and not row.lossy), key=lambda row: row.seconds or 0.0, default=None)
    timed = [row for row in comparison.rows if row.seconds is not None]
    others = [row for row in comparison.rows if row.seconds is None]
    lines = [*(_rows.line(row, best=row is best) for row in timed), _rows.bound_line(comparison), *map(_rows.line, others)]
    terminal.print_table(_rows.COLUMNS, lines)


def _options(names: list[str], assignments: list[str] | None) -> dict[str, dict[str, Any]]:
    from ..errors import BadInput, UnknownName
    from ._inputs import policy_options

    found: dict[str, list[str]] = {}
    for assignment in assignments or ():
        policy, dot, rest = assignment.partition(".")
        if not dot:
            raise BadInput(f"option {assignment!r} is not of the form POLICY.KEY=VALUE")
        if policy not in names:
            raise UnknownName("policy among those compared", policy, names)
        found.setdefault(policy, []).append(rest)
    return {policy: policy_options(policy, given) for policy, given in found.items()}
