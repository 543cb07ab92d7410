"""JSON in and out. A file says its kind and the version of the format; what does not fit is refused with what was found.

    {"tierwise": "schedule", "format": 1, "graph": "<fingerprint of the graph it is for>", ...fields of the type...}

Fields at their default are left out, so that a graph of ten thousand ops stays readable and small.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFile, TierwiseError
from .graph import Graph, Op, Phase, Region, RegionCall, Role, Storage
from .judge import check_graph
from .machine import Link, Machine, Processor, Tier
from .problem import Costs, Problem
from .schedule import Compute, Copy, Free, Schedule, Step
from .timeline import Curve, Span, Timeline

FORMAT = 1
Json = dict[str, Any]
Document = Graph | Machine | Problem | Schedule | Timeline


# -- files ------------------------------------------------------------------------------------------------------------------------------


def save(document: Document, path: str | Path, *, graph: Graph | None = None) -> None:
    """Write a document; `graph` stamps a schedule or timeline with the graph it is for. Names ending in .gz are compressed."""
    text = dumps(document, graph=graph)
    data = text.encode()
    target = Path(path)
    scratch = target.with_name(target.name + ".part")  # whole or not at all: a full disk leaves the old file as it was
    try:
        scratch.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise BadFile(f"cannot write {path}: {error.strerror or error}; name a file in a folder that exists and has room") from None


def load(path: str | Path, kind: type[Any] | tuple[type[Any], ...], *, graph: Graph | None = None) -> Any:
    """Read a document of the given type; `graph` refuses a schedule made for another one."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; name an existing file") from None
    try:
        return loads(data.decode(), kind, graph=graph)
    except (BadFile, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: {error}") from None


def dumps(document: Document, *, graph: Graph | None = None) -> str:
    kind, write, _ = _FORMS[type(document)]
    head: Json = {"tierwise": kind, "format": FORMAT}
    if graph is not None:
        head["graph"] = fingerprint(graph)
    return json.dumps(head | write(document), separators=(",", ":"))


def loads(text: str, kind: type[Any] | tuple[type[Any], ...], *, graph: Graph | None = None) -> Any:
    wanted = kind if isinstance(kind, tuple) else (kind,)
    names = " or ".join(_FORMS[k][0] for k in wanted)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadFile(f"not JSON ({error}); expected a Tierwise {names}") from None
    if not isinstance(data, dict) or "tierwise" not in data:
        raise BadFile(f"not a Tierwise file; expected a {names}")
    if data.get("format") != FORMAT:
        raise BadFile(f"format {data.get('format')!r}; this version reads format {FORMAT}: make the file again")
    found = next((k for k in wanted if _FORMS[k][0] == data["tierwise"]), None)
    if found is None:
        raise BadFile(f"this is a {data['tierwise']}; expected a {names}")
    if graph is not None and data.get("graph") not in (None, fingerprint(graph)):
        raise BadFile(f"this {data['tierwise']} was made for another graph ({data['graph']}, not {fingerprint(graph)}): plan again for this one")
    try:
        return _FORMS[found][2](data)
    except TierwiseError as error:
        raise BadFile(f"corrupt {data['tierwise']}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadFile(f"corrupt {data['tierwise']}: {type(error).__name__} {error}; make the file again") from None


def fingerprint(graph: Graph) -> str:
    """Sixteen hex digits that two graphs share only if they are equal."""
    return hashlib.sha256(json.dumps(_graph_out(graph), sort_keys=True).encode()).hexdigest()[:16]


# -- types ------------------------------------------------------------------------------------------------------------------------------


def _plain(item: Any) -> Json:
    """A small dataclass as a dict without the fields at their default."""
    return {
        field.name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
        for field in dataclasses.fields(item)
        if not _is_default(field, value := getattr(item, field.name))
    }


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default)
    return field.default_factory is not dataclasses.MISSING and value == field.default_factory()


def _graph_out(graph: Graph) -> Json:
    return {
        "storages": [_plain(storage) for storage in graph.storages],
        "ops": [_plain(op) for op in graph.ops],
        "regions": [_plain(region) for region in graph.regions],
        "calls": [_plain(call) for call in graph.calls],
    }


def _graph_in(data: Json) -> Graph:
    graph = Graph(
        ops=tuple(_op_in(op) for op in data["ops"]),
        storages=tuple(Storage(**(item | {"role": Role(item["role"])})) for item in data["storages"]),
        regions=tuple(Region(**item) for item in data["regions"]),
        calls=tuple(RegionCall(**item) for item in data["calls"]),
    )
    check_graph(graph)
    return graph


def _op_in(item: Json) -> Op:
    item = item | {"phase": Phase(item["phase"]), "reads": tuple(item["reads"]), "writes": tuple(item["writes"])}
    if "mutates" in item:
        item["mutates"] = tuple(item["mutates"])
    if "in_place" in item:
        item["in_place"] = tuple((old, new) for old, new in item["in_place"])
    return Op(**item)


def _machine_out(machine: Machine) -> Json:
    return {
        "name": machine.name,
        "source": machine.source,
        "tiers": [_plain(tier) for tier in machine.tiers],
        "links": [_plain(link) for link in machine.links],
        "processors": [_plain(processor) for processor in machine.processors],
    }


def _machine_in(data: Json) -> Machine:
    machine = Machine(
        name=data["name"],
        source=data["source"],
        tiers=tuple(Tier(**item) for item in data["tiers"]),
        links=tuple(Link(**item) for item in data["links"]),
        processors=tuple(Processor(**item) for item in data["processors"]),
    )
    named = machine.tier_named
    if not machine.processors:
        raise ValueError("a machine needs a processor")
    for tier in [p.tier for p in machine.processors] + [end for link in machine.links for end in (link.src, link.dst)]:
        if tier not in named:
            raise ValueError(f"no tier named {tier!r}")
    if any(rate <= 0 for link in machine.links for rate in link.lanes.values()) or any(not link.lanes for link in machine.links):
        raise ValueError("every link needs a lane, and every lane a positive rate")
    return machine


def _problem_out(problem: Problem) -> Json:
    seconds: dict[str, dict[int, float]] = {}
    for (op, processor), value in problem.costs.op_seconds.items():
        seconds.setdefault(processor, {})[op] = value
    return {
        "graph_data": _graph_out(problem.graph),
        "machine": _machine_out(problem.machine),
        "op_seconds": seconds,
        "cyclic": problem.cyclic,
    }


def _problem_in(data: Json) -> Problem:
    return Problem(
        graph=_graph_in(data["graph_data"]),
        machine=_machine_in(data["machine"]),
        costs=Costs({(int(op), processor): float(value) for processor, table in data["op_seconds"].items() for op, value in table.items()}),
        cyclic=bool(data["cyclic"]),
    )


_STEP_TYPES: dict[str, type[Compute] | type[Copy] | type[Free]] = {"compute": Compute, "copy": Copy, "free": Free}
_STEP_NAMES = {Compute: "compute", Copy: "copy", Free: "free"}


def _schedule_out(schedule: Schedule) -> Json:
    return {
        "steps": [{"do": _STEP_NAMES[type(step)]} | _plain(step) for step in schedule.steps],
        "home": {storage: list(tiers) for storage, tiers in schedule.home.items()},
        "addresses": [[step, storage, offset] for (step, storage), offset in schedule.addresses.items()],
    }


def _schedule_in(data: Json) -> Schedule:
    return Schedule(
        steps=tuple(_step_in(item) for item in data["steps"]),
        home={int(storage): tuple(tiers) for storage, tiers in data["home"].items()},
        addresses={(step, storage): offset for step, storage, offset in data["addresses"]},
    )


def _step_in(item: Json) -> Step:
    item = dict(item)
    return _STEP_TYPES[item.pop("do")](**item)


def _timeline_out(timeline: Timeline) -> Json:
    return {
        "seconds": timeline.seconds,
        "measured": timeline.measured,
        "peak_bytes": dict(timeline.peak_bytes),
        "spans": [list(span) for span in timeline.spans],
        "memory": {
            tier: {role: {"seconds": list(curve.seconds), "nbytes": list(curve.nbytes)} for role, curve in roles.items()}
            for tier, roles in timeline.memory.items()
        },
    }


def _timeline_in(data: Json) -> Timeline:
    return Timeline(
        seconds=float(data["seconds"]),
        measured=bool(data["measured"]),
        peak_bytes=dict(data["peak_bytes"]),
        spans=tuple(Span(*span) for span in data["spans"]),
        memory={
            tier: {role: Curve(tuple(curve["seconds"]), tuple(curve["nbytes"])) for role, curve in roles.items()}
            for tier, roles in data["memory"].items()
        },
    )


_FORMS: dict[type[Any], tuple[str, Callable[[Any], Json], Callable[[Json], Any]]] = {
    Graph: ("graph", _graph_out, _graph_in),
    Machine: ("machine", _machine_out, _machine_in),
    Problem: ("problem", _problem_out, _problem_in),
    Schedule: ("schedule", _schedule_out, _schedule_in),
    Timeline: ("timeline", _timeline_out, _timeline_in),
}
