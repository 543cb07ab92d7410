"""Which submodules are regions: found by themselves from the calls of one traced step.

A repeated block is a submodule with parts of its own that has a sibling (in a list or sequence of modules, one of the same class; elsewhere, one with
equal parameters too) or is called more than once. Going down from the model, the outermost repeated blocks are region calls; on the way there, so is
every other submodule that holds no repeated block (embedding, final norm, head). Sequential and similar containers, and a submodule that does more
than half of the work, are always opened. What is left is glue. Calls with equal shapes and equal ops are of one region class.

A region must be a function of its arguments and parameters. One that reads or leaves tensors by another way is glue, and a note says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import Phase, Region, RegionCall
from .calls import ROOT, ModuleCall
from .storages import Block
from .trace import Record

GLUE = -1
_OPENED_ABOVE_SHARE = 0.5  # of all forward ops


@dataclass(frozen=True, slots=True)
class Regions:
    regions: tuple[Region, ...]
    calls: tuple[RegionCall, ...]
    of_call: dict[int, int]  # module call -> region call, for the calls inside it too
    notes: tuple[str, ...]


def find_regions(calls: Sequence[ModuleCall], records: Sequence[Record], blocks: Sequence[Block]) -> Regions:
    chosen = _choose(calls, records)
    inside = _nearest_chosen(calls, chosen)
    forward: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.phase is Phase.FORWARD and inside[record.call] != GLUE:
            forward[inside[record.call]].append(record)
    leaks = _leaks(calls, records, blocks, inside)
    notes = []
    classes: dict[tuple[Any, ...], Region] = {}
    region_calls: list[RegionCall] = []
    number: dict[int, int] = {}
    for call in (calls[i] for i in chosen if forward[i]):
        if call.id in leaks:
            notes.append(f"{call.module} ({call.kind}) could not be captured as a region and is captured as eager glue: it {leaks[call.id]}")
            continue
        key = (call.signature, tuple(_shape_of(record, blocks) for record in forward[call.id]))
        if key not in classes:
            classes[key] = Region(len(classes), call.kind, call.module)
        number[call.id] = len(region_calls)
        region_calls.append(RegionCall(len(region_calls), classes[key].id, call.module))
    of_call = {call.id: number.get(inside[call.id], GLUE) for call in calls}
    return Regions(tuple(classes.values()), tuple(region_calls), of_call, tuple(notes))


def _choose(calls: Sequence[ModuleCall], records: Sequence[Record]) -> list[int]:
    """The calls that are regions, in the order they were made."""
    first_run = [call for call in calls if call.stands_for is None and call.id != ROOT]
    siblings = Counter(call.sibling_key for call in first_run if call.has_children)
    is_repeated = {call.id for call in first_run if call.has_children and siblings[call.sibling_key] > 1}
    holds_repeated = {ancestor for call in is_repeated for ancestor in _ancestors(calls, call)}
    forward_ops = Counter(
        ancestor for record in records if record.phase is Phase.FORWARD for ancestor in [record.call, *_ancestors(calls, record.call)]
    )
    children: dict[int, list[ModuleCall]] = defaultdict(list)
    for call in first_run:
        children[call.parent].append(call)
    chosen: list[int] = []
    pending = children[ROOT][::-1]
    while pending:
        call = pending.pop()
        is_large = call.has_children and forward_ops[call.id] > _OPENED_ABOVE_SHARE * forward_ops[ROOT]
        if call.id not in is_repeated and (call.is_container or call.id in holds_repeated or is_large):
            pending.extend(children[call.id][::-1])
        else:
            chosen.append(call.id)
    return chosen


def _ancestors(calls: Sequence[ModuleCall], call: int) -> list[int]:
    found = []
    while (call := calls[call].parent) >= 0:
        found.append(call)
    return found


def _nearest_chosen(calls: Sequence[ModuleCall], chosen: Sequence[int]) -> dict[int, int]:
    """For each call, the chosen call it is or lies in; a call made again in backward lies where the call that asked for it lies."""
    wanted = set(chosen)
    found: dict[int, int] = {}
    for call in calls:  # parents and what a call stands for come before it
        if call.id in wanted:
            found[call.id] = call.id
        elif call.stands_for is not None:
            found[call.id] = found[call.stands_for]
        else:
            found[call.id] = found.get(call.parent, GLUE)
    return found


def _leaks(calls: Sequence[ModuleCall], records: Sequence[Record], blocks: Sequence[Block], inside: dict[int, int]) -> dict[int, str]:
    """Chosen calls that are not functions of their arguments, each with what it does instead."""
    made_by: dict[int, Record] = {}
    found: dict[int, str] = {}
    for record in records:
        if record.phase is not Phase.FORWARD:
            continue
        reader = inside[record.call]
        for block in record.reads:
            if blocks[block].lasting:
                continue
            maker = made_by.get(block)
            made_in = GLUE if maker is None else inside[maker.call]
            if made_in == reader:
                continue
            if maker is not None and all(blocks[read].lasting for read in maker.reads):
                continue  # a cast or a constant, made from parameters alone: whoever needs it can make it again
            if reader != GLUE and block not in calls[reader].inputs:
                found.setdefault(reader, f"reads {blocks[block].name}, which is not among its arguments")
            if made_in != GLUE and block not in calls[made_in].outputs:
                found.setdefault(made_in, f"makes {blocks[block].name}, which {record.name} reads though it was not returned")
        for block in record.writes:
            made_by[block] = record
    return found


def _shape_of(record: Record, blocks: Sequence[Block]) -> tuple[Any, ...]:
    return (record.kind, record.flops, tuple(blocks[block].nbytes for block in record.reads), tuple(blocks[block].nbytes for block in record.writes))
