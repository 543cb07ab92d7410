"""What was decided for one shape of step, and what to say about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InfeasibleBudget
from ..execute.passes import RegionPlan
from ..ir import INPUTS, Curve, Menu, Program, Run, Timeline, Within
from ..ir.program import MIN_SENT_BYTES
from ..lower import Image, choose_jointly, with_budget
from ..report.why import change_bytes, decisions, limit, with_less, with_more
from ..units import format_bytes, format_seconds
from .saved import save_program

SLAB_SLACK = 1.02  # parcels lie on borders and leave gaps
SLAB_ROUNDING_BYTES = 1 << 16

LEAVING_UNUSED = 0.7  # of what gradients may take on their way out, as a peak is reached: by 57 measured ones, which were 0.6% off in the mean


@dataclass(frozen=True)
class Plan:
    """One plan: what each region call does, and what was predicted. `summary()` says it in words."""

    menu: Menu
    program: Program
    image: Image
    predicted: Timeline
    held_bytes: Mapping[str, int]  # at most, by tier, in the order of the schedule
    sent_bytes: Mapping[str, int]  # the same without lasting state: what activations take below the device
    plans: Mapping[tuple[str, int], RegionPlan]
    budget_bytes: int
    aside_bytes: int  # on the device besides the step: libraries, and what else the process keeps there
    keep_all_seconds: float
    keep_all_bytes: int
    notes: tuple[str, ...]
    corrections: int = 0  # how many times it was made again with what was measured
    holds_output: bool = True  # whether the loop holds what the model returns until the step is over
    leaving_bytes: int = 0  # of what is aside, for gradients on their way out
    state_host_bytes: int = 0  # that lasting state takes in host memory, with the gradients that come there and what passes
    kept: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # module path -> its forward with the choice that saves the most

    @property
    def peak_bytes(self) -> int:
        """Predicted, of what the allocator has given out. Memory is freed where the schedule frees it, not when a copy happens to be done."""
        return self.held_bytes[self.image.problem.device_tier] + self.aside_bytes

    @property
    def predicted_bytes(self) -> int:
        """What a measured peak is to be compared with. Where gradients leave, as much is there at once as in the order of the schedule. Elsewhere it
        is the peak at the predicted times, and never more than `peak_bytes`: where the simulated device runs ahead of what the schedule waits for, a
        run waits."""
        if self.leaving_bytes:
            return self.peak_bytes - int(LEAVING_UNUSED * self.leaving_bytes)
        return min(self.peak_bytes, self.predicted.peak_bytes[self.image.problem.device_tier] + self.aside_bytes)

    @property
    def host_bytes(self) -> int:
        return self.state_host_bytes + self.sent_bytes.get("dram", 0)

    @property
    def disk_bytes(self) -> int:
        return self.sent_bytes.get("nvme", 0)

    @property
    def host_slab_bytes(self) -> int:
        """What the slab must hold: without the disk's buffers, which are elsewhere, and with room for rounding."""
        staging = sum(link.staging_bytes for link in self.menu.problem.machine.links if link.staging_tier == "dram")
        held = self.sent_bytes.get("dram", 0) - (staging if self.disk_bytes else 0)
        return int(held * SLAB_SLACK) + SLAB_ROUNDING_BYTES if held > 0 else 0

    def summary(self) -> str:
        """What was decided and why, what the step waits for, and what more or less memory would do: planned again for that, a few seconds each."""
        return "\n".join([*self.words(), *self.reasons(), *self.around()])

    def reasons(self) -> list[str]:
        """By class of tensor, and what limits the step."""
        problem, schedule = self.image.problem, self.image.schedule
        within = [(part.nbytes, part.seconds) for part in self._within()]
        freed, seconds = sum(max(0, nbytes) for nbytes, _ in within), sum(max(0.0, seconds) for _, seconds in within)
        inside = [f"inside blocks: {format_bytes(freed)} of activations are recomputed in {format_seconds(seconds)}"] if freed else []
        return [*decisions(problem, schedule), *inside, f"limit: {limit(problem, schedule, self.predicted)}"]

    def around(self, seconds: float = 2.0) -> list[str]:
        """One GiB more, one GiB less: each planned in about so many seconds."""
        if self.program.policy != "auto":
            return []
        now, change = self.predicted.seconds, change_bytes(self.budget_bytes)
        more, less = self._seconds_with(change, seconds), self._seconds_with(-change, seconds)
        return [with_more(change, now if more is None else more, now), with_less(change, less, now)]

    def _seconds_with(self, change: int, seconds: float) -> float | None:
        machine, budget_bytes = self.menu.problem.machine, self.menu.problem.budget_bytes + change
        tiers = [tier for tier in ("dram", "nvme") if tier in machine.tier_named and machine.capacity(tier)]
        try:
            menu = with_budget(self.menu, max(1, budget_bytes))
            return choose_jointly(menu, update=self.program.update, tiers=tiers, min_sent_bytes=MIN_SENT_BYTES, seconds=seconds).seconds
        except InfeasibleBudget:
            return None

    def save(self, path: str | Path) -> None:
        """What was decided, in a file that says which model, shapes, machine and torch it is for; `fitting.saved.load_program` reads it."""
        save_program(self.program, self.menu, self.budget_bytes, path, holds_output=self.holds_output)

    def words(self) -> list[str]:
        graph = self.menu.problem.graph
        found = [
            f"budget {format_bytes(self.budget_bytes)}; keeping everything takes {format_bytes(self.keep_all_bytes)} and "
            f"{format_seconds(self.keep_all_seconds)} a step; planned: {format_bytes(self.peak_bytes)} and {format_seconds(self.predicted.seconds)} "
            f"({self.predicted.seconds / self.keep_all_seconds:.2f}×)"
        ]
        if not self.program.states and all(plan.choice == "keep" and not plan.sent for plan in self.program.calls.values()):
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
        return [*found, *self.program.words, *self.notes]

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
