"""What a policy is asked: this graph, on this machine, at these costs. The budget is the capacity of the device's tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .graph import Graph
from .machine import Machine


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of an op on a processor; a processor that is missing cannot run the op."""

    op_seconds: Mapping[tuple[int, str], float]


@dataclass(frozen=True)
class Problem:
    graph: Graph
    machine: Machine
    costs: Costs
    cyclic: bool = True  # steps follow each other; False is one cold step, as in a trace

    @property
    def budget_bytes(self) -> int:
        return self.machine.capacity(self.machine.device.tier)

    @property
    def device_tier(self) -> str:
        return self.machine.device.tier

    @cached_property
    def device_seconds(self) -> tuple[float, ...]:
        """Seconds of each op on the device; an op only another processor can run costs 0 of the device's time."""
        device = self.machine.device.name
        return tuple(self.costs.op_seconds.get((op.id, device), 0.0) for op in self.graph.ops)

    @cached_property
    def op_starts(self) -> tuple[float, ...]:
        """When each op would start if all ran in order on the device with every byte there; one more entry, the end."""
        starts = [0.0]
        for seconds in self.device_seconds:
            starts.append(starts[-1] + seconds)
        return tuple(starts)

    def seconds(self, op: int, processor: str) -> float:
        return self.costs.op_seconds[op, processor]

    def with_budget(self, budget_bytes: int) -> Problem:
        return replace(self, machine=self.machine.with_capacity(self.device_tier, budget_bytes))
