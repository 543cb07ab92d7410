"""Lasting state away from the device: a schedule in which some updates run on the cpu and parameters come and go is made from one without.

`away` takes any schedule of a step, however its activations are kept, moved or made again, and moves updates to another processor: their state
lives in a lower tier, gradients leave when their last device op is done, and what an update makes goes where it is read. Parameters that live
elsewhere come a few ops before their first use in forward and in backward, and go after their last. `placed` does so for each update by itself;
one that stays on the device while its state does not has it streamed through: in, updated, out. There, updates and their copies are listed by when
they would run (_in_time.py).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

from ..ir import PASSING, Compute, Copy, Free, Op, Phase, Problem, Role, Schedule, Step
from ..ir.placement import FEW_IN_FLIGHT, IN_FLIGHT, waiting_bytes
from ._in_time import Piece, over_by
from ._in_time import piece as piece_of
from ._in_time import run as in_time

LISTED, ON_DEVICE = "listed", "on the device"  # rows of what has its place in the list
JUST_BEFORE = 2  # ops on the device before the one that needs it, what the cpu has made goes there at the earliest
PASSING_BYTES = 192 << 20  # of state on its way through the device: a few chunks of it
MOST_ON_THEIR_WAY = 16  # updates, however small their state is
BY_RANK = ", by rank"  # rows of updates that the cpu takes in the order in which they are needed


@dataclass(frozen=True, slots=True)
class Away:
    """Where the things of one update are."""

    processor: str = "cpu"  # that runs it
    state: str = "dram"  # the tier of what updates alone use
    parameters: str | None = None  # the tier of what forward and backward read; None for the device
    gradients: str = "dram"  # the tier where they wait for the update


def movable(problem: Problem, processor: str = "cpu") -> list[int]:
    """Updates that the processor can run, and whose results nobody else needs before they last."""
    graph = problem.graph
    moved = {op.id for op in graph.ops if op.phase is Phase.UPDATE and (op.id, processor) in problem.costs.op_seconds}
    while True:
        kept = {op for op in moved if all(_stays_among(problem, storage, moved) for storage in graph.ops[op].writes + graph.ops[op].reads)}
        if kept == moved:
            return sorted(moved)
        moved = kept


def _stays_among(problem: Problem, storage: int, moved: Collection[int]) -> bool:
    """A passing storage that an update makes is used by moved updates only."""
    graph = problem.graph
    made_by = graph.producer(storage)
    passing = not graph.storages[storage].lasting and made_by is not None and graph.ops[made_by].phase is Phase.UPDATE
    return not passing or (storage not in graph.consumed_by and all(use in moved for use in graph.uses[storage]))


def away(
    problem: Problem,
    base: Schedule,
    moved: Sequence[int],
    *,
    update: str,
    state: str = "dram",
    parameters: str | None = None,
    ahead: int = 1,
    host: str = "dram",
    processor: str = "cpu",
) -> Schedule:
    """`moved` are updates, by op. state: the tier of what they alone use; parameters: the tier of what forward and backward read, None for the
    device. update: "after" backward and under the next forward, or "backward", each when its gradient is there."""
    frozen = None if parameters is None else Away(processor, state, parameters, host)
    places = {op: Away(processor, state, parameters, host) for op in moved}
    builder = _Away(problem, base, places, ahead, frozen, {}, earlier=int(update == "after"), lingers=0, listed_in_time=False)
    return builder.run(_when(problem, update))


def placed(
    problem: Problem,
    base: Schedule,
    places: Mapping[int, Away],
    *,
    update: str,
    ahead: int = 1,
    parameters: Mapping[int, str] | None = None,
    passing_bytes: int = PASSING_BYTES,
    lingers: int = 1,
    in_flight: int = FEW_IN_FLIGHT,
) -> Schedule:
    """`places` by update. Parameters that nobody updates come and go too where `parameters` says so, by storage. State is on its way so early that it
    and what comes before it are so many bytes, and at least while that of the update before it is there. In backward a parameter `lingers` until so
    many ops later. For so many regions that are `in_flight` gradients wait on the device, then backward waits."""
    builder = _Away(
        problem, base, places, ahead, None, parameters or {}, 0, lingers, listed_in_time=True, passing_bytes=passing_bytes, in_flight=in_flight
    )
    return builder.run(_when(problem, update))


def _when(problem: Problem, update: str) -> str:
    return "after" if update == "after" and problem.cyclic else "end" if update == "after" else "backward"


class _Away:
    def __init__(
        self,
        problem: Problem,
        base: Schedule,
        places: Mapping[int, Away],
        ahead: int,
        frozen: Away | None,
        parameters: Mapping[int, str],
        earlier: int,
        lingers: int,
        listed_in_time: bool,
        passing_bytes: int = 0,
        in_flight: int = FEW_IN_FLIGHT,
    ) -> None:
        self.earlier, self.lingers, self.listed_in_time = earlier, lingers, listed_in_time
        self.passing_bytes, self.in_flight = passing_bytes, in_flight
        self.problem, self.graph, self.base, self.places = problem, problem.graph, base, places
        self.moved = set(places)
        self.device, self.ahead = problem.device_tier, ahead
        self.uses_disk = any(map(self._is_from_disk, places.values()))
        self.works_in = {processor.name: processor.tier for processor in problem.machine.processors}
        self.steps = [step for step in base.steps if not (isinstance(step, Compute) and step.op in self.moved)]
        self.last_use: dict[int, int] = {}  # of a storage by an op that stays, as a place in the list
        for place, step in enumerate(self.steps):
            if isinstance(step, Compute):
                for storage in self._touched(self.graph.ops[step.op]):
                    self.last_use[storage] = place
        self.home = dict(base.home)
        self.streamed = self._streamed(frozen, parameters)  # parameters that come and go, and the tier they live in
        self.waits_in: dict[int, str] = {}  # gradients, and the tier in which they wait
        for number, place_of in places.items():
            op, works_in = self.graph.ops[number], self.works_in[place_of.processor]
            for storage in dict.fromkeys(op.mutates + op.reads + op.writes):
                if not self.graph.storages[storage].lasting:
                    if storage in op.reads and storage in self.last_use:
                        self.waits_in[storage] = place_of.gradients
                elif storage in self.streamed:
                    continue
                elif storage not in self.last_use:
                    self.home[storage] = (place_of.state,)
                elif works_in != self.device and (storage in op.mutates or storage in op.reads) and not self._is_kept(storage):
                    self.home[storage] = (self.device, works_in)
        for storage, tier in self.streamed.items():
            self.home[storage] = (tier,)
        self.before: dict[int, list[Step]] = {}  # what is put in the list before the step at this place
        self.after: dict[int, list[Step]] = {}

    def _is_kept(self, storage: int) -> bool:
        """Gradients to which the next batch's are added: who updates elsewhere has a copy, until backward makes them others."""
        return self.graph.storages[storage].role is Role.GRAD and any(op not in self.moved for op in self.graph.writers[storage])

    def run(self, when: str) -> Schedule:
        self._gradients_leave()
        self._parameters_come_and_go(when)
        order = self._order(when)
        updates: list[Step] = []
        if when != "end" and self.listed_in_time:
            self._in_time(order, when)
        elif when == "backward":
            self._as_they_arrive(order)
        elif when == "after":
            updates = [step for listed in self._one_by_one(order, -1).values() for step in listed]
            self.before[0] = [*updates, *self.before.get(0, [])]
        else:
            updates = [step for listed in self._one_by_one(order, 0).values() for step in listed]
        steps: list[Step] = list(self.after.get(-1, []))
        for place, step in enumerate(self.steps):
            steps += self.before.get(place, [])
            if step is not _GONE:
                steps.append(step)
            steps += self.after.get(place, [])
        if when == "end":
            steps += updates
        return replace(self.base, steps=tuple(steps), home=self.home, addresses={})

    def _touched(self, op: Op) -> set[int]:
        return {*op.reads, *op.writes, *op.mutates}

    def _streamed(self, frozen: Away | None, parameters: Mapping[int, str]) -> dict[int, str]:
        """Parameters that the device only reads and that moved updates, or nobody, change."""
        found: dict[int, str] = {}
        for storage in self.graph.storages:
            writers = self.graph.writers[storage.id]
            if storage.role is not Role.PARAM or not storage.lasting or not storage.nbytes or storage.id not in self.last_use:
                continue
            if not all(op in self.moved for op in writers):
                continue
            tiers = {self.places[op].parameters for op in writers} or {parameters.get(storage.id, frozen.parameters if frozen else None)}
            (tier, *others) = sorted(tiers, key=str)
            if tier is not None and not others:
                found[storage.id] = tier
        return found

    def _gradients_leave(self) -> None:
        """What a moved update reads leaves the device after the last op there that uses it, or stays until its update is over."""
        made_there = {s for op in self.moved for s in self._touched(self.graph.ops[op]) if not self.graph.storages[s].lasting}
        for place, step in enumerate(self.steps):
            if not isinstance(step, Free) or step.storage not in made_there or step.form:
                continue
            if step.tier == self.device or step.storage in self.waits_in:
                self.steps[place] = _GONE
        for storage, tier in sorted(self.waits_in.items()):
            if tier != self.device:
                self.after.setdefault(self.last_use[storage], []).extend((Copy(storage, self.device, tier), Free(storage, self.device)))

    def _is_from_disk(self, place: Away) -> bool:
        """Whether gradients wait in host memory for state that comes there."""
        return self.device not in (place.gradients, place.state) and place.state != place.gradients

    def _passes_through(self, op: int) -> bool:
        """Whether the device updates it, be that in its memory or in buffers that are counted elsewhere."""
        return self.works_in[self.places[op].processor] in (self.device, PASSING)

    def _is_elsewhere(self, op: int) -> bool:
        return self.works_in[self.places[op].processor] != self.device

    def _parameters_come_and_go(self, when: str) -> None:
        computes = [place for place, step in enumerate(self.steps) if isinstance(step, Compute)]
        number = {place: count for count, place in enumerate(computes)}
        uses_of: dict[int, list[int]] = {storage: [] for storage in sorted(self.streamed)}
        for place in computes:
            for storage in self._touched(self.graph.ops[self.steps[place].op]) & uses_of.keys():  # type: ignore[union-attr]
                uses_of[storage].append(place)
        # What is updated on the device as backward goes on is there anew by then.
        hurried = {s for op in self.moved if when == "backward" and not self._is_elsewhere(op) for s in self.graph.ops[op].mutates}
        begins = [0.0, *accumulate(self.problem.seconds(step.op, step.on, step.variant) for step in map(self.steps.__getitem__, computes))]  # type: ignore[union-attr]
        for storage, uses in uses_of.items():
            free_from = 0
            # It stays where it would be gone for no longer than it takes to come back.
            coming = self.problem.machine.copy_seconds(self.graph.storages[storage].nbytes, self.home[storage][0], self.device)
            for stay in _stays(uses, [number[place] for place in uses], self.ahead + 1, begins, coming):
                comes = computes[max(number[stay[0]] - self.ahead, free_from)]
                self.before.setdefault(comes, []).append(Copy(storage, self.home[storage][0], self.device))
                last = number[stay[1]]
                if storage not in hurried and self.graph.ops[self.steps[stay[1]].op].phase is Phase.BACKWARD:  # type: ignore[union-attr]
                    last = self._lingering(computes, last)
                self.after.setdefault(computes[last], []).append(Free(storage, self.device))
                free_from = min(last + 1, len(computes) - 1)

    def _lingering(self, computes: Sequence[int], last: int) -> int:
        """Autograd is done with a region once the next has begun. What waits for it, an update that takes its place, does not wait longer."""
        ops = [self.graph.ops[self.steps[place].op] for place in computes[last + 1 : last + 1 + self.lingers]]  # type: ignore[union-attr]
        return last + sum(op.phase is Phase.BACKWARD for op in ops)

    def _order(self, when: str) -> list[int]:
        """In program order where one update needs another; else what the next forward needs first, or what is complete first."""
        needed = {op: min((self.graph.uses[s][0] for s in self._touched(self.graph.ops[op]) if self.graph.storages[s].lasting), default=0)
                  for op in self.moved}  # fmt: skip
        key = (lambda op: (self._complete_at(self.graph.ops[op]), op)) if when == "backward" else (lambda op: (needed[op], op))
        earlier = {op: self._earlier(op) for op in self.moved}
        found: list[int] = []
        waiting = sorted(self.moved, key=key)
        left = set(waiting)
        while waiting:
            ready = next(op for op in waiting if not earlier[op] & left)
            waiting.remove(ready)
            left.remove(ready)
            found.append(ready)
        return found

    @cached_property
    def _movers(self) -> dict[int, list[int]]:
        """Moved updates by what they touch."""
        found: dict[int, list[int]] = {}
        for op in sorted(self.moved):
            for storage in self._touched(self.graph.ops[op]):
                found.setdefault(storage, []).append(op)
        return found

    def _earlier(self, op: int) -> set[int]:
        """Moved updates before this one that touch what it touches."""
        return {other for storage in self._touched(self.graph.ops[op]) for other in self._movers[storage] if other < op}

    def _complete_at(self, op: Op) -> int:
        """The place of the last device op that makes what the update reads, or still reads what it changes; of updates it comes after, too."""
        places = [self.last_use.get(storage, -1) for storage in self._touched(op)]
        places += [self._complete_at(self.graph.ops[other]) for other in self._earlier(op.id)]
        return max(places, default=-1)

    def _as_they_arrive(self, order: Sequence[int]) -> None:
        """Updates in the list where their gradients are complete."""
        for op, listed in self._one_by_one(order, 0).items():
            self.after.setdefault(self._complete_at(self.graph.ops[op]), []).extend(listed)

    def _in_time(self, order: Sequence[int], when: str) -> None:
        """Updates in the list about when they would run, their state about when it would come and what they make when it is made: neither the cpu nor
        what passes through the device is held up by a link that waits for the other. Of updates in backward those for which the cpu has no time
        before the next step begins run under its forward, what is needed first before the rest."""
        iteration, piece = 0 if when == "backward" else -1, partial(piece_of, self.problem)
        computes = [place for place, step in enumerate(self.steps) if isinstance(step, Compute)]
        device = [piece(ON_DEVICE, [self.steps[place]]) for place in computes]
        needed = self._needed(order, computes)
        ranks = {op: number for number, ops in needed.items() for op in ops if self._may_be_late(op, when)}
        following = [piece(ON_DEVICE, [self.steps[place]]) for place in computes[: self._forward_ops(computes)]] if ranks else []
        listed, leaving = self._as_listed(computes, device)
        more, _ = self._as_listed(computes[: len(following)], following) if following else ([], {})
        row: dict[str, list[int]] = {}  # updates of each processor
        complete: dict[int, list[Piece]] = {}  # the op that makes the last of what an update needs
        results: dict[int, Piece] = {}
        staying: dict[int, list[Free]] = {}  # gradients of updates through the device, by the op after which they are complete
        behind: dict[str, dict[int, list[Piece]]] = {}  # of each processor, updates by the op after which they can run
        count_of = {op: bisect.bisect_right(computes, self._complete_at(self.graph.ops[op])) if when == "backward" else 0 for op in order}
        holding = self._holding(count_of)
        pieces = [*device, *following, *listed, *more]
        for op in order:
            on = self.places[op].processor
            mine = row.setdefault(on, [])
            mine.append(op)
            count = count_of[op]
            complete[op] = device[count - 1 : count]
            shared = [results[other] for other in self._earlier(op)]  # one storage of several parameters
            first = len(mine) - 1 - self._on_their_way(mine)  # when the one before that has left its place
            before = [*complete[mine[max(0, first)]], *(results[other] for other in mine[max(0, first - 1) : max(0, first)])]
            fetch = piece(f"{on}, state", self._fetch_state(op, iteration), [*shared, *(before if op not in ranks else [])])
            left = [leaving[s] for s in self.graph.ops[op].reads if s in leaving] if when == "backward" else []
            gradients, updated = self._take_gradients(op, iteration), self._compute(op, iteration)
            if when == "backward" and not left:  # they stay until backward waits for their update
                self.after.setdefault(computes[count - 1], []).extend(step for step in gradients if isinstance(step, Copy))
                gone = [replace(step, join=True) for step in updated if isinstance(step, Free)]
                staying.setdefault(count, []).extend([*(step for step in gradients if isinstance(step, Free)), *gone])
                gradients, updated = [], [step for step in updated if not isinstance(step, Free)]
            late = piece(f"{on}, late", [*self._fetch_parameters(op, iteration), *gradients], [*shared, *complete[op], *left])
            if self._is_from_disk(self.places[op]):
                late.after.append(fetch)
            by_rank = BY_RANK if op in ranks else ""
            if when == "backward" and op not in ranks:  # for a few their gradients wait, then backward does
                waiting = behind.setdefault(on, {})
                waiting.setdefault(count, [])
                over = len(waiting) - holding.few_of([*waiting])
                if over > 0 and count < len(device):
                    device[count].after += list(waiting.values())[over - 1]
            compute = piece(on + by_rank, updated, [fetch, late], ranks.get(op))
            results[op] = piece(f"{on}, results{by_rank}", self._results(op, iteration), [compute], 0 if by_rank else None)
            if when == "backward" and op not in ranks:
                behind[on][count].append(compute)
            pieces += [fetch, late, compute, results[op]]
        for number, ops in needed.items():
            if when == "after":
                device[number].after += [results[op] for op in ops]
            elif number < len(following):
                following[number].after += [results[op] for op in ops]
        timed = in_time(pieces)
        if following:
            self._first_made_first(results, computes[: len(following)], [device[-1].end, *(one.end for one in following[:-1])])
        wanted = {id(results[op]): number for number, ops in needed.items() for op in ops if self._is_elsewhere(op)}
        for one in timed:
            if one.row != ON_DEVICE and not one.row.startswith(LISTED):
                self._list(one, computes, device, following, wanted.get(id(one), 0) - JUST_BEFORE if when == "after" or following else 0)
        self._free(staying, holding, computes)

    def _first_made_first(self, results: Mapping[int, Piece], computes: Sequence[int], begins: Sequence[float]) -> None:
        """Parameters that come before the same op of the next forward, which begins then: what is made by then in the order of the list."""
        made = {storage: results[op].end for op in results for storage in self._touched(self.graph.ops[op]) & self.streamed.keys()}
        for place, begin in zip(computes, begins, strict=True):
            if len(coming := self.before.get(place, [])) > 1:
                coming.sort(key=lambda step: max(begin, made.get(step.storage, begin)) if isinstance(step, Copy) else begin)

    def _free(self, staying: Mapping[int, Sequence[Free]], holding: _Holding, computes: Sequence[int]) -> None:
        """Gradients that wait on the device, by the number of the op after which they are complete: of more than a few backward waits for the first;
        for the last of all nobody does."""
        places, gone = list(staying), 0
        for place, count in enumerate(places, 1):
            while gone < place - holding.few_of(places[:place]):
                self.after.setdefault(computes[count - 1], []).extend(staying[places[gone]])
                gone += 1
        for count in places[gone:]:
            self.after.setdefault(computes[-1], []).extend(replace(step, join=False) for step in staying[count])

    def _holding(self, count_of: Mapping[int, int]) -> _Holding:
        """By updates and the number of the op after which each is complete."""
        whole, held = Counter[int](), Counter[int]()
        for op, count in count_of.items():
            for storage in self.graph.ops[op].reads:
                if storage in self.waits_in:
                    nbytes = self.graph.storages[storage].nbytes
                    whole[count] += nbytes
                    held[count] += nbytes * (self.waits_in[storage] == self.device)
        return _Holding(held, waiting_bytes(self.problem.budget_bytes, max(whole.values(), default=0), self.in_flight))

    def _on_their_way(self, updates: Sequence[int]) -> int:
        """For how many before the last of these updates state is on its way or there when that of the last one comes."""
        if not self._passes_through(updates[-1]):
            return min(1, len(updates) - 1)  # the cpu has the next from the disk while one is in work
        nbytes, count = 0, 0
        for op in reversed(updates[:-1][-MOST_ON_THEIR_WAY:]):
            nbytes += sum(self.graph.storages[s].nbytes for s in self.graph.ops[op].mutates if s not in self.last_use)
            count += 1
            if nbytes >= self.passing_bytes:
                break
        return count

    def _list(self, one: Piece, computes: Sequence[int], device: Sequence[Piece], following: Sequence[Piece], least: int) -> None:
        """After what is over on the device when it starts, in this step or for the step before; that, not before so many ops of it: a link that waits
        for what is not wanted yet keeps others waiting."""
        update = one.after[0] if one.row.endswith(f"results{BY_RANK}") else one  # what it makes is of the same step
        late = one.row.endswith(BY_RANK) and update.start >= device[-1].end
        count = over_by(following if late else device, one.start)
        if late or not following:
            count = max(count, least)
        steps = [replace(step, iteration=-1) for step in one.steps] if late else one.steps
        self.after.setdefault(computes[count - 1] if count else -1, []).extend(steps)

    def _may_be_late(self, op: int, when: str) -> bool:
        """Whether an update in backward may wait for the cpu until the next forward: all that it works on is in host memory."""
        place = self.places[op]
        in_host = self._is_elsewhere(op) and place.state == place.gradients == self.works_in[place.processor]
        return when == "backward" and self.problem.cyclic and in_host and not self.uses_disk and not self._earlier(op)

    def _forward_ops(self, computes: Sequence[int]) -> int:
        """How many ops the step begins with before any of backward."""
        phases = [self.graph.ops[self.steps[place].op].phase for place in computes]  # type: ignore[union-attr]
        return phases.index(Phase.BACKWARD) if Phase.BACKWARD in phases else len(phases)

    def _as_listed(self, computes: Sequence[int], device: Sequence[Piece]) -> tuple[list[Piece], dict[int, Piece]]:
        """Copies that have their place in the list; those of gradients that leave by storage, too."""
        pieces: list[Piece] = []
        leaving: dict[int, Piece] = {}
        for place in range(len(self.steps)):
            for steps, at in ((self.before.get(place, []), place - 1), ([self.steps[place]], place - 1), (self.after.get(place, []), place)):
                count = bisect.bisect_right(computes, at)
                for step in steps:
                    if isinstance(step, Copy):
                        pieces.append(piece_of(self.problem, f"{LISTED}, {step.src} to {step.dst}", [step], device[count - 1 : count]))
                        if step.src == self.device and step.storage in self.waits_in:
                            leaving[step.storage] = pieces[-1]
        return pieces, leaving

    def _needed(self, order: Sequence[int], computes: Sequence[int]) -> dict[int, list[int]]:
        """By number of the op on the device, updates of the step before that it comes after."""
        first: dict[int, int] = {}
        for number in reversed(range(len(computes))):
            first |= dict.fromkeys(self._touched(self.graph.ops[self.steps[computes[number]].op]), number)  # type: ignore[union-attr]
        found: dict[int, list[int]] = {}
        for op in order:
            touched = self._touched(self.graph.ops[op]) & first.keys()
            # Parameters that come and go are on their way before they are needed.
            numbers = [max(0, first[s] - self.ahead) if s in self.streamed else first[s] for s in touched]
            if numbers:
                found.setdefault(min(numbers), []).append(op)
        return found

    def _coming(self, order: Sequence[int]) -> dict[int, list[int]]:
        """By update, those of the same processor whose state is to be on its way before it runs: a few are at a time."""
        found: dict[int, list[int]] = {op: [] for op in order}
        for processor in {self.places[op].processor for op in order}:
            same = [op for op in order if self.places[op].processor == processor]
            for place, op in enumerate(same):
                found[same[max(0, place - self.earlier)]].append(op)
        return found

    def _one_by_one(self, order: Sequence[int], iteration: int) -> dict[int, list[Step]]:
        """By update, what is in the list for it; the state of a few comes early."""
        coming = self._coming(order)
        found: dict[int, list[Step]] = {}
        for op in order:
            found[op] = [step for other in coming[op] for step in self._fetch_state(other, iteration)]
            found[op] += [*self._fetch_late(op, iteration), *self._compute(op, iteration), *self._results(op, iteration)]
        return found

    def _fetch_state(self, op: int, iteration: int) -> list[Step]:
        """What updates alone use: it may come early."""
        return self._copies([s for s in self._elsewhere(op) if s not in self.last_use], op, iteration)

    def _fetch_late(self, op: int, iteration: int) -> list[Step]:
        """Parameters, which forward and backward may have there until then, and gradients."""
        return [*self._fetch_parameters(op, iteration), *self._take_gradients(op, iteration)]

    def _fetch_parameters(self, op: int, iteration: int) -> list[Step]:
        return self._copies([s for s in self._elsewhere(op) if s in self.last_use], op, iteration)

    def _take_gradients(self, op: int, iteration: int) -> list[Step]:
        steps: list[Step] = []
        works_in = self.works_in[self.places[op].processor]
        for storage in self.graph.ops[op].reads:
            waits_in = self.waits_in.get(storage, works_in)
            if not self.graph.storages[storage].lasting and waits_in != works_in:
                steps += [Copy(storage, waits_in, works_in, iteration), Free(storage, waits_in, iteration=iteration)]
            elif self.graph.storages[storage].lasting and works_in not in self.home[storage] and self._is_kept(storage):
                steps.append(Copy(storage, self.home[storage][0], works_in, iteration))
        return steps

    def _elsewhere(self, op: int) -> list[int]:
        """Lasting storages that the update needs and that do not live where it runs."""
        found, works_in = self.graph.ops[op], self.works_in[self.places[op].processor]
        return [s for s in dict.fromkeys(found.mutates + found.reads) if self.graph.storages[s].lasting and works_in not in self.home[s]]

    def _copies(self, storages: Sequence[int], op: int, iteration: int) -> list[Step]:
        works_in = self.works_in[self.places[op].processor]
        return [Copy(s, self.home[s][0], works_in, iteration) for s in storages if self.home[s][0] != self.device]

    def _compute(self, op: int, iteration: int) -> list[Step]:
        found, works_in = self.graph.ops[op], self.works_in[self.places[op].processor]
        steps: list[Step] = [Compute(op, self.places[op].processor, iteration)]
        for storage in dict.fromkeys(found.reads + found.writes):
            if not self.graph.storages[storage].lasting and max(self.graph.uses[storage]) == op:
                steps.append(Free(storage, works_in, iteration=iteration))
        return steps

    def _results(self, op: int, iteration: int) -> list[Step]:
        """What the update has changed goes where it lives."""
        steps: list[Step] = []
        found, works_in = self.graph.ops[op], self.works_in[self.places[op].processor]
        changed = dict.fromkeys(found.mutates + found.writes)
        # Parameters before state: what passes does so in chunks, so that they are not behind all of it, and somebody waits for them.
        for storage in sorted(dict.fromkeys(found.mutates + found.writes + found.reads), key=lambda s: s not in self.last_use):
            if not self.graph.storages[storage].lasting:
                continue
            homes = self.home[storage]
            if storage in changed:
                steps += [Copy(storage, works_in, tier, iteration) for tier in homes if tier != works_in]
            if works_in not in homes:
                steps.append(Free(storage, works_in, iteration=iteration))
        return steps


