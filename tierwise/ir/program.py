"""What runs: each call of a region takes a choice from the menu of its class, and some of what it saves leaves the device until backward.

A Menu is the question at the level at which code is compiled: a step, and for each region class the choices there are of what is saved for
backward, with their cost. A Program is the answer. `lower/` makes a Problem and a Schedule of the two, which are judged and simulated like any
other: that is the prediction of what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .placement import FEW_IN_FLIGHT, Placement
from .problem import Problem

INPUTS = "inputs"  # in CallPlan.sent: what the region was given and backward reads
EVERYTHING = "*"  # in CallPlan.sent, outside of regions: whatever is saved there and large enough
MIN_OUTSIDE_BYTES = 1 << 20  # of a tensor saved outside of regions: below that, copies do not reach the link's rate
MIN_SENT_BYTES = 1 << 12  # smaller values, seeds and the like, are not sent: they cost a copy and give back nothing


@dataclass(frozen=True, slots=True)
class SavedValue:
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of a region class and what it costs. Bytes and seconds are of one call."""

    name: str
    saved: tuple[SavedValue, ...]  # for backward, beyond inputs, parameters and results
    reads_inputs: bool  # backward reads inputs of the region, which somebody must keep
    reads_outputs: bool
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_workspace_bytes: int | None = None  # the most held beyond what goes in and what comes out; None: not known, to be estimated
    backward_workspace_bytes: int | None = None
    measured: bool = False

    @property
    def saved_bytes(self) -> int:
        return sum(value.nbytes for value in self.saved)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Menu:
    """A step op by op with its costs, and by region class what its calls can choose from, the most saved bytes first."""

    problem: Problem
    choices: Mapping[int, tuple[Choice, ...]]
    homes: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)  # by module path, in the order they run: what its state can choose from

    def choice(self, call: int, name: str) -> Choice:
        return next(choice for choice in self.choices[self.problem.graph.calls[call].region] if choice.name == name)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What one call of a region does. Distances are counted in region calls that have a plan."""

    choice: str
    sent: tuple[str, ...] = ()  # saved values that leave after forward, by name, and INPUTS
    tier: str = "dram"
    release: int = 1  # after the forward of so many calls later, compute waits for the copies and the device's bytes are free
    fetch: int = 1  # copies back start before the backward of the call so many later in program order, so many earlier in backward


class When(NamedTuple):
    """When lasting state that is elsewhere moves."""

    update: str = "after"  # its updates run "after" backward and under the next forward, or in "backward"
    ahead: int = 1  # parameters are on their way while the region so many before theirs runs
    in_flight: int = FEW_IN_FLIGHT  # regions whose gradients may wait on the device for updates that pass through it, before backward waits for these


@dataclass(frozen=True, slots=True)
class Program:
    calls: Mapping[int, CallPlan]  # by region call; those left out run as they are
    policy: str = ""
    words: tuple[str, ...] = field(default=())  # what was decided, for people
    outside: Mapping[int, CallPlan] = field(default_factory=dict)  # by how many planned calls come before: what ops outside of regions save is sent
    states: Mapping[str, Placement] = field(default_factory=dict)  # by module path; parameters of no path stay on the device
    update: str = When().update
    ahead: int = When().ahead
    in_flight: int = When().in_flight

    @property
    def when(self) -> When:
        return When(self.update, self.ahead, self.in_flight)

    @property
    def sends(self) -> bool:
        """Whether calls send what they save."""
        return any(plan.sent for plan in self.calls.values())
