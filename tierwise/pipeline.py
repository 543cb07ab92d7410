"""The only place that composes stages: a step file, a machine and a budget become a Problem; a Problem and policies become a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import machines, policies
from .errors import BadFile, BadInput, ForeignFile, InfeasibleBudget, MissingTier, TierwiseError
from .ir import Choice, Comparison, Compute, Copy, Costs, Graph, Machine, Outcome, Problem, Row, SavedValue, Schedule, Timeline, peak_bytes, serial
from .lower import Coarse, coarsen
from .policies import _placement
from .profile.roofline import fused_costs, roofline_costs
from .simulate import lower_bound_seconds, simulate
from .units import format_bytes, parse_bytes

REFERENCE = "keep_all"


# -- a question -------------------------------------------------------------------------------------------------------------------------


def load_step(path: str | Path) -> Graph | Problem:
    """A Graph or Problem file, or a trace that another project published."""
    try:
        step: Graph | Problem = serial.load(path, (Graph, Problem))
        return step
    except ForeignFile as foreign:
        from .traces import load_trace

        try:
            return load_trace(path).problem
        except BadFile as error:
            raise BadFile(f"{foreign}; nor is it a trace: {error}") from None


def make_problem(
    step: str | Path | Graph | Problem,
    machine: str | Path | Machine | None = None,
    budget: str | int | float | None = None,
) -> Problem:
    """The step on the machine within the budget: bytes, '24GiB', or a share of the card such as 0.5; None is the whole card.

    A Graph needs a machine and gets roofline costs for it. A Problem and a trace bring their own machine and costs.
    """
    if isinstance(step, (str, Path)):
        step = load_step(step)
    if isinstance(machine, (str, Path)):
        machine = machines.load(machine)
    if isinstance(step, Problem):
        if machine is not None and machine != step.machine:
            raise BadInput(f"this step brings its own machine, {step.machine.name}, and costs for it; leave the machine {machine.name} out")
        problem = step
    elif machine is None:
        raise BadInput(f"a graph needs a machine to run on; name one of {', '.join(machines.names())}, or a machine file")
    else:
        problem = Problem(step, machine, roofline_costs(step, machine))
    if budget is None:
        return problem
    budget_bytes = parse_bytes(budget, of=problem.budget_bytes)
    if budget_bytes > problem.budget_bytes:
        raise BadInput(f"budget {format_bytes(budget_bytes)} is more than the {format_bytes(problem.budget_bytes)} of {problem.device_tier} "
                       f"that {problem.machine.name} has; use less, or another machine")  # fmt: skip
    return problem.with_budget(budget_bytes)


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model's training step, and what it is a step of."""

    name: str
    graph: Graph
    parameters: int
    samples_per_step: int
    tokens_per_step: int  # 0 where the inputs are not text
    dtype: str
    notes: tuple[str, ...]
    recipes: Mapping[int, Any]  # by op: how to call it again by itself (profile/ops.py)
    made: Any  # the model and its batch, on fake tensors


