"""What was decided for one shape of step, and what to say about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..execute.passes import RegionPlan
from ..ir import INPUTS, Curve, Menu, Program, Run, Timeline, Within
from ..lower import Image
from ..units import format_bytes, format_seconds

SLAB_SLACK = 1.02  # parcels lie on borders and leave gaps
SLAB_ROUNDING_BYTES = 1 << 16


@dataclass(frozen=True)
class Plan:
    """One plan: what each region call does, and what was predicted. `summary()` says it in words."""

    menu: Menu
    program: Program
    image: Image
    predicted: Timeline
    held_bytes: Mapping[str, int]  # at most, by tier, in the order of the schedule
    plans: Mapping[tuple[str, int], RegionPlan]
    budget_bytes: int
    aside_bytes: int  # on the device besides the step: libraries, and what else the process keeps there
    keep_all_seconds: float
    keep_all_bytes: int
    notes: tuple[str, ...]
    kept: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # module path -> its forward with the choice that saves the most

    @property
    def peak_bytes(self) -> int:
        """Predicted, of what the allocator has given out. Memory is freed where the schedule frees it, not when a copy happens to be done."""
        return self.held_bytes[self.image.problem.device_tier] + self.aside_bytes

    @property
    def host_bytes(self) -> int:
        return self.held_bytes.get("dram", 0)

    @property
    def disk_bytes(self) -> int:
        return self.held_bytes.get("nvme", 0)

    @property
    def host_slab_bytes(self) -> int:
        """What the slab must hold: without the disk's buffers, which are elsewhere, and with room for rounding."""
        staging = sum(link.staging_bytes for link in self.menu.problem.machine.links if link.staging_tier == "dram")
        held = self.host_bytes - (staging if self.disk_bytes else 0)
        return int(held * SLAB_SLACK) + SLAB_ROUNDING_BYTES if held > 0 else 0

    def summary(self) -> str:
        return "\n".join(self.words())

    def words(self) -> list[str]:
        graph = self.menu.problem.graph
        found = [
            f"budget {format_bytes(self.budget_bytes)}; keeping everything takes {format_bytes(self.keep_all_bytes)} and "
            f"{format_seconds(self.keep_all_seconds)} a step; planned: {format_bytes(self.peak_bytes)} and {format_seconds(self.predicted.seconds)} "
            f"({self.predicted.seconds / self.keep_all_seconds:.2f}×)"
        ]
        if all(plan.choice == "keep" and not plan.sent for plan in self.program.calls.values()):
            found.append("everything fits: nothing is recomputed and nothing is copied")
        for region in graph.regions:
            plans = [(call, plan) for call, plan in self.program.calls.items() if graph.calls[call].region == region.id]
            for (choice, tier), count in Counter((plan.choice, plan.tier if plan.sent else "") for _, plan in plans).items():
                call, plan = next((call, plan) for call, plan in plans if (plan.choice, plan.tier if plan.sent else "") == (choice, tier))
                option = self.menu.choice(call, choice)
                line = f"{count} × {region.kind}: {choice}, saves {format_bytes(option.saved_bytes)} a call"
                if tier:
                    what = "that and its input" if INPUTS in plan.sent and option.saved else "its input" if INPUTS in plan.sent else "that"
                    line += f", and sends {what} to {tier} until backward"
                found.append(line)
        return [*found, *self.notes]

    def run(self, name: str, measured: Timeline | None = None) -> Run:
        """For a report."""
        return Run(
            name,
            problem=self.image.problem.with_budget(self.budget_bytes),  # what was asked for, not what is left of it for the step
            schedule=self.image.schedule,
            predicted=self._with_aside(),
            measured=measured,
            policy=self.program.policy,
            words=tuple(self.words()),
            within=tuple(self._within()),
        )

    def _with_aside(self) -> Timeline:
        """The prediction with what is on the device besides the step, which a measurement has in it, too."""
        if not self.aside_bytes:
            return self.predicted
        tier = self.image.problem.device_tier
        memory = {**self.predicted.memory, tier: {**self.predicted.memory.get(tier, {}), "aside": Curve((0.0,), (self.aside_bytes,))}}
        peaks = {**self.predicted.peak_bytes, tier: self.predicted.peak_bytes[tier] + self.aside_bytes}
        return replace(self.predicted, peak_bytes=peaks, memory=memory)

    def _within(self) -> Iterator[Within]:
        """What each block recomputes inside its backward: what it saves less, and takes longer, than the choice that saves everything."""
        graph = self.menu.problem.graph
        for call, plan in self.program.calls.items():
            kept, chosen = self.menu.choices[graph.calls[call].region][0], self.menu.choice(call, plan.choice)
            yield Within(graph.calls[call].module, kept.saved_bytes - chosen.saved_bytes, chosen.seconds - kept.seconds)
