"""Will it fit, and how fast: a model, a batch and a GPU that need not be here become one honest answer.

The step is captured on fake tensors, its costs are counted (a roofline) and the policies planned as for any other step. What was not measured is
given as a range; on the machine itself it can be measured (measurement.py). Batch sizes are scaled from two captures: the bytes and flops of
every storage and op are affine in the batch.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import measurement, pipeline, policies
from .ir import Graph, Machine, Outcome, Problem, Schedule, Timeline, peak_bytes

Progress = Callable[[str], None]
# Real eager steps took 0.94 to 1.58 times their roofline on nine of eleven models (two that wait for the host took 2.2 and 2.4 times):
# benchmarks/results/h200/2026-11-15-accuracy.json.
FASTEST, SLOWEST = 0.9, 1.6
# The CUDA context and what libraries take past the allocator, and so past any budget: 767 to 787 MiB in the same result file.
UNACCOUNTED_BYTES = 780 << 20
# auto takes the time it is given; each of the others plans the 2,400 ops of llama-7b in less than two seconds on one core. What is not here takes
# minutes, and is tried when it is named.
AUTO_SECONDS = 3.0
QUICK_TO_PLAN = (
    "auto", "g10", "zero_offload", "vdnn", "torchtune", "unsloth", "tf_swap", "oneflow", "layrub", "ssdtrain", "autoswap", "tflms", "rockmate",
    "echo", "megatron",
)  # fmt: skip
MOST_SAMPLES = 1 << 20  # in a batch: a step that does not grow with it fits at any
PLANNING_SECONDS = 10.0  # of the processor: an answer is worth no more waiting, and who wants more can name the policies


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the step on the card."""

    policy: str
    peak_bytes: int
    bytes_by_role: dict[str, int]  # at the moment of the peak
    seconds: float  # as counted
    seconds_range: Range
    tokens_per_second: Range | None
    samples_per_second: Range
    largest_batch: int | None  # with everything kept, or by these decisions: a plan made for a larger batch may have room for more


@dataclass(frozen=True, slots=True)
class Estimate:
    model: str
    machine: str
    batch: int
    dtype: str
    parameters: int
    tokens_per_step: int
    budget_bytes: int
    unaccounted_bytes: int
    measured: bool  # on the GPU itself; otherwise counted, and times are ranges
    fits: bool  # with everything kept
    kept: Way  # everything kept, whether it fits or not
    planned: Way | None  # the fastest plan within the budget, where keeping everything does not fit
    least_bytes: int | None  # the smallest budget any policy can do, where none can do this one
    notes: tuple[str, ...]


def estimate(
    spec: str,
    machine: Machine,
    *,
    budget_bytes: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    lora: int | None = None,
    masters: str | None = None,
    names: Sequence[str] | None = None,
    measure: bool = False,
    progress: Progress = lambda what: None,
) -> Estimate:
    """What a training step of the model would take on a machine.

    names    the policies to try when it does not fit
    measure  time the model's blocks on the GPU of this machine, which must be the one that is asked about
    """
    if measure:
        measurement.gpu(machine)  # no need to capture anything if there is none
    progress(f"capturing {spec}")
    options: dict[str, Any] = {"seq": seq, "dtype": dtype, "optimizer": optimizer, "lora": lora, "masters": masters}
    one = pipeline.capture_model(spec, batch=batch, **options)
    progress(f"capturing {spec} at twice the batch")
    two = pipeline.capture_model(spec, batch=2 * one.samples_per_step, **options)
    sizes = BatchScale(one.graph, two.graph, one.samples_per_step) if _same_shape(one.graph, two.graph) else None
    found = measurement.measure_step(one, machine, optimizer=optimizer, masters=masters, progress=progress) if measure else None
    problem = pipeline.make_problem(found.problem if found else one.graph, None if found else machine, budget_bytes)
    progress("keep_all")
    reference = pipeline.reference(problem)
    fits = reference.row.outcome is Outcome.FITS
    largest = sizes.largest_kept(problem.budget_bytes) if sizes else None
    kept = _way("keep_all", problem, reference.timeline, one, largest, measured=measure)
    planned, least = None, None
    untried: list[str] = []
    if not fits:
        limited = {"auto": {"plan_seconds": AUTO_SECONDS}}
        rows = pipeline.compare(problem, _worth_trying(names, untried), options=limited, on_policy=progress).rows
        feasible = [row for row in rows if row.outcome is Outcome.FITS]
        if feasible:
            best = min(feasible, key=lambda row: row.seconds or 0.0)
            answer = pipeline.answer(problem, best.policy, **limited.get(best.policy, {}))
            larger = sizes.largest_planned(answer.problem, answer.schedule) if sizes and _same_shape(answer.problem.graph, sizes.one) else None
            planned = _way(best.policy, problem, answer.timeline, one, larger, measured=measure)
        else:
            least = min((row.least_bytes for row in rows if row.least_bytes), default=None)
    notes = [*one.notes, *(found.notes if found else ())]
    if untried:
        notes.append(f"{', '.join(sorted(untried))} take longer to plan and were not tried; --policies all tries everything")
    if sizes is None:
        notes.append("the step has another shape at twice the batch, so the largest batch is not known")
    return Estimate(
        model=one.name,
        machine=machine.name,
        batch=one.samples_per_step,
        dtype=one.dtype,
        parameters=one.parameters,
        tokens_per_step=one.tokens_per_step,
        budget_bytes=problem.budget_bytes,
        unaccounted_bytes=UNACCOUNTED_BYTES,
        measured=measure,
        fits=fits,
        kept=kept,
        planned=planned,
        least_bytes=least,
        notes=tuple(notes),
    )


