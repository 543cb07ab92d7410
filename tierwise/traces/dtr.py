"""Step traces of the DTR artifact (ICLR 2021): operators with their times, storages, views and the points where the program let go.

One cold step. What the form says and a Graph does not is handed to policies/dtr.py as options:

- a view is a storage without bytes that belongs to another; an op that reads a view reads both, and evicting the one undoes the other;
- a constant is written by an op of no seconds that cannot be replayed, just before the op it appears before, and then stays;
- an op that mutates writes a new storage, and the program lets the old one go;
- what the program still holds at the end is lasting, and is brought back in the order of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFile, InvalidGraph
from ..ir import Costs, Graph, Machine, Op, Phase, Problem, Processor, Role, Storage, Tier, check_graph
from . import read_json

NANOSECONDS_PER_SECOND = 1e9
NEEDED = ("ops", "storages", "tensor_storage", "held_at_end", "peak_bytes")


@dataclass(frozen=True, slots=True)
class DtrTrace:
    name: str
    source: str
    problem: Problem  # its budget is the peak with nothing evicted
    peak_bytes: int  # what budgets are shares of
    published: Mapping[str, Mapping[str, float | str]]  # heuristic -> budget / peak -> step time / in-core time, or ">2", or "OOM"
    measured: Mapping[str, Any]  # the prototype's measurements, as they stand in the file
    views: Mapping[int, int]
    inputs: Mapping[int, tuple[int, ...]]
    released_after: Mapping[int, int]
    held: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        """What policies/dtr.py must be told to follow the recorded program."""
        program = {"views": self.views, "inputs": self.inputs, "released_after": self.released_after, "held": self.held}
        return program | {"evict_gradients": True}


def load(path: str | Path) -> DtrTrace:
    """Read a trace, or raise BadFile with what is wrong with it."""
    document = read_json(path)
    if missing := [key for key in NEEDED if key not in document]:
        raise BadFile(f"{path} is not a DTR trace: {', '.join(map(repr, missing))} missing")
    try:
        return _Reader(document).trace(Path(path).name.split(".")[0])
    except KeyError as error:
        raise BadFile(f"{path}: {error} is missing; it may be cut short or of another form") from None
    except (TypeError, ValueError, AttributeError, InvalidGraph) as error:
        raise BadFile(f"{path}: {error}; it may be cut short or of another form") from None


class _Reader:
    """Storages keep their ids; each view becomes one more storage. Ops move up by the ops that write constants."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.ops: list[Mapping[str, Any]] = document["ops"]
        self.given: list[Mapping[str, Any]] = document["storages"]
        self.tensor_storage = [_whole(s, "storage of a tensor", below=len(self.given)) for s in document["tensor_storage"]]
        for kind, items in (("op", self.ops), ("storage", self.given)):
            for place, item in enumerate(items):
                if item.get("id", place) != place:
                    raise ValueError(f"{kind} {item['id']} stands at place {place}; they must be equal")
        start = document.get("backward_start_op")
        self.backward_start = len(self.ops) + 1 if start is None else _whole(start, "backward_start_op")
        self.views: dict[int, int] = {}  # storage without bytes -> the one it views
        self.place_of: dict[int, int] = {}  # tensor -> the storage it stands for in the graph
        self.names = [f"storage{i}" for i in range(len(self.given))]
        self._place_tensors()
        self.held = tuple(dict.fromkeys(self._of(tensor) for tensor in document["held_at_end"]))

    def trace(self, name: str) -> DtrTrace:
        ops, seconds, op_at = self._ops()
        graph = Graph(tuple(ops), self._storages())
        check_graph(graph)
        peak = _whole(self.document["peak_bytes"], "peak_bytes")
        capacity = max(peak, _whole(self.document.get("peak_bytes_constants_kept", 0), "peak_bytes_constants_kept"))
        source = str(self.document.get("source", ""))
        machine = Machine("dtr artifact", (Tier("hbm", capacity),), (), (Processor("gpu", "hbm"),), source)
        published = self.document.get("published", {})
        return DtrTrace(
            name=str(self.document.get("model", name)),
            source=source,
            problem=Problem(graph, machine, Costs({(op, "gpu"): value for op, value in enumerate(seconds)}), cyclic=False),
            peak_bytes=peak,
            published={heuristic: dict(cells) for heuristic, cells in published.get("simulated_slowdown", {}).items()},
            measured=dict(published.get("prototype") or {}),
            views=self.views,
            inputs={op_at[place]: self._inputs(place) for place in range(len(self.ops))},
            released_after={
                storage: op_at[_whole(given["released_after"], "released_after", below=len(self.ops))]
                for storage, given in enumerate(self.given)
                if not given["is_constant"] and given["released_after"] is not None
            },
            held=self.held,
        )

    def _of(self, tensor: Any) -> int:
        return self.place_of[_whole(tensor, "tensor", below=len(self.tensor_storage))]

    def _place_tensors(self) -> None:
        """The first tensor of a storage stands for its bytes, all others are views of it."""
        produced = {tensor for op in self.ops for tensor in op["outputs"]}
        begun: set[int] = set()
        for tensor, storage in enumerate(self.tensor_storage):
            if tensor not in produced:
                if not self.given[storage]["is_constant"]:
                    raise ValueError(f"no op makes tensor {tensor}, and storage {storage} it lies in is no constant")
                begun.add(storage)
                self.place_of[tensor] = storage
                self.names[storage] = f"constant{storage}"
        for place, op in enumerate(self.ops):
            targets = {_whole(tensor, "tensor"): _whole(storage, "storage", below=len(self.given)) for tensor, storage in op.get("aliases", ())}
            for number, tensor in enumerate(op["outputs"]):
                storage = self.tensor_storage[_whole(tensor, "tensor", below=len(self.tensor_storage))]
                if targets.get(tensor, storage) != storage:
                    raise ValueError(f"tensor {tensor} views storage {targets[tensor]} and lies in storage {storage}")
                if tensor in self.place_of:
                    raise ValueError(f"op {place} makes tensor {tensor}, which an op has made before")
                name = f"{op['name']}{place}" + (f".{number}" if len(op["outputs"]) > 1 else "")
                if storage not in begun:
                    if tensor in targets or self.given[storage]["is_constant"]:
                        raise ValueError(f"op {place} views storage {storage}, which nothing has made")
                    begun.add(storage)
                    self.place_of[tensor] = storage
                    self.names[storage] = name
                    continue
                self.place_of[tensor] = len(self.names)
                self.views[len(self.names)] = storage
                self.names.append(name)

    def _storages(self) -> tuple[Storage, ...]:
        lasting = {*self.held, *(self.views[storage] for storage in self.held if storage in self.views)}
        found = []
        for storage, given in enumerate(self.given):
            nbytes = _whole(given["bytes"], f"bytes of storage {storage}")
            if given["is_constant"]:
                found.append(Storage(storage, self.names[storage], nbytes, Role.BUFFER, lasting=True))
            else:
                held_late = storage in lasting and self._phase(_whole(given["born"], "born")) is Phase.BACKWARD
                found.append(Storage(storage, self.names[storage], nbytes, Role.GRAD if held_late else Role.ACTIVATION, storage in lasting))
        for view, base in self.views.items():
            found.append(Storage(view, self.names[view], 0, found[base].role, view in lasting or found[base].role is Role.BUFFER))
        return tuple(found)

    def _phase(self, place: int) -> Phase:
        if place < len(self.ops) and "phase" in self.ops[place]:
            return Phase(self.ops[place]["phase"])
        return Phase.BACKWARD if place >= self.backward_start else Phase.FORWARD

    def _ops(self) -> tuple[list[Op], list[float], list[int]]:
        constants: dict[int, list[int]] = {}
        for storage, given in enumerate(self.given):
            if given["is_constant"]:
                constants.setdefault(_whole(given["born"], "born", below=len(self.ops) + 1), []).append(storage)
        found: list[Op] = []
        seconds: list[float] = []
        op_at: list[int] = []
        made: set[int] = set()
        for place in range(len(self.ops) + 1):
            if place in constants:
                writes = tuple(constants[place])
                found.append(Op(len(found), f"constants{place}", self._phase(place), (), writes, kind="constant", replayable=False))
                seconds.append(0.0)
                made.update(writes)
            if place < len(self.ops):
                op_at.append(len(found))
                found.append(self._op(place, len(found)))
                seconds.append(_time(self.ops[place]["time_ns"]) / NANOSECONDS_PER_SECOND)
                if early := sorted({*found[-1].reads} - made):
                    raise ValueError(f"op {place} reads {self.names[early[0]]} before it is there")
                made.update(found[-1].writes)
        return found, seconds, op_at

    def _op(self, place: int, op_id: int) -> Op:
        op = self.ops[place]
        writes = tuple(self._of(tensor) for tensor in op["outputs"])
        reads = dict.fromkeys(part for storage in self._inputs(place) for part in (storage, self.views.get(storage, storage)))
        return Op(op_id, f"{op['name']}{place}", self._phase(place), tuple(reads), writes, kind=str(op["name"]))

    def _inputs(self, place: int) -> tuple[int, ...]:
        """What an op asks for, in order and as often; what it makes views of is among it, said or not."""
        op = self.ops[place]
        made = {self._of(tensor) for tensor in op["outputs"]}
        asked = [self._of(tensor) for tensor in op["inputs"]]
        there = made | {self.views.get(storage, storage) for storage in asked}
        return (*asked, *dict.fromkeys(self.views[view] for view in sorted(made) if self.views.get(view, view) not in there))


def _whole(value: Any, what: str, *, below: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} is {value!r}; it must be a whole number of at least 0")
    if below is not None and value >= below:
        raise ValueError(f"{what} is {value}; there are only {below}")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"time_ns is {value!r}; it must be a number of at least 0")
    return float(value)
