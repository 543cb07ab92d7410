"""A menu with as few ops and storages as its programs can tell apart. Whoever tries many programs has less to go through each time.

Two ops for each region call: what a region makes and uses up itself is in no program's image. Updates of one module path a few at a time: they move
together. Then storages of one role that the same ops make and read are one: parameters of a block, its moments, its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ..ir import Choice, Costs, Graph, Menu, Op, Phase, Role, Storage
from ..ir.placement import owner, region_of
from .coarse import RegionBorder, coarsen, renumber

EVERYTHING_READ = Choice("", (), reads_inputs=True, reads_outputs=True)
PIECES = 4  # updates of one region; what is under way at a time is told to a quarter of it


def compact(menu: Menu) -> Menu:
    """Programs for the one are programs for the other, with the same image but for the order in which a path's parameters are updated."""
    graph = menu.problem.graph
    calls = [call for call in graph.calls if call.region in menu.choices]
    coarse = coarsen(graph, {call.id: EVERYTHING_READ for call in calls})
    ops, members = _merged_updates(coarse.graph, menu.homes or {call.module for call in calls})
    found = _merged_storages(ops, coarse.graph)
    fine = menu.problem.costs.op_seconds
    stand_for = [[member for op in merged for member in coarse.members[op]] for merged in members]
    processors = tuple(dict.fromkeys(processor for _, processor in fine))
    seconds = {
        (place, processor): sum(fine[member, processor] for member in all_of)
        for place, all_of in enumerate(stand_for)
        for processor in processors
        if all((member, processor) in fine for member in all_of)
    }
    choices = {region: _with_workspaces(menu, region) for region in menu.choices}
    return replace(menu, problem=replace(menu.problem, graph=found, costs=Costs(seconds)), choices=choices)


def _merged_updates(graph: Graph, paths: Collection[str]) -> tuple[list[Op], list[list[int]]]:
    """The ops, those of one path's updates in a few pieces of about the same size, and which each stands for."""
    merged: dict[int, int] = {}  # update -> the first of its piece
    by_path: dict[str, list[Op]] = {}
    for op in graph.ops:
        if op.phase is Phase.UPDATE and not op.writes and not op.in_place:
            names = [graph.storages[s].name for s in op.mutates if graph.storages[s].role is Role.PARAM]
            if names and (path := owner(names[0], paths)) is not None:
                by_path.setdefault(path, []).append(op)
    modules = {call.module for call in graph.calls}
    region = {path: region_of(path, modules) for path in by_path}
    sizes = {path: sum(_nbytes(graph, op) for op in updates) for path, updates in by_path.items()}
    of_regions = Counter[str]()
    for path, nbytes in sizes.items():
        of_regions[region[path]] += nbytes
    for path, updates in by_path.items():
        touched = [storage for op in updates for storage in op.mutates]
        whole, done = sizes[path], 0
        part = whole / max(1, of_regions[region[path]])
        pieces = max(1, round(PIECES * part)) if len(touched) == len({*touched}) else 1  # one storage of several parameters is updated in one piece
        first: dict[int, int] = {}
        for op in updates:
            piece = min(pieces - 1, pieces * done // max(1, whole))
            merged[op.id] = first.setdefault(piece, op.id)
            done += _nbytes(graph, op)
    members: dict[int, list[int]] = {}
    for op in graph.ops:
        members.setdefault(merged.get(op.id, op.id), []).append(op.id)
    ops = []
    for first_id, all_of in members.items():
        parts = [graph.ops[op] for op in all_of]
        ops.append(
            replace(
                parts[0],
                reads=tuple(dict.fromkeys(s for part in parts for s in part.reads)),
                mutates=tuple(dict.fromkeys(s for part in parts for s in part.mutates)),
                workspace_bytes=max(part.workspace_bytes for part in parts),
            )
            if len(parts) > 1
            else graph.ops[first_id]
        )
    return ops, list(members.values())


def _merged_storages(ops: list[Op], graph: Graph) -> Graph:
    """One storage for all of a role that the same ops touch in the same way."""
    places: dict[int, list[tuple[int, str]]] = {}
    for place, op in enumerate(ops):
        for how, touched in (("reads", op.reads), ("writes", op.writes), ("mutates", op.mutates)):
            for number in touched:
                places.setdefault(number, []).append((place, how))
    alone = {number for op in ops for pair in op.in_place for number in pair}
    representatives: dict[object, int] = {}
    instead: dict[int, int] = {}
    for storage in graph.storages:
        key: object = (storage.role, storage.lasting, tuple(places.get(storage.id, ())))
        mergeable = storage.id in places and storage.id not in alone and storage.role in (Role.PARAM, Role.OPTIMIZER_STATE, Role.GRAD)
        instead[storage.id] = representatives.setdefault(key if mergeable else storage.id, storage.id)
    sizes = [0] * len(graph.storages)
    for storage in graph.storages:
        sizes[instead[storage.id]] += storage.nbytes
    storages: list[Storage] = [replace(s, nbytes=sizes[s.id]) for s in graph.storages]

    def of(touched: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(instead[number] for number in touched))

    ops = [replace(op, reads=of(op.reads), writes=of(op.writes), mutates=of(op.mutates)) for op in ops]
    kept = {s for op in ops for s in op.reads + op.writes + op.mutates}
    storages = [s if s.id in kept or instead[s.id] == s.id else replace(s, role=Role.ACTIVATION, lasting=False) for s in storages]
    return renumber(ops, storages, graph)[0]


def _nbytes(graph: Graph, op: Op) -> int:
    return sum(graph.storages[storage].nbytes for storage in op.mutates)


def _with_workspaces(menu: Menu, region: int) -> tuple[Choice, ...]:
    """As the image would have them where nothing is known."""
    graph, choices = menu.problem.graph, menu.choices[region]
    if all(choice.forward_workspace_bytes is not None and choice.backward_workspace_bytes is not None for choice in choices):
        return choices
    call = next(call.id for call in graph.calls if call.region == region)
    forward, backward = ([op for op in graph.ops if op.region == call and op.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    if not forward:
        return choices
    border = RegionBorder(graph, forward, backward)
    ahead, behind = border.forward_workspace(), border.backward_workspace()
    return tuple(
        replace(
            choice,
            forward_workspace_bytes=max(0, ahead - choice.saved_bytes) if choice.forward_workspace_bytes is None else choice.forward_workspace_bytes,
            backward_workspace_bytes=behind if choice.backward_workspace_bytes is None else choice.backward_workspace_bytes,
        )
        for choice in choices
    )