@dataclass(frozen=True, slots=True)
class _Holding:
    """Gradients that wait on the device, by the number of the op after which they are complete; and how many bytes of them may."""

    nbytes: Mapping[int, int]
    most: int

    def few_of(self, counts: Sequence[int]) -> int:
        """For how many of the last of these backward does not wait; where gradients wait elsewhere, a few."""
        total = 0
        for number, count in enumerate(reversed(counts)):
            if number == IN_FLIGHT and not total:
                return IN_FLIGHT
            total += self.nbytes.get(count, 0)
            if number and total > self.most:
                return number
        return len(counts)


_GONE = Free(-1, "")  # a step that the schedule had and this one has not


def _stays(places: Sequence[int], numbers: Sequence[int], gap: int, begins: Sequence[float], gap_seconds: float) -> list[tuple[int, int]]:
    """Uses that follow each other within so many computes, or so many seconds, are one stay; (first place, last place) of each."""
    if not places:
        return []
    cuts = [count + 1 for count, (one, other) in enumerate(pairwise(numbers)) if other - one > gap and begins[other] - begins[one + 1] > gap_seconds]
    starts, stops = [0, *cuts], [*cuts, len(places)]
    return [(places[start], places[stop - 1]) for start, stop in zip(starts, stops, strict=True)]
