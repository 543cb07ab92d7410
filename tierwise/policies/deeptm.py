"""deeptm: rank tensors by heat, a weighted sum of four of their traits, and move the coldest; the weights are learned on the simulator.

Paper    Zhou, Rang, Chen, Zhou, Cheng, TPDS 2024.
Idea     how often a tensor is used, how large it is, how soon it is used again and what it is for tell whether it should be in fast memory; how
         much each of them counts depends on the model and the machine, and can be learned.
Rule     heat = w · (uses, smallness, nearness of the next use, kind), each between 0 and 1. Tensors that live and die together are a group and move
         as one. Where memory is short the coldest groups leave in their idle gaps, out at the start and back in time for the next use, until the
         rest fits. An agent changes w and keeps what makes the step faster.
Differs  the paper was not to be had beyond its abstract: what the four traits are and how they are scaled is ours, and its deep reinforcement
         learning is a search by cross-entropy, `rounds` of `samples` weights around the best so far. On a GPU nothing can be read from slow memory,
         so that heat decides who leaves and not who is read there. Pages are not modelled. Where cold gaps have no time for their copies, these are
         waited for.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np

from ..errors import BadInput, InfeasibleBudget
from ..ir import Problem, Role, Schedule
from ..simulate import step_seconds
from ..units import format_bytes, format_seconds
from ._buckets import Buckets
from ._fit import device_peak
from ._gaps import Gap, build
from ._moves import carry_out
from ._runtime import least_on_demand
from ._swaps import PlannedSwap, SwapPlan

DECIDES = "swap by learned heat"
FIDELITY = "like"
EXECUTABLE = True
REQUIRES = {"dram"}
TRAITS = ("uses", "smallness", "nearness", "kind")
# What a storage is for, from cold to hot: optimizer state waits for the end of the step, weights are read again and again.
KIND = {Role.OPTIMIZER_STATE: 0.0, Role.ACTIVATION: 0.25, Role.INPUT: 0.25, Role.GRAD: 0.5, Role.BUFFER: 0.75, Role.PARAM: 1.0}
START, SPREAD = 0.5, 0.3  # of the first weights: all alike, and how far around them the first round looks
ELITE = 2  # whose mean is the middle of the next round
HIDDEN = 1.002  # times the seconds of the ops: nothing is left to be learned
LINE = 0.99  # of the budget: copies are not always in time


def plan(problem: Problem, *, rounds: int = 3, samples: int = 4, time_limit_seconds: float = 30.0, seed: int = 0) -> Schedule:
    """rounds=0: all four traits count alike. Two runs differ only if the time limit ends the search."""
    if rounds < 0 or samples < ELITE:
        raise BadInput(f"rounds is {rounds} and samples {samples}; at least 0 and {ELITE} are needed")
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    least = least_on_demand(problem)
    if least > problem.budget_bytes:
        raise InfeasibleBudget(f"the largest op needs {format_bytes(least)}", least_bytes=least)
    deadline = time.monotonic() + time_limit_seconds
    heat = _Heat(problem)
    middle, spread = np.full(len(TRAITS), START), SPREAD
    tried = [(*heat.attempt(middle), middle)]
    first_seconds, dice = tried[0][0], random.Random(seed)
    for _ in range(rounds):
        for _ in range(samples):
            if tried[0][0] <= HIDDEN * problem.op_starts[-1] or time.monotonic() > deadline:
                break
            weights = np.clip([dice.gauss(float(each), spread) for each in middle], 0.0, 1.0)
            tried.append((*heat.attempt(weights), weights))
        tried.sort(key=lambda one: one[0])
        middle, spread = np.mean([weights for _, _, weights in tried[:ELITE]], axis=0), spread / 2
    seconds, schedule, weights = tried[0]
    learned = ", ".join(f"{trait} {weight:.2f}" for trait, weight in zip(TRAITS, weights, strict=True))
    note = f"tried {len(tried)} weights; {format_seconds(seconds)} with {learned}, {format_seconds(first_seconds)} with all alike"
    return replace(schedule, notes=(note,))


class _Heat:
    """Groups of idle gaps, their traits, and the plan that any weights of them give."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        swaps = SwapPlan(problem, int(LINE * problem.budget_bytes))
        groups: dict[tuple[object, ...], list[Gap]] = {}
        for gap in swaps.gaps:
            found = problem.graph.storages[gap.storage]
            groups.setdefault((gap.start, gap.end, found.role, problem.graph.uses[gap.storage]), []).append(gap)
        self.groups = list(groups.values())
        seconds = dict(zip(((gap.storage, gap.start) for gap in swaps.gaps), swaps.seconds.tolist(), strict=True))
        step = problem.op_starts[-1] or 1.0
        self.traits = np.array([self._traits(group, seconds[group[0].storage, group[0].start] / step) for group in self.groups]).reshape(
            -1, len(TRAITS)
        )
        if len(self.groups):
            self.traits[:, :2] /= np.maximum(self.traits[:, :2].max(axis=0), 1e-300)
            self.traits[:, 1] = 1 - self.traits[:, 1]

    def _traits(self, group: list[Gap], idle_share: float) -> tuple[float, float, float, float]:
        graph, storage = self.problem.graph, group[0].storage
        return len(graph.uses[storage]), sum(gap.nbytes for gap in group), 1 - idle_share, KIND[graph.storages[storage].role]

    def attempt(self, weights: np.ndarray) -> tuple[float, Schedule]:
        problem = self.problem
        swaps = SwapPlan(problem, int(LINE * problem.budget_bytes))
        device, link = problem.device_tier, problem.machine.link
        out = {tier: link(device, tier) for tier in swaps.tiers}
        back = {tier: link(tier, device) for tier in swaps.tiers}
        buckets = Buckets(problem.device_seconds, [*out.values(), *back.values()])
        for at in np.argsort(self.traits @ weights, kind="stable"):
            if swaps.fits(swaps.line):
                break
            for gap in self.groups[at]:
                tier = next((tier for tier in swaps.tiers if swaps.has_room(tier, gap)), None)
                if tier is None:
                    continue
                last = gap.end - swaps.ops if gap.wraps else gap.end
                gone = buckets.end_op(out[tier], gap.start + 1, gap.nbytes) + 1
                fetch = buckets.start_op(back[tier], last, gap.nbytes)
                if gap.wraps:
                    gone, fetch = min(gone, swaps.ops), max(fetch, 0) + swaps.ops
                if fetch < gone or not swaps.is_pressed(gone, fetch):
                    continue
                buckets.fill_from(out[tier], gap.start + 1, gap.nbytes)
                buckets.fill_until(back[tier], last, gap.nbytes)
                swaps.add(PlannedSwap(gap, tier, gone, fetch))
        swaps.force()
        swaps.pull_earlier()
        schedule = carry_out(problem, swaps.moves(), home=swaps.homes())
        return step_seconds(problem, schedule), schedule