def capture_model(
    spec: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    lora: int | None = None,
    masters: str | None = None,
) -> CapturedModel:
    """The training step of a zoo name, a Hugging Face config file or package.module:factory, on fake tensors: no GPU, no memory."""
    from . import zoo
    from .capture import capture_step, on_fake_tensors

    with on_fake_tensors():
        found = zoo.resolve(spec, batch=batch, seq=seq, dtype=dtype, lora=lora)
    captured = capture_step(found.model, found.batch, optimizer=optimizer, autocast=found.autocast, masters=masters)
    return CapturedModel(
        name=found.name,
        graph=captured.graph,
        parameters=sum(parameter.numel() for parameter in found.model.parameters()),
        samples_per_step=found.samples_per_step,
        tokens_per_step=found.tokens_per_step,
        dtype=found.dtype,
        notes=captured.notes,
        recipes=captured.recipes,
        made=found,
    )


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A step whose repeated blocks are compiled, each block one op forward and one backward."""

    coarse: Coarse
    compiled: Mapping[int, Choice]  # by region class
    notes: tuple[str, ...]  # of blocks that cannot be compiled, and why


def compiled_step(model: CapturedModel) -> CompiledStep:
    """The captured step as it is with every repeated block compiled and keeping what the compiler keeps."""
    from .capture import region_examples
    from .errors import CannotCapture
    from .regions import options
    from .regions.joint import describe

    graph = model.graph
    calls = [call.region for call in graph.calls]
    compiled: dict[int, Choice] = {}
    notes = []
    with region_examples(model.made.model, model.made.batch, graph, autocast=model.made.autocast) as examples:
        for region in graph.regions:
            if calls.count(region.id) < 2 or region.id not in examples:
                continue
            example = examples[region.id]
            try:
                keep = options(describe(type(example.module).forward, example.module, example.args, example.kwargs))[0]
            except CannotCapture as error:
                notes.append(f"{region.example} ({region.kind}) is not compiled: {error}")
                continue
            saved = (SavedValue("saved", keep.saved_bytes),) if keep.saved_bytes else ()
            compiled[region.id] = Choice(keep.name, saved, keep.input_bytes > 0, keep.output_bytes > 0)
    choices = {call.id: compiled[call.region] for call in graph.calls if call.region in compiled}
    return CompiledStep(coarsen(graph, choices), compiled, tuple(notes))


def compiled_problem(model: CapturedModel, step: CompiledStep, machine: str | Path | Machine, costs: Costs | None = None) -> Problem:
    """The compiled step on a machine; `costs` of the fine graph's ops, fused rooflines if not given."""
    on = machine if isinstance(machine, Machine) else machines.load(machine)
    fine = (costs or fused_costs(model.graph, on)).op_seconds
    seconds = {}
    for place, members in enumerate(step.coarse.members):
        for processor in on.processors:
            if all((member, processor.name) in fine for member in members):
                seconds[place, processor.name] = sum(fine[member, processor.name] for member in members)
    return Problem(step.coarse.graph, on, Costs(seconds))


# -- one answer -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    problem: Problem  # what the schedule is for: the one asked about, unless the policy prepares another (policies/__init__.py)
    schedule: Schedule
    timeline: Timeline
    row: Row


def answer(problem: Problem, policy: str, **options: Any) -> Answer:
    """Plan and predict with one policy; raises if it has no plan within the budget."""
    start = time.perf_counter()
    problem, schedule = policies.planned(problem, policy, **options)
    planning_seconds = time.perf_counter() - start
    timeline = simulate(problem, schedule)
    return Answer(problem, schedule, timeline, replace(describe(problem, policy, schedule, timeline), planning_seconds=planning_seconds))


def reference(problem: Problem) -> Answer:
    """What keeping everything would take, whether it fits or not."""
    everything = policies.load(REFERENCE).plan(problem)
    needed = peak_bytes(problem, everything)[problem.device_tier]
    found = answer(problem.with_budget(max(needed, problem.budget_bytes)), REFERENCE)
    outcome = Outcome.FITS if needed <= problem.budget_bytes else Outcome.DOES_NOT_FIT
    return replace(found, row=replace(found.row, outcome=outcome, least_bytes=needed))


def placements(problem: Problem, schedule: Schedule) -> dict[str, _placement.Placement]:
    """Where every allocator would put what the schedule holds on the device."""
    return {name: _placement.place(problem, schedule, name) for name in _placement.ALLOCATORS}


def describe(problem: Problem, policy: str, schedule: Schedule, timeline: Timeline) -> Row:
    """The row of a schedule that is there already."""
    seen: set[tuple[int, int]] = set()
    again: list[float] = []
    copied = 0
    for step in schedule.steps:
        if isinstance(step, Copy):
            if step.src != step.dst:
                copied += problem.form_bytes(step.storage, step.src_form or step.dst_form)
        elif isinstance(step, Compute):
            if (step.op, step.iteration) in seen:
                again.append(problem.seconds(step.op, step.on, step.variant))
            seen.add((step.op, step.iteration))
    return Row(
        policy=policy,
        outcome=Outcome.FITS,
        lossy=_is_lossy(problem, policy, schedule),
        peak_bytes=timeline.peak_bytes[problem.device_tier],
        seconds=timeline.seconds,
        recomputed_ops=len(again),
        recomputed_seconds=sum(again),
        copied_bytes=copied,
        reason="; ".join(schedule.notes),
    )


