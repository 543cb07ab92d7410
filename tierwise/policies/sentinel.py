"""sentinel: move tensors at the start of every few layers: in what the next few use, out what they do not, in intervals that hide most of it.

Paper    Ren, Luo, Wu, Zhang, Jeon, Li, HPCA 2021.
Idea     most tensors live within one layer and should never move; the others can be moved ahead, in intervals long enough to hide the copies and
         short enough that what they use fits.
Rule     a reserved part of fast memory, as large as they ever are together, belongs to tensors that live within a layer. At the start of an
         interval, tensors that the next one uses are fetched and, as far as they and what is born need room, tensors that neither of the two uses
         are evicted, farthest next use first. The length of the interval: what it uses fits beside the reserve, and the seconds by which moves
         outlast their intervals are least. What is not there in time is waited for.
Differs  the paper's text was not to be had; its rule is as we remember it. Of the lengths with the least estimate, `trials` are tried on the clock
         (the paper tries waiting against not waiting, which a GPU cannot choose). No reserve is set aside by address, and nothing shares pages, so
         that tensors need not be grouped. Layers are calls of regions, or ops where there are none. Where an interval's tensors do not fit, the one
         needed last goes on demand.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import groupby

import numpy as np

from ..errors import InfeasibleBudget
from ..ir import Graph, Op, Problem, Role, Schedule
from ..simulate import step_seconds
from ..units import format_bytes
from ._fit import device_peak
from ._gaps import build
from ._moves import Move, carry_out
from ._runtime import homes_elsewhere, least_on_demand, staging_bytes, swap_tiers

DECIDES = "swap by intervals of layers"
FIDELITY = "like"
EXECUTABLE = True
REQUIRES = {"dram"}
LONGEST = 64  # layers in an interval, at most


def plan(problem: Problem, *, interval: int | None = None, trials: int = 3) -> Schedule:
    """interval: layers in a migration interval; found unless given. trials: how many lengths are tried on the clock."""
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    least = least_on_demand(problem)
    if least > problem.budget_bytes:
        raise InfeasibleBudget(f"the largest op needs {format_bytes(least)}", least_bytes=least)
    layers = layers_of(problem.graph)
    lengths = range(1, min(LONGEST, len(layers)) + 1) if interval is None else [max(1, interval)]
    walks = [_Walk(problem, layers, length) for length in lengths]
    # First those whose tensors fit, then whoever is exposed least; of equals the shortest interval.
    ranked = sorted(walks, key=lambda walk: (not walk.fits, walk.exposed_seconds, walk.length))
    tried = [carry_out(problem, walk.moves, home=walk.homes) for walk in ranked[: max(1, trials)]]
    return min(tried, key=lambda schedule: step_seconds(problem, schedule)) if len(tried) > 1 else tried[0]


def layers_of(graph: Graph) -> list[range]:
    """Runs of ops of one region call in one phase; an update belongs to the call that first used what it changes. Without regions, each op."""
    if not any(op.region >= 0 for op in graph.ops):
        return [range(op.id, op.id + 1) for op in graph.ops]

    def label(op: Op) -> tuple[str, int]:
        if op.region < 0 and op.mutates:
            return op.phase, graph.ops[graph.uses[op.mutates[0]][0]].region
        return op.phase, op.region

    runs = [list(run) for _, run in groupby(graph.ops, key=label)]
    return [range(run[0].id, run[-1].id + 1) for run in runs]


class _Walk:
    """The moves for one length of interval, and how many seconds of them no interval hides."""

    def __init__(self, problem: Problem, layers: list[range], length: int) -> None:
        self.problem, self.length = problem, length
        self._starts = [layers[at].start for at in range(0, len(layers), length)]
        self._tier = swap_tiers(problem)[0]
        self._size = [s.nbytes for s in problem.graph.storages]
        self._lasting = [s.lasting for s in problem.graph.storages]
        self._there_at_start = [problem.graph.is_there_at_start(s.id) for s in problem.graph.storages]
        self._used: dict[int, list[int]] = {}  # long-lived storage -> the intervals that use it
        self._room = problem.budget_bytes - staging_bytes(problem) - self._reserve([layer.start for layer in layers])
        self._by_interval: list[dict[int, None]] = [{} for _ in self._starts]
        for storage, intervals in self._used.items():
            for interval in intervals:
                self._by_interval[interval][storage] = None
        device, inputs = problem.device_tier, set(self._inputs())
        self.homes = homes_elsewhere(problem)
        # The first walk shows what is there when a step ends, and so when it begins.
        stay = self._stay(self._walk(set(inputs)))
        self.homes |= dict.fromkeys(stay, (device,))
        self._walk(inputs.union(stay))

    def _reserve(self, layer_starts: list[int]) -> int:
        """Notes what lives longer than a layer; returns the most bytes that all else has at once."""
        graph = self.problem.graph
        reserve = np.array([op.workspace_bytes for op in graph.ops], dtype=np.int64)
        for storage in graph.storages:
            uses = graph.uses[storage.id]
            if not storage.nbytes or not uses:
                continue
            if storage.lasting or bisect_right(layer_starts, uses[0]) != bisect_right(layer_starts, uses[-1]):
                self._used[storage.id] = sorted({bisect_right(self._starts, op) - 1 for op in uses})
            else:
                reserve[uses[0] : uses[-1] + 1] += storage.nbytes
        return int(reserve.max(initial=0))

    def _inputs(self) -> list[int]:
        return [s.id for s in self.problem.graph.storages if s.role is Role.INPUT and s.id in self._used]

    def _stay(self, resident: set[int]) -> list[int]:
        """Of what lasts and is there at the end, what there is room for when a step begins."""
        graph = self.problem.graph
        room = self.problem.budget_bytes - staging_bytes(self.problem) - sum(s.nbytes for s in graph.storages if s.role is Role.INPUT)
        found = []
        for storage in sorted(resident, key=lambda s: (graph.uses[s][0], s)):
            if self._lasting[storage] and self._there_at_start[storage] and self._size[storage] <= room:
                room -= self._size[storage]
                found.append(storage)
        return found

    def _walk(self, resident: set[int]) -> set[int]:
        """Go through the intervals; returns what is on the device at the end."""
        self.moves: list[Move] = []
        self.fits, self.exposed_seconds = True, 0.0
        held = sum(self._size[s] for s in resident)
        for interval, start in enumerate(self._starts):
            now, following = self._by_interval[interval], self._following(interval)
            absent = [s for s in now if s not in resident]
            late = self._in_turn((s for s in absent if self._exists_before(s, interval)), start)
            coming = (s for s in following if s not in resident and s not in now and self._exists_before(s, interval))
            ahead = self._in_turn(coming, start)
            wanted = sum(self._size[s] for s in (*absent, *ahead))
            out = []
            if held + wanted > self._room:
                idle = resident.difference(now, following)
                for storage in sorted(idle, key=lambda s: (-self._next(s, interval), s)):
                    out.append(storage)
                    held -= self._size[storage]
                    if held + wanted <= self._room:
                        break
            while ahead and held + wanted > self._room:
                wanted -= self._size[ahead.pop()]
            held += wanted
            self.fits &= held <= self._room
            self.moves += [Move(start, storage, self._tier) for storage in out]
            self.moves += [Move(start, storage, self.problem.device_tier) for storage in (*late, *ahead)]
            self._expose(interval, out, ahead, late)
            resident.difference_update(out)
            resident.update(absent, ahead)
            dead = [s for s in now if self._used[s][-1] == interval and not self._lasting[s]]
            resident.difference_update(dead)
            held -= sum(self._size[s] for s in dead)
        return resident

    def _following(self, interval: int) -> dict[int, None]:
        """What the next interval uses; behind the last one comes the next step's first."""
        if interval + 1 < len(self._starts):
            return self._by_interval[interval + 1]
        return {s: None for s in self._by_interval[0] if self._lasting[s]} if self.problem.cyclic else {}

    def _in_turn(self, storages: Iterable[int], start: int) -> list[int]:
        """In the order in which ops from `start` on need them."""

        def first_use(storage: int) -> tuple[int, int]:
            uses = self.problem.graph.uses[storage]
            at = bisect_left(uses, start)
            return (uses[at] if at < len(uses) else len(self.problem.graph.ops) + uses[0]), storage

        return sorted(storages, key=first_use)

    def _exists_before(self, storage: int, interval: int) -> bool:
        """Whether it is there, somewhere, when the interval begins."""
        return self._there_at_start[storage] or self._used[storage][0] < interval

    def _next(self, storage: int, interval: int) -> int:
        used = self._used[storage]
        at = bisect_right(used, interval)
        return used[at] if at < len(used) else len(self._starts) + used[0]

    def _expose(self, interval: int, out: list[int], ahead: list[int], late: list[int]) -> None:
        """Moves that outlast their interval are waited for, and so is all that comes late."""
        machine, device = self.problem.machine, self.problem.device_tier
        end = self._starts[interval + 1] if interval + 1 < len(self._starts) else len(self.problem.graph.ops)
        seconds = self.problem.op_starts[end] - self.problem.op_starts[self._starts[interval]]
        leaving = sum(machine.copy_seconds(self._size[s], device, self._tier) for s in out)
        coming = sum(machine.copy_seconds(self._size[s], self._tier, device) for s in ahead)
        waiting = sum(machine.copy_seconds(self._size[s], self._tier, device) for s in late)
        self.exposed_seconds += waiting + max(0.0, leaving - seconds, coming - seconds)
