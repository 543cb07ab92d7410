"""What is known of one training step: what was asked, planned, predicted and measured, and the tables it was chosen from. A report is made of these.

    serial.save(Run("llama-1b", problem=problem, schedule=schedule, predicted=predicted, measured=measured), "run.json.gz")

A run may know little: only a prediction, only a measurement, only tables. What is not known is left out, and the report leaves it out too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .problem import Problem
from .schedule import Schedule
from .timeline import Timeline


class Outcome(StrEnum):
    FITS = "fits"
    DOES_NOT_FIT = "does not fit"  # the reference, planned as if the card were large enough
    INFEASIBLE = "infeasible"
    MISSING = "missing"  # the machine lacks what the policy needs
    REFUSED = "refused"  # the judge, or the policy itself, says no to this step
    CRASHED = "crashed"  # the policy has a bug, which must not cost the others their rows


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy makes of a problem. What is not known is None."""

    policy: str
    outcome: Outcome
    peak_bytes: int | None = None
    seconds: float | None = None
    times_keep_all: float | None = None
    times_bound: float | None = None
    recomputed_ops: int | None = None
    recomputed_seconds: float | None = None
    copied_bytes: int | None = None
    planning_seconds: float | None = None
    least_bytes: int | None = None  # the smallest budget an infeasible policy can do
    reason: str = ""  # why it does not fit; of one that does, what its planner says of the plan
    lossy: bool = False  # whether it rounds, or trains another way


@dataclass(frozen=True, slots=True)
class Comparison:
    """One table: every policy at one budget. The bound is a step time that no schedule within the budget can beat."""

    budget_bytes: int
    bound_seconds: float
    keep_all_seconds: float
    keep_all_bytes: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Within:
    """What one compiled block makes again inside its backward, where no step of a schedule shows it; against the block that saves everything."""

    module: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One step as it was planned and as it ran; the spans of both timelines name steps of the schedule by their place."""

    name: str
    problem: Problem | None = None
    schedule: Schedule | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    policy: str = ""
    comparisons: tuple[Comparison, ...] = ()  # of this step, one for each budget
    words: tuple[str, ...] = ()  # what was decided and why, a sentence each
    losses: tuple[float, ...] = ()  # of the steps that ran, one after the other
    untouched_losses: tuple[float, ...] = ()  # of the same steps without Tierwise
    step_seconds: tuple[float, ...] = ()  # measured, of the same steps
    reserved_bytes: int | None = None  # measured: the most the device's allocator held, which is what a budget caps
    unaccounted_bytes: int | None = None  # measured: what the device holds outside the allocator: its context, its libraries
    within: tuple[Within, ...] | None = None  # what compiled blocks recompute inside; None: nobody said
