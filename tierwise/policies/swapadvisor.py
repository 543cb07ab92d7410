"""swapadvisor: breed orders of ops and divisions of the device into slots, give each the swaps it calls for, and keep the fastest on the simulator.

Paper    Huang, Jin, Li, ASPLOS 2020.
Idea     which swaps are good depends on the order of the ops and on where storages can lie; search those two, and derive the swaps.
Rule     genes: an order that keeps all dependencies; for each size the class of slots it lies in; for each class the number of slots, all of them
         within the budget. Swaps: whoever of its class is needed last goes, and everything moves as early as it can (_slots.py).
         Fitness: seconds of the step. Order: a child is its first parent's beginning and the rest in the order of its second; mutated by taking,
         now and then, a random op that is ready. Slots: crossed at one point; mutated by Gaussian steps of classes and counts, then repaired.
Differs  the paper's text was not to be had: sizes of the population, rates and the repair are ours. The first parents are the program's order and the
         divisions with the least bytes and with one class for each size. Slots of a class are counted, not numbered. Workspace has a slot like
         any storage; a storage that takes over another's bytes is of its class. The search ends after max_generations, after `patience` of
         them without gain, after as many tries as max_work allows (ops times tries), or with the time, which alone can make two runs differ.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import BadInput, InfeasibleBudget
from ..ir import Problem, Role, Schedule, peak_bytes
from ..simulate import step_seconds
from ..units import format_bytes, format_seconds
from ._gaps import build
from ._heap import quarter_powers
from ._slots import Slots, precedences, swap_in_slots

DECIDES = "order, slots and swaps"
FIDELITY = "like"
EXECUTABLE = "simulated only: it runs the ops of one region between those of another"
REQUIRES = {"dram"}
MAX_SIZES = 40  # more are rounded up to a quarter of a power of two: a smaller space to search
ELITE = 0.25  # of a population, kept as it is
ANY_READY_OP = 0.02  # how often a mutated order takes a random op that is ready


def plan(
    problem: Problem,
    *,
    population: int = 12,
    max_generations: int = 200,
    patience: int = 3,
    mutation: float = 0.5,
    max_work: int = 150_000,
    time_limit_seconds: float = 45.0,
    seed: int = 0,
    tier: str = "dram",
) -> Schedule:
    """mutation: the share of children whose order, and whose slots, are mutated. With max_generations=0: the program's order and the best first
    division, the swap planner alone."""
    if population < 2 or max_generations < 0 or not 0 <= mutation <= 1:
        raise BadInput(
            f"population {population}, max_generations {max_generations} and mutation {mutation}: at least 2, at least 0 and a share are needed"
        )
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    deadline = time.monotonic() + time_limit_seconds
    search = _Search(problem, random.Random(seed), tier)
    tries = max(population, max_work // max(1, len(problem.graph.ops)))
    search.first_parents(population if max_generations else 0, tries, deadline)
    stale = generation = 0
    while generation < max_generations and stale < patience and search.tries < tries and time.monotonic() < deadline:
        generation += 1
        stale = 0 if search.breed(population, mutation, tries, deadline) else stale + 1
    best = search.best
    if best.schedule is None:
        raise InfeasibleBudget(f"no order and division of slots fits into {format_bytes(problem.budget_bytes)} and {tier}; use a larger budget")
    cut = " and the time was up" if time.monotonic() >= deadline else ""
    note = f"tried {search.tries} pairs of order and slots in {generation} generations{cut}; the first took {format_seconds(search.first_seconds)}"
    return replace(best.schedule, notes=(note,))


@dataclass(frozen=True, slots=True)
class _Genes:
    order: tuple[int, ...]
    classes: tuple[int, ...]  # for each size, the size whose slots it uses, by rank
    counts: tuple[int, ...]  # for each size, the slots of its class, 0 if it is no class


@dataclass(frozen=True, slots=True)
class _Individual:
    genes: _Genes
    seconds: float
    schedule: Schedule | None


class _Search:
    def __init__(self, problem: Problem, dice: random.Random, tier: str) -> None:
        self.problem, self.dice, self.tier = problem, dice, tier
        self.memory = _Memory(problem)
        self.before = precedences(problem.graph)
        self.after: list[list[int]] = [[] for _ in self.before]
        for op, needed in enumerate(self.before):
            for each in needed:
                self.after[each].append(op)
        self.population: list[_Individual] = []
        self.known: set[_Genes] = set()
        self.tries = 0
        self.first_seconds = float("inf")

    @property
    def best(self) -> _Individual:
        return self.population[0]

    # -- generations ----------------------------------------------------------------------------------------------------------------------

    def first_parents(self, population: int, tries: int, deadline: float) -> None:
        program = tuple(range(len(self.before)))
        early = self._rebuild(program, eager=True)
        genes = [_Genes(order, *slots) for order in (program, early) for slots in self.memory.first_divisions()]
        while len(genes) < population:
            parent = genes[len(genes) % 2]
            genes.append(_Genes(self._rebuild(parent.order), *self.memory.mutated(parent.classes, parent.counts, self.dice)))
        self._next(genes, max(population, len(genes)), tries, deadline)

    def breed(self, population: int, mutation: float, tries: int, deadline: float) -> bool:
        """The next generation; whether its best is better than before."""
        before = self.best.seconds
        genes: list[_Genes] = []
        while len(genes) < population - int(ELITE * population):
            mother, father = self._parent(), self._parent()
            order = self._cross_orders(mother.order, father.order)
            slots = self.memory.crossed((mother.classes, mother.counts), (father.classes, father.counts), self.dice)
            if self.dice.random() < mutation:
                order = self._rebuild(order)
            if self.dice.random() < mutation:
                slots = self.memory.mutated(*slots, self.dice)
            genes.append(_Genes(order, *slots))
        self._next(genes, population, tries, deadline)
        return self.best.seconds < before

    def _next(self, genes: Sequence[_Genes], population: int, tries: int, deadline: float) -> None:
        found = list(self.population)
        for each in genes:
            # The first of all is always tried: there must be an answer. What was tried before is here still, or was not good enough.
            if each not in self.known and (not found or (self.tries < tries and time.monotonic() < deadline)):
                self.known.add(each)
                found.append(self._try(each))
        self.population = sorted(found, key=lambda one: one.seconds)[:population]

    def _try(self, genes: _Genes) -> _Individual:
        self.tries += 1
        schedule, seconds = swap_in_slots(self.problem, genes.order, self.memory.slots(genes.classes, genes.counts), tier=self.tier), float("inf")
        if schedule is not None and peak_bytes(self.problem, schedule)[self.tier] <= self.problem.machine.capacity(self.tier):
            seconds = step_seconds(self.problem, schedule)
        if self.tries == 1:
            self.first_seconds = seconds
        return _Individual(genes, seconds, schedule if seconds < float("inf") else None)

    def _parent(self) -> _Genes:
        """The better of two."""
        return self.population[min(self.dice.randrange(len(self.population)) for _ in range(2))].genes

    # -- orders ---------------------------------------------------------------------------------------------------------------------------

    def _cross_orders(self, mother: tuple[int, ...], father: tuple[int, ...]) -> tuple[int, ...]:
        cut = self.dice.randrange(len(mother) + 1)
        begun = set(mother[:cut])
        return mother[:cut] + tuple(op for op in father if op not in begun)

    def _rebuild(self, order: tuple[int, ...], *, eager: bool = False) -> tuple[int, ...]:
        """An order like this one, but for random ops taken as soon as they are ready. Eager: whatever became ready last comes first, and so an
        update right behind its gradient."""
        rank = {op: place for place, op in enumerate(order)}
        waits = [len(needed) for needed in self.before]
        ready = [(rank[op], op) for op, count in enumerate(waits) if not count]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            if not eager and self.dice.random() < ANY_READY_OP:
                at = self.dice.randrange(len(ready))
                _, op = ready[at]
                ready[at] = ready[-1]
                ready.pop()
                heapq.heapify(ready)
            else:
                _, op = heapq.heappop(ready)
            found.append(op)
            for each in self.after[op]:
                waits[each] -= 1
                if not waits[each]:
                    heapq.heappush(ready, (-len(found) if eager and not self.after[each] else rank[each], each))
        return tuple(found)


class _Memory:
    """Sizes, and divisions of the budget into slots for them. Sizes are known by rank, the smallest is 0."""

    def __init__(self, problem: Problem) -> None:
        self.problem, graph = problem, problem.graph
        self.budget = problem.budget_bytes - _staging_bytes(problem)
        nbytes = _with_in_place(problem)
        workspace = [op.workspace_bytes for op in graph.ops]
        sizes = sorted({size for size in (*nbytes, *workspace) if size})
        if len(sizes) > MAX_SIZES:
            nbytes, workspace = [quarter_powers(n) if n else 0 for n in nbytes], [quarter_powers(n) if n else 0 for n in workspace]
            sizes = sorted({size for size in (*nbytes, *workspace) if size})
        self.sizes = sizes
        rank = {size: at for at, size in enumerate(sizes)}
        self.storage_rank = [rank.get(n, -1) for n in nbytes]
        self.workspace_rank = [rank.get(n, -1) for n in workspace]
        self.wanted = self._wanted()  # by moment (each op, and the start) and rank: slots that are needed together
        self.useful = self._live().max(axis=0, initial=0)  # by rank: slots that are ever used together if nothing moves
        self.sums = np.concatenate((np.zeros((len(self.wanted), 1), dtype=np.int64), np.cumsum(self.wanted, axis=1)), axis=1)
        self.least_classes = self._least()

    def _wanted(self) -> np.ndarray:
        graph = self.problem.graph
        found = np.zeros((len(graph.ops) + 1, len(self.sizes)), dtype=np.int64)
        for storage in graph.storages:
            if storage.role is Role.INPUT and storage.nbytes:
                found[-1, self.storage_rank[storage.id]] += 1
        for op in graph.ops:
            handed_on = {new for _, new in op.in_place}
            for storage_id in {*op.reads, *op.writes, *op.mutates} - handed_on:
                if graph.storages[storage_id].nbytes:
                    found[op.id, self.storage_rank[storage_id]] += 1
            if op.workspace_bytes:
                found[op.id, self.workspace_rank[op.id]] += 1
        return found

    def _live(self) -> np.ndarray:
        graph = self.problem.graph
        change = np.zeros((len(graph.ops) + 1, len(self.sizes)), dtype=np.int64)
        for storage in graph.storages:
            uses, rank = graph.uses[storage.id], self.storage_rank[storage.id]
            if not storage.nbytes or not (uses or storage.lasting):
                continue
            change[0 if storage.lasting or storage.role is Role.INPUT else uses[0], rank] += 1
            if not storage.lasting:
                change[uses[-1] + 1, rank] -= 1
        live: np.ndarray = np.cumsum(change, axis=0)[:-1]
        for op in graph.ops:
            if op.workspace_bytes:
                live[op.id, self.workspace_rank[op.id]] += 1
        return live

    def _together(self, first: int, last: int) -> int:
        """The most slots needed at one moment by sizes of these ranks."""
        return int((self.sums[:, last + 1] - self.sums[:, first]).max())

    def _least(self) -> tuple[int, ...]:
        """The classes that need the fewest bytes: neighbouring sizes share one where that takes less."""
        best, cut = [0], [0]
        for last in range(len(self.sizes)):
            options = [(best[first] + self.sizes[last] * self._together(first, last), first) for first in range(last + 1)]
            nbytes, first = min(options)
            best.append(nbytes)
            cut.append(first)
        if best[-1] > self.budget:
            staging = self.problem.budget_bytes - self.budget
            raise InfeasibleBudget(f"slots for the largest ops take {format_bytes(best[-1])}", least_bytes=best[-1] + staging)
        classes = [0] * len(self.sizes)
        last = len(self.sizes)
        while last:
            for rank in range(cut[last], last):
                classes[rank] = last - 1
            last = cut[last]
        return tuple(classes)

    # -- divisions --------------------------------------------------------------------------------------------------------------------

    def slots(self, classes: Sequence[int], counts: Sequence[int]) -> Slots:
        sizes = self.sizes
        by_rank = [sizes[classes[rank]] for rank in range(len(sizes))]
        return Slots(
            storage_class=[by_rank[rank] if rank >= 0 else 0 for rank in self.storage_rank],
            workspace_class=[by_rank[rank] if rank >= 0 else 0 for rank in self.workspace_rank],
            count={sizes[rank]: count for rank, count in enumerate(counts) if count},
        )

    def first_divisions(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """A class for each size, if there is room for that, and the classes with the least bytes; counts in proportion to what would be useful."""
        own = tuple(range(len(self.sizes)))
        found = [(classes, self._spread(classes)) for classes in (own, self.least_classes) if self._bytes(self._needed(classes)) <= self.budget]
        return list(dict.fromkeys(found))

    def _spread(self, classes: Sequence[int]) -> tuple[int, ...]:
        """As large a share of what every class could use as there is room for, and the rest to the largest that can use it."""
        needed, useful = self._needed(classes), self._useful(classes)
        low, high = 0.0, 1.0
        for _ in range(20):
            share = (low + high) / 2
            fits = self._bytes(needed + (share * (useful - needed)).astype(np.int64)) <= self.budget
            low, high = (share, high) if fits else (low, share)
        return self._filled(needed + (low * (useful - needed)).astype(np.int64), useful)

    def _needed(self, classes: Sequence[int]) -> np.ndarray:
        found = np.zeros(len(self.sizes), dtype=np.int64)
        for rank in sorted(set(classes)):
            members = np.flatnonzero(np.array(classes) == rank)
            found[rank] = self.wanted[:, members].sum(axis=1).max()
        return found

    def _useful(self, classes: Sequence[int]) -> np.ndarray:
        found = np.zeros(len(self.sizes), dtype=np.int64)
        np.add.at(found, np.array(classes, dtype=np.int64), self.useful)
        useful: np.ndarray = np.maximum(found, self._needed(classes))
        return useful

    def _bytes(self, counts: np.ndarray) -> int:
        return sum(size * int(count) for size, count in zip(self.sizes, counts, strict=True))

    def _filled(self, counts: np.ndarray, useful: np.ndarray) -> tuple[int, ...]:
        room = self.budget - self._bytes(counts)
        for rank in range(len(self.sizes) - 1, -1, -1):
            more = min(int(useful[rank] - counts[rank]), room // self.sizes[rank])
            if more > 0:
                counts[rank] += more
                room -= more * self.sizes[rank]
        return tuple(int(count) for count in counts)

    def repaired(self, classes: Sequence[int], counts: Sequence[int], dice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A division like this one that serves every op within the budget and leaves no room unused."""
        classes = tuple(classes)
        needed = self._needed(classes)
        if self._bytes(needed) > self.budget:
            classes = self.least_classes
            needed = self._needed(classes)
        useful = self._useful(classes)
        fixed = np.minimum(np.maximum(np.array(counts, dtype=np.int64), needed), useful)
        over = self._bytes(fixed) - self.budget
        ranks = [rank for rank in range(len(self.sizes)) if fixed[rank] > needed[rank]]
        dice.shuffle(ranks)
        for rank in ranks:
            if over <= 0:
                break
            fewer = min(int(fixed[rank] - needed[rank]), -(-over // self.sizes[rank]))
            fixed[rank] -= fewer
            over -= fewer * self.sizes[rank]
        return classes, self._filled(fixed, useful)

    def mutated(self, classes: Sequence[int], counts: Sequence[int], dice: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
        new_classes, new_counts = list(classes), list(counts)
        if dice.random() < 0.5:
            rank = dice.randrange(len(classes))
            new_classes[rank] = min(len(classes) - 1, max(rank, new_classes[rank] + round(dice.gauss(0, 1))))
        for rank in sorted(set(new_classes)):
            if dice.random() < 0.5:
                new_counts[rank] = max(0, new_counts[rank] + round(dice.gauss(0, max(1.0, 0.1 * new_counts[rank]))))
        return self.repaired(new_classes, new_counts, dice)

    def crossed(
        self, mother: tuple[tuple[int, ...], tuple[int, ...]], father: tuple[tuple[int, ...], tuple[int, ...]], dice: random.Random
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        cut = dice.randrange(len(self.sizes) + 1)
        return self.repaired(mother[0][:cut] + father[0][cut:], mother[1][:cut] + father[1][cut:], dice)


def _with_in_place(problem: Problem) -> list[int]:
    """Bytes of each storage, or of the largest that hands its bytes on to it or takes them over: they are of one class."""
    nbytes = [s.nbytes for s in problem.graph.storages]
    links = [pair for op in problem.graph.ops for pair in op.in_place]
    for old, new in links:
        nbytes[new] = max(nbytes[old], nbytes[new])
    for old, new in reversed(links):
        nbytes[old] = nbytes[new]
    return [n if s.nbytes else 0 for n, s in zip(nbytes, problem.graph.storages, strict=True)]


def _staging_bytes(problem: Problem) -> int:
    return sum(link.staging_bytes for link in problem.machine.links if link.staging_tier == problem.device_tier and link.staging_bytes)
