"""tierwise plan: one schedule of one policy, predicted and explained."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ._inputs import JsonOption, MachineOption, StepArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..ir import Problem, Row, Schedule, Timeline
    from ..policies._placement import Placement
    from ._terminal import Line

MOST_SECONDS = 5.0  # a policy that took longer is not asked twice more
AUTO_SECONDS = 4.0  # auto takes the time it is given


def plan(
    step: StepArgument,
    policy: Annotated[str, typer.Option("--policy", metavar="P", help="Which policy; `tierwise policies` lists them.", show_default=False)],
    machine: MachineOption = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="B", help="Device bytes, such as 24GiB or 0.5 of the card. Default: the card.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-O", "--option", metavar="KEY=VALUE", help="An option of the policy; `tierwise policies NAME` lists them.", show_default=False),
    ] = None,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write a run: problem, schedule and prediction.", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the schedule, one step a line.")] = False,
    place: Annotated[bool, typer.Option("--place", help="Give everything an address, by each allocator, and print what is lost between.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan one step with one policy within a budget."""
    import dataclasses

    from .. import pipeline
    from ..ir import serial, text
    from ..simulate import lower_bound_seconds
    from . import _inputs, _rows
    from . import _terminal as terminal

    options = _inputs.policy_options(policy, option)
    problem = pipeline.make_problem(step, machine, budget)
    with terminal.progress(1) as begin:
        begin(policy)
        kept = pipeline.reference(problem).row
        answer = pipeline.answer(problem, policy, **options)
        problem = answer.problem
        bound = lower_bound_seconds(problem)
    rows = [pipeline.relate(row, kept.seconds or 0.0, bound) for row in ([kept] if policy != pipeline.REFERENCE else []) + [answer.row]]
    if out is not None:
        run = _rows.as_run(step, problem, answer.schedule, answer.timeline, policy=policy, kept=kept, row=answer.row, bound_seconds=bound)
        serial.save(run, out, graph=problem.graph)
    placements = pipeline.placements(problem, answer.schedule) if place else {}
    if as_json:
        spans = {name: {"span_bytes": found.height_bytes, "used_bytes": found.used_bytes} for name, found in placements.items()}
        more = {"placements": spans} if place else {}
        terminal.print_json({"budget_bytes": problem.budget_bytes, "bound_seconds": bound} | dataclasses.asdict(rows[-1]) | more)
    else:
        terminal.print_table(_rows.COLUMNS, [_rows.line(row) for row in rows])
        explained = explain(problem, answer.schedule)
        explained += why(problem, answer.schedule, answer.timeline)
        explained += around(problem, policy, options, answer.row)
        print()
        terminal.print_table((terminal.Column("", right=False),), explained)
        if place:
            print()
            terminal.print_table(
                (terminal.Column("allocator", right=False), *map(terminal.Column, ("spans", "lost", ""))), _placed(problem, placements)
            )
        if show:
            print()
            for line in text.schedule_lines(problem.graph, answer.schedule):
                print(line)
    given = ["--machine", machine] if machine else []
    given += ["--budget", budget] if budget else []
    if out is not None:
        terminal.say(f"Wrote {out}.")
        return terminal.say_next("tierwise", "report", out, "-o", f"{_inputs.stem(step)}.{policy}.html")
    extra = [word for assignment in option or () for word in ("-O", assignment)]
    terminal.say_next("tierwise", "plan", step, *given, "--policy", policy, *extra, "-o", f"{_inputs.stem(step)}.{policy}.json")


