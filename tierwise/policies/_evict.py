"""Replay a step under a budget, op after op, and ask a chooser whom to evict when bytes run out; what is missing later is computed again.

For policies that decide as they go (DTR, Coop): they know what has happened and never what comes.

- Before an op runs, its inputs are locked; those that are absent are computed again first, depth first, each op with its own inputs locked.
  Then storages are evicted until all outputs of the op fit, also those still here, which a second run makes a second time.
- What the program lets go is dropped. If a recomputation needs it again it comes back, and from then on only eviction removes it.
- Parameters and optimizer state stay, and so does what the policy exempts until the program lets it go. Whatever cannot be computed again (an
  input, the output of an op that cannot be replayed, what depends on a weight that has since been updated) is never evicted. Before something
  of that kind is overwritten or given back, all that the program still needs and could be made from it only is brought back and kept.
- A view is a storage without bytes that belongs to another: it is gone when that is evicted, and its op must run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import InfeasibleBudget, RecomputeLimit
from ..ir import Compute, Free, Graph, Op, Problem, Role, Schedule, Step
from ..units import format_bytes, format_seconds

TICKS_PER_SECOND = 10**12  # time in whole numbers: sums are the same in any order, so that equal scores are ties
RUNS_PER_OP = 64  # ops without a cost are not held back by a limit in seconds; no published replay comes near one run again per op


class Chooser:
    """Whom to evict. A policy overrides what it needs."""

    def start(self, replay: Replay) -> None:
        self.replay = replay

    def choose(self, missing_bytes: int) -> int:
        """One storage of `replay.pool`; asked again until enough bytes are free."""
        raise NotImplementedError

    def issued(self, storage: int) -> None:
        """The program has just asked for the storage for the first time. Until its op has run it counts as gone: what it waits for is needed."""

    def evicted(self, storage: int) -> None:
        """The storage has just gone: evicted, or dropped by the program."""

    def returned(self, storage: int) -> None:
        """The storage was gone and is just here, again or for the first time."""


class Groups(Chooser):
    """Evicted neighbours form a group that knows its ticks. A storage that comes back takes its own ticks along, but the group does not fall
    apart: an approximation that never walks."""

    def __init__(self) -> None:
        self.parent: list[int] = []  # one node for each eviction
        self.ticks_of: list[int] = []  # of a group, at its root
        self.node: dict[int, int] = {}  # storage that is gone -> the node of its last eviction
        self.gone: set[int] = set()

    def issued(self, storage: int) -> None:
        self._begin_group(storage, ticks=0)

    def evicted(self, storage: int) -> None:
        around = self._groups_around(storage)
        mine = self._begin_group(storage, ticks=int(self.replay.ticks[storage]))
        for group in around:
            self.parent[group] = mine
            self.ticks_of[mine] += self.ticks_of[group]

    def _begin_group(self, storage: int, ticks: int) -> int:
        mine = self.node[storage] = len(self.parent)
        self.parent.append(mine)
        self.ticks_of.append(ticks)
        self.gone.add(storage)
        return mine

    def returned(self, storage: int) -> None:
        self.gone.remove(storage)
        self.ticks_of[self._root(self.node.pop(storage))] -= int(self.replay.ticks[storage])

    def ticks_around(self, storage: int) -> int:
        """Of the groups next to it."""
        return sum(self.ticks_of[group] for group in self._groups_around(storage))

    def _groups_around(self, storage: int) -> set[int]:
        replay, gone, node = self.replay, self.gone, self.node
        return {self._root(node[s]) for s in replay.made_from[storage] & gone | replay.made_into[storage] & gone}

    def _root(self, node: int) -> int:
        parent = self.parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node


def lowest(scores: np.ndarray) -> int:
    """Place of the lowest score: the last among equals, but a score of 0 ends the search."""
    zeros = np.flatnonzero(scores == 0)
    if len(zeros):
        scores = scores[: zeros[0] + 1]
    return len(scores) - 1 - int(np.argmin(scores[::-1]))


@dataclass(slots=True)
class Run:
    """An op on its way: the inputs that were absent are brought one by one."""

    op: Op
    wanted: int  # the output it runs for
    again: bool
    absent: list[int]
    at: int = 0


class Replay:
    """The state of a step as it is replayed. Choosers look at the public part."""

    def __init__(
        self,
        problem: Problem,
        chooser: Chooser,
        *,
        recompute_limit: float,
        exempt: Iterable[int] = (),
        views: Mapping[int, int] | None = None,
        inputs: Mapping[int, tuple[int, ...]] | None = None,
        released_after: Mapping[int, int] | None = None,
        held: Iterable[int] | None = None,
    ) -> None:
        graph = problem.graph
        count = len(graph.storages)
        self.problem, self.graph, self.chooser = problem, graph, chooser
        self.nbytes = np.array([s.nbytes for s in graph.storages], dtype=np.int64)
        self.op_ticks = [round(seconds * TICKS_PER_SECOND) for seconds in problem.device_seconds]
        self.clock = 1
        self.ticks = np.zeros(count, dtype=np.int64)  # of the distinct ops that made a storage and its views
        self.last_use = np.zeros(count, dtype=np.int64)
        self.pool: dict[int, None] = {}  # what can be evicted, in the order in which it became so
        self.made_from: list[set[int]] = [set() for _ in range(count)]  # by the ops seen so far, without what is never evicted
        self.made_into: list[set[int]] = [set() for _ in range(count)]
        self.gone = bytearray(count)  # asked for, and not here now

        self._size = [s.nbytes for s in graph.storages]
        self._base = list(range(count))
        self._views: dict[int, list[int]] = {}
        for view, base in (views or {}).items():
            self._base[view] = base
            self._views.setdefault(base, []).append(view)
        self._inputs = [tuple(dict.fromkeys(op.reads + op.mutates)) for op in graph.ops]
        for op, asked in (inputs or {}).items():
            self._inputs[op] = asked
        self._remakes = [_can_be_made_again(problem, storage) for storage in range(count)]
        self._here = bytearray(count)
        self._locks = [0] * count
        self._kept = bytearray(count)  # not to be evicted any more
        self._exempt = bytearray(count)  # not to be evicted before the program lets it go
        for storage in exempt:
            self._exempt[storage] = True
        self._lost = bytearray(count)  # gone, and what it was made from is no more
        self._released = bytearray(count)
        self._spent: list[int] = []  # let go by the program, but something that may be evicted can only be made from it
        self._letting_go = _by_op(_last_uses(graph) if released_after is None else released_after)
        self._held = [s.id for s in graph.storages if s.lasting] if held is None else list(held)
        self._used = 0
        self._budget = problem.budget_bytes
        self._on, self._tier = problem.machine.device.name, problem.device_tier
        self._steps: list[Step] = []
        self._limit_share = recompute_limit
        self._limit_ticks = recompute_limit * sum(self.op_ticks)
        self._limit_runs = RUNS_PER_OP * len(graph.ops)
        self._ticks_again = self._runs_again = 0
        chooser.start(self)

    def run(self) -> Schedule:
        home = {s.id: (self._tier,) for s in self.graph.storages if s.lasting or s.role is Role.INPUT}
        for storage in home:
            # In a loop, what lives across steps is there from the second step on, whoever makes it.
            if self.graph.is_there_at_start(storage) or (self.problem.cyclic and self.graph.storages[storage].lasting):
                self._here[storage] = self._kept[storage] = True
                self._used += self._size[storage]
        if self._used > self._budget:
            raise InfeasibleBudget(
                f"what lives across steps and the inputs alone are {format_bytes(self._used)}; the budget is {format_bytes(self._budget)}"
            )
        self._let_go(-1)
        for op in self.graph.ops:
            self._know(op)
            self._save_from(op)
            self._issue(op)
            self._run(op, op.writes[0] if op.writes else -1)
            for storage in op.writes:
                self.last_use[self._base[storage]] = self.clock
                if any(self._lost[old] for old, _ in op.in_place):
                    self._keep(storage)
            self._let_go(op.id)
        for storage in self._held:
            self._bring(storage)
            self._keep(self._base[storage])
        left = [s.id for s in self.graph.storages if self._here[s.id] and not s.lasting]
        self._steps += [Free(storage, self._tier) for storage in left]
        return Schedule(tuple(self._steps), home)

    # -- running ops --------------------------------------------------------------------------------------------------------------

    def _know(self, op: Op) -> None:
        """From now on what the op makes is known to come from what it reads."""
        sources = {self._base[storage] for storage in self._inputs[op.id]}
        for made in {self._base[storage] for storage in op.writes + op.mutates}:
            self.ticks[made] += self.op_ticks[op.id]
            for source in sources - {made}:
                self.made_into[source].add(made)
                if self._remakes[source]:
                    self.made_from[made].add(source)

    def _issue(self, op: Op) -> None:
        for storage in op.writes:
            if self._base[storage] == storage and not self._here[storage]:
                self.gone[storage] = True
                self.chooser.issued(storage)

    def _bring(self, storage: int) -> None:
        if not self._here[storage]:
            self._run(self._maker(storage), storage, again=True)

    def _maker(self, storage: int) -> Op:
        producer = self.graph.producer(storage)
        assert producer is not None  # what has no op to make it is never given up while it may be needed
        return self.graph.ops[producer]

    def _run(self, op: Op, wanted: int, *, again: bool = False) -> None:
        """Run an op, and before it, depth first, those that make its absent inputs."""
        runs = [self._open(op, wanted, again)]
        while runs:
            run = runs[-1]
            storage = self._next_absent(run)
            if storage is None:
                self._compute(run)
                runs.pop()
            else:
                runs.append(self._open(self._maker(storage), storage, again=True))

    def _open(self, op: Op, wanted: int, again: bool) -> Run:
        inputs = self._inputs[op.id]
        for storage in inputs:
            self.last_use[self._base[storage]] = self.clock
        absent = []
        for storage in inputs:
            if self._here[storage]:
                self._lock(self._base[storage])
            else:
                absent.append(storage)
        return Run(op, wanted, again, absent)

    def _next_absent(self, run: Run) -> int | None:
        while run.at < len(run.absent):
            storage = run.absent[run.at]
            if not self._here[storage]:
                return storage
            self._lock(self._base[storage])
            run.at += 1
        # An op in place, run again for one input, may have taken over the bytes of another: that one comes last.
        return next((storage for storage in self._inputs[run.op.id] if not self._here[storage]), None)

    def _compute(self, run: Run) -> None:
        op = run.op
        self._make_room(op)
        self._steps.append(Compute(op.id, self._on))
        self.clock += self.op_ticks[op.id]
        for old, _ in op.in_place:
            self._leave(old, free=False)
        for storage in [s for s in op.writes if s != run.wanted] + ([run.wanted] if run.wanted >= 0 else []):
            self._arrive(storage)
        for storage in self._inputs[op.id]:
            self._unlock(self._base[storage])
        if run.again:
            self._count(op)

    def _count(self, op: Op) -> None:
        self._ticks_again += self.op_ticks[op.id]
        self._runs_again += 1
        if self._ticks_again > self._limit_ticks or self._runs_again > self._limit_runs:
            raise RecomputeLimit(
                f"within {format_bytes(self._budget)} recomputation takes more than {self._limit_share:g} times the step's own "
                f"{format_seconds(sum(self.op_ticks) / TICKS_PER_SECOND)}; use a larger budget, or raise recompute_limit"
            )

    def _make_room(self, op: Op) -> None:
        need = op.workspace_bytes + sum(self._size[s] for s in op.writes if self._remakes[s] or not self._here[s])
        need -= sum(min(self._size[old], self._size[new]) for old, new in op.in_place)
        while self._used + need > self._budget:
            missing_bytes = self._used + need - self._budget
            if self.pool:
                self._leave(self.chooser.choose(missing_bytes), free=True)
            elif not self._drop_spent():
                raise InfeasibleBudget(
                    f"{op.name} needs {format_bytes(need)} beside the {format_bytes(self._used)} of what it reads, what waits for it and what "
                    f"cannot be evicted; the budget is {format_bytes(self._budget)}"
                )

    # -- what is here -------------------------------------------------------------------------------------------------------------

    def _arrive(self, storage: int) -> None:
        if self._here[storage]:
            return
        self._here[storage] = True
        self._used += self._size[storage]
        if self._base[storage] != storage:
            return
        if not self._remakes[storage]:
            self._kept[storage] = True
        self._offer(storage)
        if self.gone[storage]:
            self.gone[storage] = False
            self.chooser.returned(storage)

    def _leave(self, storage: int, *, free: bool) -> None:
        """A storage goes, and with it its views."""
        for part in (storage, *self._views.get(storage, ())):
            if self._here[part]:
                self._here[part] = False
                self._used -= self._size[part]
                if free or part != storage:
                    self._steps.append(Free(part, self._tier))
        self.pool.pop(storage, None)
        self.gone[storage] = True
        self.chooser.evicted(storage)

    def _lock(self, storage: int) -> None:
        self._locks[storage] += 1
        self.pool.pop(storage, None)

    def _unlock(self, storage: int) -> None:
        self._locks[storage] -= 1
        self._offer(storage)

    def _offer(self, storage: int) -> None:
        if self._here[storage] and not (self._locks[storage] or self._kept[storage] or self._exempt[storage]):
            self.pool[storage] = None

    def _keep(self, storage: int) -> None:
        self._kept[storage] = True
        self.pool.pop(storage, None)

    # -- what cannot be computed again --------------------------------------------------------------------------------------------

    def _let_go(self, op: int) -> None:
        """The program drops its last reference to these."""
        for storage in self._letting_go.get(op, ()):
            self._released[storage] = True
            self._exempt[storage] = False
            if not self._here[storage]:
                continue
            if self._remakes[storage] and not self._kept[storage]:
                self._leave(storage, free=True)
                continue
            gone, here = self._made_with(storage)
            # Without it, what was made from it could not be evicted any more: not worth it if that is larger.
            if any(not self._released[s] for s in gone) or sum(self._size[s] for s in here) > self._size[storage]:
                self._spent.append(storage)
            else:
                self._give_back(storage)

    def _drop_spent(self) -> bool:
        """The last resort: give back something the program let go, even if what was made from it must then stay."""
        for storage in self._spent:
            if not self._locks[storage] and all(self._released[s] for s in self._made_with(storage)[0]):
                self._spent.remove(storage)
                self._give_back(storage)
                return True
        return False

    def _give_back(self, storage: int) -> None:
        self._save(storage)
        self._leave(storage, free=True)
        self._lost[storage] = True

    def _save_from(self, op: Op) -> None:
        """An op is about to overwrite storages, or to take over the bytes of some."""
        for storage in op.mutates + tuple(s for s in op.writes if self._here[s]):
            self._save(storage)
        for old, _ in op.in_place:
            if self._kept[old] or not self._remakes[old]:
                self._save(old)
                self._lost[old] = True

    def _save(self, source: int) -> None:
        """The content of a storage is about to be no more: bring back what the program needs and can only be made with it, and keep all of that."""
        while True:
            gone, here = self._made_with(source)
            for storage in here:
                self._keep(storage)
                if self._released[storage]:
                    self._spent.append(storage)
            needed = [storage for storage in gone if not self._released[storage]]
            if not needed:
                break
            self._bring(min(needed))
        for storage in gone:
            self._lost[storage] = True

    def _made_with(self, source: int) -> tuple[list[int], list[int]]:
        """What needs this storage to be made again: what is gone, and what is here and could be evicted."""
        gone, here, seen, todo = [], [], {source}, [source]
        while todo:
            for storage in self.made_into[todo.pop()]:
                if storage in seen:
                    continue
                seen.add(storage)
                if self._here[storage]:
                    if not self._kept[storage]:
                        here.append(storage)
                elif self.gone[storage] and not self._lost[storage]:
                    gone.append(storage)
                    todo.append(storage)
        return gone, here


def _can_be_made_again(problem: Problem, storage: int) -> bool:
    """Whether one op alone makes the storage and may run again; what it reads is another question, which changes as the step goes on."""
    graph = problem.graph
    producer = graph.producer(storage)
    if producer is None or (graph.storages[storage].lasting and (problem.cyclic or graph.is_there_at_start(storage))):
        return False
    op = graph.ops[producer]
    return op.replayable and not op.mutates and all(len(graph.writers[s]) == 1 for s in op.writes)


def _last_uses(graph: Graph) -> dict[int, int]:
    """When the program lets each storage go, if nobody says otherwise."""
    return {s.id: uses[-1] if (uses := graph.uses[s.id]) else -1 for s in graph.storages if not s.lasting}


def _by_op(released_after: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for storage in sorted(released_after):
        found.setdefault(released_after[storage], []).append(storage)
    return found
