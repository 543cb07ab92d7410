"""Every exception Tierwise raises on purpose. Each message says what is wrong with its values, what would be right, and what to do.

TierwiseError
├── BadInput              a value the user gave makes no sense: units, options, files, names
│   ├── UnknownName       a policy, machine or option that does not exist; names the nearest one
│   └── BadFile           a file that is missing, corrupt, of another kind, or made for another graph
│       └── ForeignFile   ... or that another program wrote
├── CaptureError          a model that cannot be traced, with the place in its code
│   └── CannotCapture     ... one call of a submodule, as one graph; it can run as it is, its tensors kept or copied but not recomputed
├── InvalidGraph          a graph that breaks the rules of the IR
├── InvalidSchedule       a schedule the judge refuses, with the step and the reason
│   └── OverCapacity      ... because a tier would overflow; carries the bytes it would need
├── InfeasibleBudget      no plan of this policy fits; carries the smallest budget it can do, when known
│   └── RecomputeLimit    ... because recomputation would take longer than it is allowed to
├── NotExecutable         a schedule that can be simulated but not be run as calls of regions, with the reason
├── NotExact              verify=True found that a planned step gives something else than the untouched one
├── ChangedInPlace        what backward needs was written to in place after its forward; a RuntimeError, as torch raises it itself
├── MissingTier           the machine lacks a tier, link or processor that the policy needs
├── OutOfTierMemory       at run time a tier was asked for bytes it does not have
│   ├── OutOfDeviceMemory ... the device; the runtime's own is a torch.OutOfMemoryError too
│   └── OutOfHostMemory   ... the host, or the limit the user set on it
├── CopyFault             a copy between tiers failed; what it should have brought must not be used
└── StorageFault          the disk tier failed: its directory, its file, its device
    ├── StorageFull       ... no space left, at the start or while writing
    └── CorruptBlock      ... what was read back is not what was written
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TierwiseError(Exception):
    """The root: catch this to catch everything of ours."""


class BadInput(TierwiseError):
    """A value the user gave makes no sense."""


class UnknownName(BadInput):
    """A name that is not in a list of names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class BadFile(BadInput):
    """A file that is missing, corrupt, of another kind, or made for another graph."""


class ForeignFile(BadFile):
    """JSON that Tierwise did not write; a trace reader may know it."""


class CaptureError(TierwiseError):
    """A model, or the batch it was given, cannot be traced."""


class CannotCapture(CaptureError):
    """One call of a submodule cannot be made one graph of ops; `reason` says what stands in the way."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not one graph of ops: {reason}; the call can run as it is, its tensors kept or copied but not recomputed")
        self.reason = reason


class InvalidGraph(TierwiseError):
    """A graph that breaks the rules of the IR."""


class InvalidSchedule(TierwiseError):
    """A schedule the judge refuses."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}" if step >= 0 else reason)
        self.step = step
        self.reason = reason


class OverCapacity(InvalidSchedule):
    """A tier would overflow in list order; `needed_bytes` is the tier's peak over the whole schedule."""

    def __init__(self, step: int, reason: str, *, tier: str, needed_bytes: int) -> None:
        super().__init__(step, reason)
        self.tier = tier
        self.needed_bytes = needed_bytes


class InfeasibleBudget(TierwiseError):
    """The policy has no plan within the budget; `least_bytes` is the smallest budget it can do, None if unknown."""

    def __init__(self, message: str, *, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class RecomputeLimit(InfeasibleBudget):
    """A replay within the budget recomputes more than it is allowed to."""


class MissingTier(TierwiseError):
    """The machine lacks a tier, link or processor that the policy needs."""


class OutOfTierMemory(TierwiseError):
    """At run time a tier was asked for bytes it does not have."""


class OutOfDeviceMemory(OutOfTierMemory):
    """The device has no room for an allocation."""


class OutOfHostMemory(OutOfTierMemory):
    """The host, or the limit the user set on it, has no room for an allocation."""


class CopyFault(TierwiseError):
    """A copy between tiers failed; what it should have brought must not be used."""


class StorageFault(TierwiseError):
    """The disk tier failed: its directory, its file, its device."""


class StorageFull(StorageFault):
    """The disk has no space left, at the start or while writing."""


class CorruptBlock(StorageFault):
    """What was read back from disk is not what was written."""


class NotExecutable(TierwiseError):
    """A schedule that cannot be run as region calls; it can be simulated."""


class NotExact(TierwiseError):
    """A planned step does not give what the untouched one gives."""


class ChangedInPlace(TierwiseError, RuntimeError):
    """What backward needs was written to in place after its forward."""
