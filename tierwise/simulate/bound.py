"""A step time no schedule within the budget can beat, so that every table shows how far from the limit a plan is.

Three bounds, each a relaxation that every legal schedule satisfies; the largest counts.

work    Every op runs at least once, wherever it is fastest to put it: the processors share the work as if ops could be split.
cycle   In a loop, an op that reads a lasting storage and the op that overwrites it in the same step form a circle around one period: the
        step lasts at least the longest chain of ops between them. In a cold step: the longest chain there is.
memory  When the first op that depends on the whole forward pass runs, only `budget` bytes are on the device. What backward still needs beyond
        that must come back afterwards, over a link or by running its op again. The cheapest mix of the two, fractional: recompute what costs
        the least seconds per byte, and copy the rest while computing.

Where an op has variants, its fastest counts, and only what all of them read is needed; where a storage has codecs, its smallest form counts.
Lossy codecs count only if asked for: a plan that rounds may be faster than what no exact plan can beat.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Machine, Phase, Problem


def lower_bound_seconds(problem: Problem, *, lossy: bool = False) -> float:
    table = _fastest_ways(problem)
    return max(_work_seconds(problem, table), _cycle_seconds(problem, table), _memory_seconds(problem, table, lossy))


def _fastest_ways(problem: Problem) -> Mapping[tuple[int, str], float]:
    """Seconds of an op on a processor by its fastest variant."""
    if not problem.costs.variants:
        return problem.costs.op_seconds
    table = dict(problem.costs.op_seconds)
    for variant in problem.costs.variants:
        for processor, seconds in variant.seconds.items():
            table[variant.op, processor] = min(seconds, table.get((variant.op, processor), seconds))
    return table


def _work_seconds(problem: Problem, table: Mapping[tuple[int, str], float]) -> float:
    """The least T such that all ops, split at will between the processors that can run them, fit into T on each."""
    device = problem.machine.device.name
    others = [p.name for p in problem.machine.processors[1:]]
    fixed, movable = 0.0, []
    elsewhere = 0.0
    for op in problem.graph.ops:
        here = table.get((op.id, device))
        there = min((table[op.id, name] for name in others if (op.id, name) in table), default=None)
        if here is None:
            elsewhere += there or 0.0
        elif there is None:
            fixed += here
        else:
            movable.append((here, there))
    # Send away first what costs the other processors least per second it saves the device; stop where both sides meet.
    on_device = fixed + sum(here for here, _ in movable)
    away = elsewhere
    count = max(1, len(others))
    for here, there in sorted(movable, key=lambda pair: pair[1] / pair[0] if pair[0] else float("inf")):
        if on_device - here >= (away + there) / count:
            on_device, away = on_device - here, away + there
            continue
        share = (on_device - away / count) / (here + there / count) if here + there else 0.0
        share = min(1.0, max(0.0, share))
        on_device, away = on_device - share * here, away + share * there
        break
    return max(on_device, away / count)


def _fastest(problem: Problem, table: Mapping[tuple[int, str], float]) -> list[float]:
    seconds: list[float] = [float("inf")] * len(problem.graph.ops)
    for (op, _), value in table.items():
        seconds[op] = min(seconds[op], value)
    return seconds


def _dependencies(problem: Problem) -> list[list[int]]:
    """For each op, the ops it must follow because it needs what they wrote, whichever of its variants runs."""
    graph, always = problem.graph, _always_read(problem)
    last_writer: dict[int, int] = {}
    found = []
    for op in graph.ops:
        found.append(sorted({last_writer[s] for s in always.get(op.id, op.reads + op.mutates) if s in last_writer}))
        for storage in op.writes + op.mutates:
            last_writer[storage] = op.id
    return found


def _always_read(problem: Problem) -> dict[int, tuple[int, ...]]:
    """For ops with variants that read something else: what every one of them reads."""
    found: dict[int, tuple[int, ...]] = {}
    for variant in problem.costs.variants:
        if variant.reads is not None:
            op = problem.graph.ops[variant.op]
            read = (*variant.reads, *op.mutates)
            found[op.id] = tuple(s for s in found.get(op.id, op.reads + op.mutates) if s in read)
    return found


MAX_CIRCLES = 16  # lasting storages tried; any subset gives a valid bound


def _cycle_seconds(problem: Problem, table: Mapping[tuple[int, str], float]) -> float:
    graph = problem.graph
    seconds, after = _fastest(problem, table), _dependencies(problem)
    if not problem.cyclic:
        return max(_longest(seconds, after, range(len(graph.ops))), default=0.0)
    circles = []
    for storage in graph.storages:
        writers = graph.writers[storage.id]
        if storage.lasting and writers:
            readers = [r for r in graph.readers[storage.id] if r <= writers[0]]
            if readers:
                circles.append((writers[-1] - readers[0], storage.id, readers, writers[-1]))
    best = 0.0
    for _, _, readers, writer in sorted(circles, reverse=True)[:MAX_CIRCLES]:
        best = max(best, _longest(seconds, after, readers)[writer])
    return best


def _longest(seconds: list[float], after: list[list[int]], starts) -> list[float]:  # type: ignore[no-untyped-def]
    """Longest chain of seconds from any of `starts` to each op, itself included; -inf where none leads there."""
    is_start = set(starts)
    length = [float("-inf")] * len(seconds)
    for op, needed in enumerate(after):
        best = max((length[n] for n in needed), default=float("-inf"))
        if op in is_start:
            best = max(best, 0.0)
        length[op] = best + seconds[op]
    return [value if value > float("-inf") else 0.0 for value in length]


def _memory_seconds(problem: Problem, seconds: Mapping[tuple[int, str], float], lossy: bool) -> float:
    graph, machine = problem.graph, problem.machine
    pivot = next((op.id for op in graph.ops if op.phase is Phase.BACKWARD), None)
    if pivot is None:
        return 0.0
    after, always = _dependencies(problem), _always_read(problem)
    size = _least_bytes(problem, lossy)
    ahead = _ancestors(after, pivot)  # they all run before the pivot can
    behind = _descendants(after, pivot)  # they all run after it
    device = machine.device.name
    on_device_only = {op.id for op in graph.ops if all((op.id, p.name) not in seconds for p in machine.processors[1:])}
    again: list[tuple[float, int]] = []  # (seconds per byte to run again, bytes)
    only_copies = 0  # bytes that cannot be made again
    for storage in graph.storages:
        needed = [r for r in graph.readers[storage.id] if r in behind and r in on_device_only and (r not in always or storage.id in always[r])]
        if not needed or not size[storage.id]:
            continue
        producer = graph.producer(storage.id)
        first_write = graph.writers[storage.id][0] if graph.writers[storage.id] else None
        if producer is None:
            # There from the start: it is here at the pivot, or it is copied in after it.
            if first_write is None or first_write >= needed[0]:
                only_copies += size[storage.id]
        elif producer in ahead and len(graph.writers[storage.id]) == 1:
            op = graph.ops[producer]
            made = sum(size[s] for s in op.writes)
            if op.replayable and not op.mutates:
                again.append((seconds[producer, device] / made if producer in on_device_only else 0.0, size[storage.id]))
            else:
                only_copies += size[storage.id]
    excess = float(only_copies + sum(nbytes for _, nbytes in again) - problem.budget_bytes)
    if excess <= 0:
        return 0.0
    work = sum(seconds[op, device] for op in on_device_only)
    rate = _rate_into(machine, machine.device.tier) or 1e-30  # no link: nothing comes back over one
    # T >= work + recompute(y) and T >= (excess - y) / rate, with y bytes recomputed, cheapest first: T is least where the two meet.
    recompute, moved = 0.0, excess
    for per_byte, nbytes in sorted(again):
        meet = (moved / rate - work - recompute) / (per_byte + 1 / rate)
        take = min(float(nbytes), moved, max(0.0, meet))
        recompute, moved = recompute + take * per_byte, moved - take
        if take < nbytes:
            break
    return max(work + recompute, moved / rate)


def _least_bytes(problem: Problem, lossy: bool) -> list[int]:
    """What each storage takes in its smallest form."""
    size = [storage.nbytes for storage in problem.graph.storages]
    for codec in problem.costs.codecs:
        if lossy or not codec.lossy:
            for storage, nbytes in codec.encoded_bytes.items():
                size[storage] = min(size[storage], nbytes)
    return size


def _rate_into(machine: Machine, tier: str) -> float:
    """The most bytes a second that can arrive over all links together; one lane that all of them share caps them."""
    links = [link for link in machine.links if link.dst == tier]
    if not links:
        return 0.0
    shared = set.intersection(*(set(link.lanes) for link in links))
    caps = [max(link.lanes[lane] for link in links) for lane in shared]
    return min([sum(link.bytes_per_second for link in links), *caps])


def _ancestors(after: list[list[int]], op: int) -> set[int]:
    found, stack = set(), list(after[op])
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack.extend(after[at])
    return found


def _descendants(after: list[list[int]], op: int) -> set[int]:
    found = {op}
    for at, needed in enumerate(after):
        if any(n in found for n in needed):
            found.add(at)
    return found