def why(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[Line]:
    """What was decided for each class of tensor, and what the step waits for."""
    from ..report.why import decisions, limit
    from ._terminal import Line

    return [*(Line(("decided",), rest=line) for line in decisions(problem, schedule)), Line(("limit",), rest=limit(problem, schedule, timeline))]


def around(problem: Problem, policy: str, options: Mapping[str, Any], row: Row) -> list[Line]:
    """What a little more memory would buy and a little less would cost: planned again at both budgets, if that is quick."""
    from .. import pipeline
    from ..errors import TierwiseError
    from ..policies.auto import MANY_OPS
    from ..report.why import change_bytes, with_less, with_more
    from ._terminal import Line

    kept = pipeline.reference(problem).row
    if row.seconds is None or policy == pipeline.REFERENCE or (policy != "auto" and (row.planning_seconds or 0.0) > MOST_SECONDS):
        return []
    if policy == "auto" and len(problem.graph.ops) > MANY_OPS:
        return []  # what is found of so large a step in less time says more about the time
    change = change_bytes(problem.budget_bytes)

    quicker = {"plan_seconds": AUTO_SECONDS} if policy == "auto" and "plan_seconds" not in options else {}

    def seconds(budget_bytes: int) -> float | None:
        try:
            return pipeline.answer(problem.with_budget(budget_bytes), policy, **options, **quicker).row.seconds if budget_bytes > 0 else None
        except TierwiseError:
            return None

    more = seconds(problem.budget_bytes + change) if (kept.least_bytes or 0) > problem.budget_bytes else row.seconds
    less = seconds(problem.budget_bytes - change)
    lines = [Line(("more",), rest=with_more(change, more, row.seconds))] if more is not None else []
    return [*lines, Line(("less",), rest=with_less(change, less, row.seconds))]


def _placed(problem: Problem, placements: Mapping[str, Placement]) -> list[Line]:
    """One line an allocator: the bytes its addresses span, and the share of them that nobody has at the fullest moment."""
    from ..units import format_bytes
    from ._terminal import Line

    lines = []
    for name, found in placements.items():
        fits = "" if found.height_bytes <= problem.budget_bytes else "does not fit"
        lines.append(Line((name, format_bytes(found.height_bytes), f"{found.fragmentation:.1%}"), rest=fits))
    return lines


def explain(problem: Problem, schedule: Schedule) -> list[Line]:
    """What the schedule does beyond keeping everything, in a few lines."""
    from ..ir import Compute, Copy
    from ..ir.schedule import held_as
    from ..report.words import role_words
    from ..units import format_bytes
    from ._terminal import Line

    graph, device = problem.graph, problem.machine.device.name
    seen: set[tuple[int, int]] = set()
    again: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    copied: Counter[tuple[str, str, str]] = Counter()
    homes: Counter[tuple[str, str]] = Counter()
    for step in schedule.steps:
        if isinstance(step, Copy):
            storage = graph.storages[step.storage]
            ways = held_as(step.src, step.src_form), held_as(step.dst, step.dst_form)
            copied[str(storage.role), *ways] += problem.form_bytes(storage.id, step.src_form or step.dst_form)
        elif isinstance(step, Compute):
            op = graph.ops[step.op]
            again[op.kind or op.name] += (step.op, step.iteration) in seen
            elsewhere[step.on] += step.on != device
            seen.add((step.op, step.iteration))
    for storage_id, tiers in schedule.home.items():
        for tier in tiers:
            if tier != problem.device_tier:
                homes[str(graph.storages[storage_id].role), tier] += graph.storages[storage_id].nbytes
    lines = []
    if again := +again:
        lines.append(Line(("recomputes",), rest=", ".join(f"{count} {kind}" for kind, count in again.most_common())))
    for (role, src, dst), nbytes in sorted(copied.items()):
        lines.append(Line(("copies",), rest=f"{format_bytes(nbytes)} of {role_words(role)} from {src} to {dst}"))
    for (role, tier), nbytes in sorted(homes.items()):
        lines.append(Line(("keeps",), rest=f"{format_bytes(nbytes)} of {role_words(role)} in {tier} between steps"))
    for name, count in sorted((+elsewhere).items()):
        lines.append(Line(("runs",), rest=f"{count} ops on the {name}"))
    lines += [Line(("says",), rest=note) for note in schedule.notes]
    return lines
