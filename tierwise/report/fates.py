"""What became of what forward made and backward needs: kept, copied or recomputed; by storage and as a tree of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from ..ir import Compute, Copy, Graph, Op, Phase, Problem, Role, Schedule, Within

ROOT = "the whole step"


class Fate(StrEnum):
    KEPT = "kept"
    COPIED = "copied"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Module:
    """A module with everything below it summed in. Siblings in a row that are treated alike are one Module with `alike` of them summed."""

    name: str
    alike: int = 1
    kept_bytes: int = 0
    copied_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed_ops: int = 0
    recomputed_seconds: float = 0.0
    lasting_device_bytes: int = 0  # parameters, buffers and optimizer state at home on the device between steps
    lasting_elsewhere_bytes: int = 0
    children: tuple[Module, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return self.kept_bytes + self.copied_bytes + self.recomputed_bytes


_NUMBERS = tuple(f.name for f in fields(Module) if f.name not in ("name", "alike", "children"))
_EXACT = tuple(name for name in _NUMBERS if name != "recomputed_seconds")  # measured seconds of equal blocks differ a little


def recomputations(schedule: Schedule) -> Iterator[tuple[int, Compute]]:
    """Every Compute of an op that ran before in the same step, with its place in the schedule."""
    seen: set[tuple[int, int]] = set()
    for place, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            if (step.op, step.iteration) in seen:
                yield place, step
            seen.add((step.op, step.iteration))


def fates(problem: Problem, schedule: Schedule) -> dict[int, Fate]:
    """For each storage that is there when forward ends and that is read after it: what the schedule does with it in between."""
    graph, device = problem.graph, problem.device_tier
    again = {storage for _, step in recomputations(schedule) for storage in graph.ops[step.op].writes}
    copied = {step.storage for step in schedule.steps if isinstance(step, Copy) and step.src == device != step.dst}
    found = {}
    for storage in graph.storages:
        producer = graph.producer(storage.id)
        made_before = storage.role is Role.INPUT or (producer is not None and graph.ops[producer].phase is Phase.FORWARD)
        if storage.lasting or not made_before or all(graph.ops[op].phase is Phase.FORWARD for op in graph.readers[storage.id]):
            continue
        # A copy may be a spare one; what a schedule both copies and recomputes comes back by the copy if one brings it back.
        found[storage.id] = Fate.COPIED if storage.id in copied else Fate.RECOMPUTED if storage.id in again else Fate.KEPT
    return found


# -- the tree ---------------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sum:
    """A module while it is being filled."""

    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_NUMBERS, 0))
    children: dict[str, _Sum] = field(default_factory=dict)

    def add(self, path: tuple[str, ...], name: str, amount: float) -> None:
        self.numbers[name] += amount
        if path:
            self.children.setdefault(path[0], _Sum()).add(path[1:], name, amount)

    def module(self, name: str) -> Module:
        children = (child.module(key) for key, child in self.children.items())
        whole = {key: value if key == "recomputed_seconds" else int(value) for key, value in self.numbers.items()}
        return Module(name, children=tuple(_together(children)), **whole)  # type: ignore[arg-type]


def module_tree(problem: Problem, schedule: Schedule, within: Iterable[Within] = ()) -> Module:
    graph, device = problem.graph, problem.device_tier
    tree = _Sum()
    for storage, fate in fates(problem, schedule).items():
        producer = graph.producer(storage)
        path = op_path(graph, graph.ops[producer]) if producer is not None else ()
        tree.add(path, f"{fate}_bytes", graph.storages[storage].nbytes)
    for _, step in recomputations(schedule):
        path = op_path(graph, graph.ops[step.op])
        tree.add(path, "recomputed_ops", 1)
        tree.add(path, "recomputed_seconds", problem.seconds(step.op, step.on))
    for block in within:
        path = tuple(block.module.split("."))
        tree.add(path, "recomputed_bytes", block.nbytes)
        tree.add(path, "recomputed_seconds", block.seconds)
    paths = lasting_paths(graph)
    for storage, tiers in schedule.home.items():
        if storage in paths:
            where = "lasting_device_bytes" if device in tiers else "lasting_elsewhere_bytes"
            tree.add(paths[storage], where, graph.storages[storage].nbytes)
    return tree.module(ROOT)


def op_path(graph: Graph, op: Op) -> tuple[str, ...]:
    """The module an op belongs to: 'blocks.3.mlp.up.mm.2' -> blocks, 3, mlp, up."""
    parts = op.name.removeprefix("release ").split(".backward")[0].split(".")
    if len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    parts.pop()
    if 0 <= op.region < len(graph.calls):
        module = graph.calls[op.region].module.split(".")
        if parts[: len(module)] != module:
            return tuple(filter(None, module))
    return tuple(parts)


def lasting_paths(graph: Graph) -> dict[int, tuple[str, ...]]:
    """The module of each lasting storage; optimizer state belongs where its parameter does."""
    params = {storage.name for storage in graph.storages if storage.role is Role.PARAM}
    found = {}
    for storage in graph.storages:
        if storage.lasting:
            parts = storage.name.split(".")
            of = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in params), len(parts))
            found[storage.id] = tuple(parts[: of - 1])
    return found


def _together(modules: Iterable[Module]) -> Iterator[Module]:
    """Numbered siblings in a row that are treated alike, as one."""
    row: list[Module] = []
    for module in modules:
        if row and not (row[-1].name.isdigit() and module.name.isdigit() and _alike(row[-1], module)):
            yield _summed(row)
            row = []
        row.append(module)
    if row:
        yield _summed(row)


def _alike(a: Module, b: Module) -> bool:
    same = all(getattr(a, name) == getattr(b, name) for name in _EXACT) and len(a.children) == len(b.children)
    return same and all(x.name == y.name and x.alike == y.alike and _alike(x, y) for x, y in zip(a.children, b.children, strict=True))


def _summed(row: list[Module]) -> Module:
    if len(row) == 1:
        return row[0]
    children = tuple(_summed(list(group)) for group in zip(*(module.children for module in row), strict=True))
    children = tuple(replace(child, name=mine.name, alike=mine.alike) for child, mine in zip(children, row[0].children, strict=True))
    numbers = {name: sum(getattr(module, name) for module in row) for name in _NUMBERS}
    return Module(f"{row[0].name} … {row[-1].name}", alike=len(row), children=children, **numbers)
