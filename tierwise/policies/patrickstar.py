"""patrickstar: parameters and optimizer state in chunks; a chunk comes to the device when an op needs it, and the one needed last goes.

Paper    Fang, Zhu, Li, Su, You, Zhou, TPDS 2022, arXiv:2108.05818; prefetch as in Colossal-AI's Gemini.
Idea     chunks move at the full speed of the link, and a warm-up step tells what is left for them beside activations at every moment.
Rule     chunks of 64 Mi numbers in order of use. Room for chunks at op k = 0.8 · budget - what else is there at k. Before op k fetch the chunks it
         reads; over the room, evict the chunk whose next use is farthest: its host copy is current, so nothing is written. Gradients leave as they
         come, updates run on the cpu, and what room is left when all chunks fit holds chunks with their state, updated on the device.
         prefetch (Gemini): fetch so many chunks ahead while they fit.
Differs  gradients do not take over their parameters' bytes, as they do there. As many chunks stay with their state as fit, not 0.8 of them. Updates
         lie under the next step's forward as far as its reads allow. Chunks are made smaller, and all of the budget is used, where the step would
         not fit otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import BadInput, InfeasibleBudget
from ..ir import Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step
from ..units import format_bytes
from ._fit import largest_that_fits
from ._gaps import device_bytes

DECIDES = "parameters in chunks, update on the cpu"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: the runtime of lasting state moves units of one module, not chunks"
REQUIRES = {"dram", "cpu"}
CHUNK_BYTES = 128 << 20  # 64 Mi numbers of two bytes
SHARE = 0.8  # of the device, for chunks and all else


@dataclass(frozen=True, slots=True)
class _Chunk:
    parameters: tuple[int, ...]
    nbytes: int
    state_bytes: int
    uses: tuple[int, ...]  # ops on the device that read one of its parameters
    updates: tuple[int, ...]


def plan(problem: Problem, *, chunk_bytes: int = CHUNK_BYTES, prefetch: int = 0, tier: str = "dram", processor: str = "cpu") -> Schedule:
    """prefetch: how many chunks ahead are fetched while there is room; 0 is PatrickStar, which fetches when an op needs them."""
    if chunk_bytes < 1 or prefetch < 0:
        raise BadInput(f"chunk_bytes is {chunk_bytes} and prefetch {prefetch}; chunks have at least a byte, and 0 or more of them are fetched ahead")
    least: list[int] = []
    for size in _sizes(problem, chunk_bytes):
        for share in (SHARE, 1.0):
            planner = _Planner(problem, size, prefetch, tier, processor, share)
            try:
                return planner.plan()
            except InfeasibleBudget as error:
                if error.least_bytes is not None:
                    least.append(error.least_bytes)
    raise InfeasibleBudget(f"patrickstar needs at least {format_bytes(min(least))}", least_bytes=min(least))


def _sizes(problem: Problem, chunk_bytes: int) -> Iterator[int]:
    """The size asked for, an eighth of it, and single parameters."""
    largest = sum(s.nbytes for s in problem.graph.storages if s.role is Role.PARAM)
    size = max(1, min(chunk_bytes, largest))
    yield from dict.fromkeys((size, max(1, size // 8), 1))


class _Planner:
    def __init__(self, problem: Problem, chunk_bytes: int, prefetch: int, tier: str, processor: str, share: float) -> None:
        self.problem, self.graph, self.prefetch, self.share = problem, problem.graph, prefetch, share
        self.device, self.on, self.tier, self.processor = problem.device_tier, problem.machine.device.name, tier, processor
        self.moved = {op.id for op in self.graph.ops if op.phase is Phase.UPDATE and (op.id, processor) in problem.costs.op_seconds}
        self.chunks = self._make_chunks(chunk_bytes)

    def plan(self) -> Schedule:
        """As many chunks with their state on the device as fit beside all the others."""
        return largest_that_fits(self.problem, 0, len(self.chunks), self._schedule)[1]

    # -- chunks -----------------------------------------------------------------------------------------------------------------------

    def _make_chunks(self, chunk_bytes: int) -> list[_Chunk]:
        """Parameters whose only writers are updates on the cpu, in order of first use."""
        graph = self.graph
        members = [
            s.id for s in graph.storages
            if s.role is Role.PARAM and graph.writers[s.id] and set(graph.writers[s.id]) <= self.moved and self._uses_here(s.id)
        ]  # fmt: skip
        found: list[list[int]] = []
        filled = 0
        for storage in sorted(members, key=lambda s: (self._uses_here(s)[0], s)):
            nbytes = graph.storages[storage].nbytes
            if not found or filled + nbytes > chunk_bytes:
                found.append([])
                filled = 0
            found[-1].append(storage)
            filled += nbytes
        return [self._chunk(parameters) for parameters in found]

    def _chunk(self, parameters: Sequence[int]) -> _Chunk:
        graph = self.graph
        updates = sorted({writer for s in parameters for writer in graph.writers[s]})
        touched = {s for op in updates for s in graph.ops[op].mutates + graph.ops[op].writes}
        state = sum(graph.storages[s].nbytes for s in touched.difference(parameters))
        uses = sorted({use for s in parameters for use in self._uses_here(s)})
        return _Chunk(tuple(parameters), sum(graph.storages[s].nbytes for s in parameters), state, tuple(uses), tuple(updates))

    def _uses_here(self, storage: int) -> list[int]:
        return [op for op in self.graph.uses[storage] if op not in self.moved]

    # -- the step ---------------------------------------------------------------------------------------------------------------------

    def _schedule(self, resident: int) -> Schedule:
        """The first `resident` chunks live on the device with their state; the others come and go."""
        away = self.chunks[resident:]
        on_cpu = {op for op in self.moved if not any(op in chunk.updates for chunk in self.chunks[:resident])}
        home = self._homes(away, on_cpu)
        without = Schedule(tuple(self._steps({}, {}, on_cpu, home)), home)
        held = device_bytes(self.problem, without)
        room = [int(self.share * self.problem.budget_bytes) - nbytes for nbytes in held]
        fetched, freed = self._belady(away, room)
        return Schedule(tuple(self._steps(fetched, freed, on_cpu, home)), home)

    def _homes(self, away: list[_Chunk], on_cpu: set[int]) -> dict[int, tuple[str, ...]]:
        graph = self.graph
        home: dict[int, tuple[str, ...]] = {s.id: (self.device,) for s in graph.storages if s.lasting or s.role is Role.INPUT}
        chunked = {s for chunk in away for s in chunk.parameters}
        for op in on_cpu:
            for storage in graph.ops[op].mutates + graph.ops[op].writes:
                if graph.storages[storage].lasting:
                    both = storage not in chunked and any(use not in on_cpu for use in graph.uses[storage])
                    home[storage] = (self.device, self.tier) if both else (self.tier,)
        return home

    def _belady(self, chunks: list[_Chunk], room: list[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """For each op, the parameters that are freed and those that are fetched before it."""
        fetched: dict[int, list[int]] = {}
        freed: dict[int, list[int]] = {}
        here: list[int] = []
        order = sorted((use, index) for index, chunk in enumerate(chunks) for use in chunk.uses)

        def evict(at: int, needed: set[int], keep_bytes: int) -> None:
            while here and sum(chunks[i].nbytes for i in here) + keep_bytes > room[at]:
                victims = [i for i in here if i not in needed]
                if not victims:
                    return
                victim = max(victims, key=lambda i: (_next_use(chunks[i], at), i))
                here.remove(victim)
                freed.setdefault(at, []).extend(chunks[victim].parameters)

        place = 0
        for op in self.graph.ops:
            if op.id in self.moved:
                continue
            needed = (
                {index for index, chunk in enumerate(chunks) if op.id in chunk.uses} if place < len(order) and order[place][0] == op.id else set()
            )
            missing = sorted(needed.difference(here))
            evict(op.id, needed, sum(chunks[i].nbytes for i in missing))
            for index in missing:
                here.append(index)
                fetched.setdefault(op.id, []).extend(chunks[index].parameters)
            while place < len(order) and order[place][0] <= op.id:
                place += 1
            for index in list(here):
                if _next_use(chunks[index], op.id + 1) > len(self.graph.ops):  # nobody needs it any more in this step
                    here.remove(index)
                    freed.setdefault(op.id + 1, []).extend(chunks[index].parameters)
            self._fetch_ahead(op, order[place:], chunks, here, room, fetched)
        return fetched, freed

    def _fetch_ahead(
        self, op: Op, order: list[tuple[int, int]], chunks: list[_Chunk], here: list[int], room: list[int], fetched: dict[int, list[int]]
    ) -> None:
        ahead: list[int] = []
        for use, index in order:
            if len(ahead) == self.prefetch:
                return
            if index in here or index in ahead:
                continue
            held = sum(chunks[i].nbytes for i in here) + chunks[index].nbytes
            if held > min(room[op.id : use + 1]):
                return
            ahead.append(index)
            here.append(index)
            fetched.setdefault(op.id + 1, []).extend(chunks[index].parameters)

    def _steps(
        self, fetched: dict[int, list[int]], freed: dict[int, list[int]], on_cpu: set[int], home: dict[int, tuple[str, ...]]
    ) -> Iterator[Step]:
        graph = self.graph
        last_here = {s.id: max((use for use in graph.uses[s.id] if use not in on_cpu), default=-1) for s in graph.storages}
        yield from (Free(s.id, self.device) for s in graph.storages if s.role is Role.INPUT and not graph.uses[s.id])
        for op in graph.ops:
            yield from (Free(storage, self.device) for storage in freed.get(op.id, ()))
            if op.id in on_cpu:
                continue
            yield from (Copy(storage, self.tier, self.device) for storage in fetched.get(op.id, ()))
            yield Compute(op.id, self.on)
            for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
                if graph.storages[storage].lasting or storage in graph.consumed_by or last_here[storage] != op.id:
                    continue
                if any(use in on_cpu for use in graph.uses[storage]):
                    yield Copy(storage, self.device, self.tier)
                yield Free(storage, self.device)
        yield from (Free(storage, self.device) for storage in freed.get(len(graph.ops), ()))
        for op in graph.ops:
            if op.id in on_cpu:
                yield from self._update(op, home)

    def _update(self, op: Op, home: dict[int, tuple[str, ...]]) -> Iterator[Step]:
        graph = self.graph
        yield Compute(op.id, self.processor)
        for storage in op.reads:
            if not graph.storages[storage].lasting and max(graph.uses[storage]) == op.id:
                yield Free(storage, self.tier)
        for storage in op.mutates + op.writes:
            if graph.storages[storage].lasting and self.device in home[storage]:
                yield Copy(storage, self.tier, self.device)


def _next_use(chunk: _Chunk, at: int) -> float:
    """The next op that needs it from op `at` on; past all ops if there is none in this step."""
    place = bisect_right(chunk.uses, at - 1)
    return chunk.uses[place] if place < len(chunk.uses) else float("inf")
