"""dtr: when bytes run out, evict what is cheap to compute again, large and long unused; compute it again when asked for it.

Paper    Kirisame et al., ICLR 2021, arXiv:2006.09616.
Idea     decide as the step runs, as a cache does: no plan, no knowledge of what comes, so any program will do.
Rule     evict the lowest  h = c / (bytes × age),  with c the seconds to compute it and all evicted storages it can be reached from
         or leads to through evicted ones (h_dtr); those seconds kept per group of evicted neighbours by union-find (h_eq); its own
         seconds (h_local); its own and its evicted ancestors', whatever its age (msps); the longest unused (lru).
Differs  the prototype samples candidates and skips small storages to save time while it runs; here every storage is scored.
         Gradients stay until their update unless evict_gradients: to make one again takes most of a backward pass.
         A plan that recomputes more than recompute_limit times the step's own seconds is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from ..errors import UnknownName
from ..ir import Problem, Role, Schedule, peak_bytes
from ._evict import Chooser, Groups, Replay, lowest
from ._gaps import build

DECIDES = "what to recompute"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it evicts and runs ops again at any point of the step, where no region begins or ends"
LOOK_BEYOND = 4.0  # how far a walk goes past the score that would do: further costs more now, less far costs more walks later


def plan(
    problem: Problem,
    *,
    heuristic: str = "h_dtr",
    recompute_limit: float = 1.0,
    evict_gradients: bool = False,
    views: Mapping[int, int] | None = None,
    inputs: Mapping[int, tuple[int, ...]] | None = None,
    released_after: Mapping[int, int] | None = None,
    held: Iterable[int] | None = None,
) -> Schedule:
    """The last four say what a recorded program did where it differs from what the graph shows (traces/dtr.py).

    views: storages without bytes -> the storage they are views of. inputs: op -> what it asks for, in order and as often.
    released_after: storage -> the op after which the program drops it; those not named are never dropped. held: what must be there at the
    end, in the order in which it is brought back.
    """
    if heuristic not in HEURISTICS:
        raise UnknownName("heuristic", heuristic, HEURISTICS)
    if released_after is None:
        everything = build(problem)
        if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
            return everything
    replay = Replay(
        problem,
        HEURISTICS[heuristic](),
        recompute_limit=recompute_limit,
        exempt=[] if evict_gradients else [s.id for s in problem.graph.storages if s.role is Role.GRAD],
        views=views,
        inputs=inputs,
        released_after=released_after,
        held=held,
    )
    return replay.run()


class _Scored(Chooser):
    """Evicts the lowest score; what has no bytes or no age scores infinity."""

    def choose(self, missing_bytes: int) -> int:
        pool = self.pool()
        return int(pool[lowest(self.scores(pool))])

    def pool(self) -> np.ndarray:
        return np.fromiter(self.replay.pool, dtype=np.intp, count=len(self.replay.pool))

    def scores(self, pool: np.ndarray) -> np.ndarray:
        return _ratio(self.ticks(pool), self.scale(pool))

    def ticks(self, pool: np.ndarray) -> np.ndarray:
        own: np.ndarray = self.replay.ticks[pool]
        return own

    def scale(self, pool: np.ndarray) -> np.ndarray:
        """Bytes × age."""
        product: np.ndarray = self.replay.nbytes[pool] * (self.replay.clock - self.replay.last_use[pool]).astype(float)
        return product


def _ratio(ticks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scores = np.full(len(scale), np.inf)
    np.divide(ticks, scale, out=scores, where=scale > 0)
    return scores


class _Lru(_Scored):
    def scores(self, pool: np.ndarray) -> np.ndarray:
        last_use: np.ndarray = self.replay.last_use[pool]
        return last_use


class _Groups(_Scored, Groups):
    """h_eq."""

    def ticks(self, pool: np.ndarray) -> np.ndarray:
        return super().ticks(pool) + np.array([self.ticks_around(storage) for storage in pool.tolist()], dtype=np.int64)


class _Neighbourhood(_Scored):
    """Its own seconds and those of the evicted storages above and below it, found by walking there. Walks are slow, so most storages only have
    a lower bound: what was found until the score was clearly not the lowest. What comes back takes along what was found behind it."""

    descendants = True

    def start(self, replay: Replay) -> None:
        super().start(replay)
        self.ways = (replay.made_from, replay.made_into) if self.descendants else (replay.made_from,)
        self.ticks_of = replay.ticks.data  # the same numbers, without the cost of numpy's scalars
        self.around = np.zeros_like(replay.ticks)  # at least so many ticks lie around a storage
        self.found: dict[int, tuple[dict[int, int], ...]] = {}  # for each way: what was found there, with the ticks found behind it
        self.seen_in = [0] * len(replay.ticks)  # the last walk that found a storage
        self.walks = self.events = 0
        self.exact: dict[int, int] = {}  # storage -> the number of events when all around it had been found
        self.last_score = 0.0

    def ticks(self, pool: np.ndarray) -> np.ndarray:
        total: np.ndarray = super().ticks(pool) + self.around[pool]
        return total

    def choose(self, missing_bytes: int) -> int:
        pool = self.pool()
        scale = self.scale(pool)
        scores = _ratio(self.ticks(pool), scale)
        while True:
            at = lowest(scores)
            storage, score = int(pool[at]), float(scores[at])
            if self.exact.get(storage) == self.events or scale[at] <= 0:
                self.last_score = score
                return storage
            scores[at] = np.inf
            self._look_around(storage, LOOK_BEYOND * max(self.last_score, float(scores.min())) * scale[at])
            scores[at] = (self.ticks_of[storage] + self.around[storage]) / scale[at]

    def issued(self, storage: int) -> None:
        self.events += 1

    def evicted(self, storage: int) -> None:
        self.events += 1
        self.around[storage] = 0
        self.found.pop(storage, None)

    def returned(self, storage: int) -> None:
        self.events += 1
        if not self.seen_in[storage]:
            return
        for other, found in self.found.items():
            for behind in found:
                if storage in behind:
                    self.around[other] = max(0, int(self.around[other]) - behind.pop(storage))

    def _look_around(self, storage: int, enough: float) -> None:
        total, found = 0, []
        for edges in self.ways:
            behind = self._walk(storage, edges, enough - total)
            total += behind.pop(storage)
            found.append(behind)
        self.around[storage], self.found[storage] = total, tuple(found)
        if total <= enough:
            self.exact[storage] = self.events

    def _walk(self, start: int, edges: list[set[int]], enough: float) -> dict[int, int]:
        """Gone storages reached through gone ones, nearest first, until their ticks are enough; each with the ticks found through it."""
        gone, ticks_of, seen_in = self.replay.gone, self.ticks_of, self.seen_in
        self.walks = walk = self.walks + 1
        order, reached_from, total = [start], [0], 0
        seen_in[start] = walk
        for at, storage in enumerate(order):
            if total > enough:
                break
            for near in edges[storage]:
                if gone[near] and seen_in[near] != walk:
                    seen_in[near] = walk
                    order.append(near)
                    reached_from.append(at)
                    total += ticks_of[near]
        behind = [ticks_of[storage] for storage in order]
        behind[0] = 0
        for at in range(len(order) - 1, 0, -1):
            behind[reached_from[at]] += behind[at]
        return dict(zip(order, behind, strict=True))


class _Msps(_Neighbourhood):
    descendants = False

    def scale(self, pool: np.ndarray) -> np.ndarray:
        nbytes: np.ndarray = self.replay.nbytes[pool]
        return nbytes.astype(float)


HEURISTICS: dict[str, Callable[[], Chooser]] = {"h_dtr": _Neighbourhood, "h_eq": _Groups, "h_local": _Scored, "lru": _Lru, "msps": _Msps}