def _worth_trying(names: Sequence[str] | None, untried: list[str]) -> Iterator[str]:
    """The policies that were asked for, or those that are quick, as long as there is time; the others go to `untried`."""
    began = time.process_time()
    untried += [] if names else sorted({*policies.names()} - {*QUICK_TO_PLAN, pipeline.REFERENCE})
    for name in names or QUICK_TO_PLAN:
        if not names and time.process_time() - began > PLANNING_SECONDS:
            untried.append(name)
        elif name != pipeline.REFERENCE:
            yield name


def _way(policy: str, problem: Problem, timeline: Timeline, model: pipeline.CapturedModel, largest: int | None, *, measured: bool) -> Way:
    seconds = Range(timeline.seconds, timeline.seconds) if measured else Range(timeline.seconds * FASTEST, timeline.seconds * SLOWEST)

    def per_second(count: int) -> Range:
        return Range(count / seconds.high, count / seconds.low)

    return Way(
        policy=policy,
        peak_bytes=timeline.peak_bytes[problem.device_tier],
        bytes_by_role=at_peak(timeline, problem.device_tier),
        seconds=timeline.seconds,
        seconds_range=seconds,
        tokens_per_second=per_second(model.tokens_per_step) if model.tokens_per_step else None,
        samples_per_second=per_second(model.samples_per_step),
        largest_batch=largest,
    )


def at_peak(timeline: Timeline, tier: str) -> dict[str, int]:
    """Bytes of each role at the moment when a tier holds most."""
    curves = timeline.memory[tier]
    moments = sorted({moment for curve in curves.values() for moment in curve.seconds})

    def held(moment: float) -> dict[str, int]:
        return {role: curve.nbytes[bisect_right(curve.seconds, moment) - 1] for role, curve in curves.items()}

    if not moments:
        return {}
    return held(max(moments, key=lambda moment: sum(held(moment).values())))


def _same_shape(one: Graph, two: Graph) -> bool:
    return [op.name for op in one.ops] == [op.name for op in two.ops] and len(one.storages) == len(two.storages)


@dataclass(frozen=True, slots=True)
class BatchScale:
    """The same step at any batch, from its graphs at `batch` and at twice that."""

    one: Graph
    two: Graph
    batch: int

    def graph(self, batch: int) -> Graph:
        def scaled(at_one: int, at_two: int) -> int:
            return at_one + (at_two - at_one) * (batch - self.batch) // self.batch

        return replace(
            self.one,
            storages=tuple(replace(a, nbytes=scaled(a.nbytes, b.nbytes)) for a, b in zip(self.one.storages, self.two.storages, strict=True)),
            ops=tuple(
                replace(a, flops=scaled(a.flops, b.flops), workspace_bytes=scaled(a.workspace_bytes, b.workspace_bytes))
                for a, b in zip(self.one.ops, self.two.ops, strict=True)
            ),
        )

    def largest_kept(self, budget_bytes: int) -> int:
        """The largest batch whose step fits with everything kept; 0 if none does."""
        largest = None
        for at_one, at_two in zip(self.one.live_bytes, self.two.live_bytes, strict=True):
            growth = at_two - at_one  # over `batch` more samples
            if growth > 0:
                room = budget_bytes - at_one + growth  # beyond what does not grow
                largest = min(room * self.batch // growth, largest if largest is not None else room * self.batch // growth)
            elif at_one > budget_bytes:
                return 0
        return max(0, largest or 0)

    def largest_planned(self, problem: Problem, schedule: Schedule) -> int:
        """The largest batch that a schedule for `batch`, which fits, has room for in every tier. What it holds grows with the batch."""
        capacities = {tier.name: tier.capacity_bytes for tier in problem.machine.tiers}

        def fits(batch: int) -> bool:
            peaks = peak_bytes(replace(problem, graph=self.graph(batch)), schedule)
            return all(peak <= capacities[tier] for tier, peak in peaks.items())

        largest, too_large = self.batch, 2 * self.batch
        while too_large < MOST_SAMPLES and fits(too_large):
            largest, too_large = too_large, 2 * too_large
        while too_large - largest > 1:
            middle = (largest + too_large) // 2
            largest, too_large = (middle, too_large) if fits(middle) else (largest, middle)
        return largest
