"""The coarse image of a program: what will run as a Problem and a Schedule, to be judged and simulated like any other. That is the prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import BadInput
from ..ir import INPUTS, CallPlan, Compute, Copy, Costs, Free, Graph, Menu, Phase, Placement, Problem, Program, Role, Schedule, Step, When
from ..ir.program import MIN_OUTSIDE_BYTES
from .coarse import Coarse, coarsen
from .states import with_states


@dataclass(frozen=True, slots=True)
class Image:
    problem: Problem
    schedule: Schedule
    coarse: Coarse
    program: Program  # without what has no time to leave


def image(menu: Menu, program: Program) -> Image:
    """What the program comes to. It is not judged here: whether it fits is for the judge to say."""
    choices = {call: menu.choice(call, plan.choice) for call, plan in program.calls.items()}
    coarse = coarsen(menu.problem.graph, choices)
    problem = replace(menu.problem, graph=coarse.graph, costs=Costs(_seconds(menu, program, coarse)))
    moves = _moves(problem, coarse, program.calls)
    taken = {move.storage for move in moves}
    outside = {gap: _outside_moves(problem, coarse, gap, plan, taken) for gap, plan in program.outside.items()}
    program = replace(_only(program, coarse, taken), outside={gap: program.outside[gap] for gap, found in outside.items() if found})
    schedule = _schedule(problem, [*moves, *(move for found in outside.values() for move in found)])
    return Image(*with_states(problem, schedule, program.states, program.when), coarse, program)


def with_lasting(made: Image, states: Mapping[str, Placement], when: When) -> Image:
    """The image of a program that leaves lasting state where it is, with that placed: what is planned for activations stays."""
    problem, schedule = with_states(made.problem, made.schedule, states, when)
    return Image(problem, schedule, made.coarse, replace(made.program, states=states, **when._asdict()))


def _seconds(menu: Menu, program: Program, coarse: Coarse) -> dict[tuple[int, str], float]:
    fine, device = menu.problem.costs.op_seconds, menu.problem.machine.device.name
    seconds: dict[tuple[int, str], float] = {}
    for place, members in enumerate(coarse.members):
        for processor in menu.problem.machine.processors:
            if all((member, processor.name) in fine for member in members):
                seconds[place, processor.name] = sum(fine[member, processor.name] for member in members)
    for call, plan in program.calls.items():
        choice = menu.choice(call, plan.choice)
        if choice.seconds and call in coarse.forward:
            seconds[coarse.forward[call], device] = choice.forward_seconds
            if call in coarse.backward:
                seconds[coarse.backward[call], device] = choice.backward_seconds
    return seconds


@dataclass(frozen=True, slots=True)
class _Sent:
    """A storage that leaves after one op and comes back before another."""

    storage: int
    tier: str
    out_after: int  # ops of the coarse graph
    free_after: int
    fetch_before: int


def _only(program: Program, coarse: Coarse, moved: set[int]) -> Program:
    """The program with only those sends that happen: a call right before the turn to backward has nothing to send."""
    calls = {}
    for call, plan in program.calls.items():
        sent = [name for name in plan.sent if name != INPUTS and coarse.saved.get((call, name)) in moved]
        if INPUTS in plan.sent and any(storage in moved for storage in coarse.inputs.get(call, ())):
            sent.append(INPUTS)
        calls[call] = replace(plan, sent=tuple(sent))
    return replace(program, calls=calls)


def _schedule(problem: Problem, moves: Sequence[_Sent]) -> Schedule:
    graph, device = problem.graph, problem.device_tier
    sent = {move.storage: move for move in moves}
    outs, frees, fetches = defaultdict(list), defaultdict(list), defaultdict(list)
    for move in sent.values():
        outs[move.out_after].append(move)
        frees[move.free_after].append(move)
        fetches[move.fetch_before].append(move)
    done: dict[int, list[int]] = defaultdict(list)  # by op: what nobody needs after it
    for held in graph.storages:
        uses = graph.uses[held.id]
        if uses and not held.lasting and held.id not in graph.consumed_by:
            done[uses[-1]].append(held.id)
    steps: list[Step] = []
    for op in graph.ops:
        steps += [Copy(move.storage, move.tier, device) for move in fetches[op.id]]
        steps.append(Compute(op.id, problem.machine.device.name))
        for storage in done[op.id]:
            steps.append(Free(storage, device))
            if storage in sent:
                steps.append(Free(storage, sent[storage].tier))
        steps += [Copy(move.storage, device, move.tier) for move in outs[op.id]]
        steps += [Free(move.storage, device, join=True) for move in frees[op.id]]
    return Schedule(tuple(steps), {s.id: (device,) for s in graph.storages if graph.is_there_at_start(s.id) or s.lasting})


def _is_own(graph: Graph, storage: int, backward: int) -> bool:
    """Whether no other region's backward reads it: what several share is held by all of them, and what the step was given by its caller."""
    readers = [op for op in graph.readers[storage] if graph.ops[op].kind == "region_backward"]
    return readers == [backward] and not graph.storages[storage].lasting and graph.storages[storage].role is not Role.INPUT