def with_choices_of(problem: Problem, other: Problem) -> Problem:
    """The problem with the codecs, kernels and engines that another of the same step has besides: what a policy prepared before it planned."""
    costs, engines = problem.costs, {(link.src, link.dst): link.codecs for link in other.machine.links}
    codecs = (*costs.codecs, *(codec for codec in other.costs.codecs if codec.name not in costs.codec_named))
    variants = (*costs.variants, *(variant for variant in other.costs.variants if (variant.op, variant.name) not in costs.variant_of))
    links = tuple(replace(link, codecs={**engines.get((link.src, link.dst), {}), **link.codecs}) for link in problem.machine.links)
    return replace(problem, machine=replace(problem.machine, links=links), costs=replace(costs, codecs=codecs, variants=variants))


def _is_lossy(problem: Problem, policy: str, schedule: Schedule) -> bool:
    """Whether the policy says so, or what it was asked for makes it so: an option may have it round what it would keep exactly."""
    if policy in policies.names() and policies.card(policy).lossy:
        return True
    rounds = {codec.name for codec in problem.costs.codecs if codec.lossy}
    return bool(rounds) and any(isinstance(step, Copy) and (step.src_form in rounds or step.dst_form in rounds) for step in schedule.steps)


# -- all answers ------------------------------------------------------------------------------------------------------------------------


def compare(
    problem: Problem,
    names: Iterable[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_policy: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Every named policy at the problem's budget, the fastest first; `on_policy` hears of each before it is planned."""
    on_policy(REFERENCE)
    kept = reference(problem).row
    assert kept.seconds is not None and kept.peak_bytes is not None
    bound = lower_bound_seconds(problem)
    rows = []
    for name in names:
        if name == REFERENCE:
            rows.append(relate(kept, kept.seconds, bound))
            continue
        on_policy(name)
        row, own_bound = _row(problem, name, dict((options or {}).get(name, {})))
        rows.append(relate(row, kept.seconds, own_bound or bound))
    return Comparison(problem.budget_bytes, bound, kept.seconds, kept.peak_bytes, tuple(sorted(rows, key=_rank)))


def _row(problem: Problem, name: str, options: dict[str, Any]) -> tuple[Row, float | None]:
    """A policy's row, and the bound of the step it prepared, where that is another."""
    start = time.perf_counter()
    try:
        found = answer(problem, name, **options)
        return found.row, None if found.problem is problem else lower_bound_seconds(found.problem, lossy=found.row.lossy)
    except BadInput:
        raise
    except InfeasibleBudget as error:
        row = Row(name, Outcome.INFEASIBLE, least_bytes=error.least_bytes, reason=str(error))
    except MissingTier as error:
        row = Row(name, Outcome.MISSING, reason=str(error))
    except TierwiseError as error:
        row = Row(name, Outcome.REFUSED, reason=str(error))
    except Exception as error:
        row = Row(name, Outcome.CRASHED, reason=f"crashed with {type(error).__name__}: {error}; this is a bug of the policy")
    return replace(row, planning_seconds=time.perf_counter() - start), None


def relate(row: Row, keep_all_seconds: float, bound_seconds: float) -> Row:
    """The same row, set against the reference and the bound."""
    if row.seconds is None:
        return row
    return replace(
        row,
        times_keep_all=row.seconds / keep_all_seconds if keep_all_seconds else None,
        # The bound holds within the budget, where this row is not.
        times_bound=row.seconds / bound_seconds if bound_seconds and row.outcome is not Outcome.DOES_NOT_FIT else None,
    )


def _rank(row: Row) -> tuple[int, float, str]:
    """The reference, then what fits by time, then what almost fits, then the rest."""
    if row.policy == REFERENCE:
        return 0, 0.0, ""
    if row.seconds is not None:
        return 1, row.seconds, row.policy
    return (2, float(row.least_bytes), row.policy) if row.least_bytes else (3, 0.0, row.policy)
