"""What a policy answers: a list of Compute, Copy and Free, and where each lasting storage lives. Everything published is such a list.

A schedule is one period of a loop. `iteration = -1` names the step before: its gradients, its updates. The list has an order for memory
(an allocation may count on every Free before it); time follows from what each step needs (simulate/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WORKSPACE = -1  # in Schedule.addresses: the scratch bytes of a Compute, which belong to no storage
AT_START = -1  # in Schedule.addresses: what is there when the period begins


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op. A second Compute of the same op is a recomputation."""

    op: int
    on: str = "gpu"
    iteration: int = 0
    variant: str = ""  # another way to run it, one of Costs.variants


@dataclass(frozen=True, slots=True)
class Copy:
    """Starts after the previous Compute, in the list, of the processor at its device end.

    A form is "", the storage as ops read it, or a codec's name, its encoded bytes. Within one tier a Copy encodes or decodes on the processor
    that works there; between tiers bytes go as they are, unless the link has an engine for the codec.
    """

    storage: int
    src: str
    dst: str
    iteration: int = 0
    fault: bool = False  # the next op touched it where it was not, and faults its way through it: Link.fault_seconds
    src_form: str = ""
    dst_form: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Gives bytes back once nothing uses them any more; allocations after it in the list may count on them."""

    storage: int
    tier: str
    join: bool = False  # the device waits too, until the last copy that uses these bytes is done: vDNN's end of layer
    iteration: int = 0
    form: str = ""


Step = Compute | Copy | Free


def held_as(tier: str, form: str) -> str:
    """A tier and a form as one name, as the judge and the clock tell them apart: "hbm", "hbm as zvc"."""
    return f"{tier} as {form}" if form else tier


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: tuple[Step, ...]
    home: Mapping[int, tuple[str, ...]]  # lasting storages start and must end there; inputs arrive there
    addresses: Mapping[tuple[int, int], int] = field(default_factory=dict)  # (step, storage) -> byte offset in the tier it is put in
    notes: tuple[str, ...] = field(default=(), compare=False)  # what its planner says of it, for people: how far a search came