def outside_storages(graph: Graph, coarse: Coarse, order: Sequence[int], gap: int) -> list[int]:
    """What ops outside of regions make between two planned calls and keep for their own backward."""
    start = coarse.forward[order[gap - 1]] if gap else -1
    end = coarse.forward[order[gap]] if gap < len(order) else start
    found = []
    for op in graph.ops[start + 1 : end]:
        for storage in op.writes:
            readers = [graph.ops[reader] for reader in graph.readers[storage] if graph.ops[reader].phase is Phase.BACKWARD]
            is_kept = bool(readers) and all(reader.kind not in ("region_backward", "release") for reader in readers)
            if is_kept and graph.storages[storage].nbytes >= MIN_OUTSIDE_BYTES and storage not in graph.consumed_by:
                found.append(storage)
    return found


def planned_order(coarse: Coarse, calls: Collection[int]) -> list[int]:
    return [call for call in sorted(coarse.forward, key=coarse.forward.__getitem__) if call in calls]


def _outside_moves(problem: Problem, coarse: Coarse, gap: int, plan: CallPlan, taken: set[int]) -> list[_Sent]:
    """They leave when the next call begins, and come back before the backward of a call that comes right behind them in program order."""
    graph = problem.graph
    order = [call for call in planned_order(coarse, coarse.backward) if call in coarse.backward]
    found = []
    for storage in outside_storages(graph, coarse, order, gap):
        if storage in taken:
            continue
        uses = graph.uses[storage]
        back = next(use for use in uses if graph.ops[use].phase is Phase.BACKWARD)
        out_after = max(use for use in uses if use < back)
        release = max(coarse.forward[order[min(gap + plan.release - 1, len(order) - 1)]], out_after)
        fetch = min(back, coarse.backward[order[min(gap + plan.fetch - 1, len(order) - 1)]])
        if out_after <= release < fetch:
            found.append(_Sent(storage, plan.tier, out_after, release, fetch))
    return found


def _moves(problem: Problem, coarse: Coarse, calls: Mapping[int, CallPlan]) -> list[_Sent]:
    """In program order. What is read again before the turn to backward stays; what two calls send leaves with the first that may."""
    graph = problem.graph
    order = planned_order(coarse, calls)
    back = sorted(coarse.backward, key=coarse.backward.__getitem__)
    place_back = {call: place for place, call in enumerate(back)}
    found: dict[int, _Sent] = {}
    for place, call in enumerate(order):
        plan = calls[call]
        if not plan.sent or call not in coarse.backward:
            continue
        if plan.release < 1 or plan.fetch < 1:
            raise BadInput(f"region call {call} is released {plan.release} and fetched {plan.fetch} calls away; both must be at least 1")
        names = [name for name in plan.sent if name != INPUTS]
        if unknown := [name for name in names if (call, name) not in coarse.saved]:
            raise BadInput(
                f"region call {call} does not save {unknown[0]!r}, so it cannot send it; it saves {[n for c, n in coarse.saved if c == call]}"
            )
        given = [storage for storage in coarse.inputs[call] if INPUTS in plan.sent and _is_own(graph, storage, coarse.backward[call])]
        storages = [*(coarse.saved[call, name] for name in names), *given]
        used_at = coarse.backward[call]
        fetch_before = coarse.backward[back[max(0, place_back[call] - plan.fetch)]]
        for storage in storages:
            if storage in found or graph.storages[storage].lasting:
                continue
            uses = graph.uses[storage]
            turn = next((use for use in uses if use >= min(fetch_before, coarse.backward[back[0]])), used_at)
            last_forward = max(use for use in uses if use < turn)
            out_after = max(coarse.forward[call], last_forward)
            release = max(coarse.forward[order[min(place + plan.release, len(order) - 1)]], out_after)
            fetch = min(fetch_before, turn)
            if out_after < fetch and release < fetch:
                found[storage] = _Sent(storage, plan.tier, out_after, release, fetch)
    return list(found.values())
