"""JSON in and out. A file says its kind and the version of the format; what does not fit is refused with what was found.

    {"tierwise": "schedule", "format": 1, "graph": "<fingerprint of the graph it is for>", ...fields of the type...}

Fields at their default are left out, so that a graph of ten thousand ops stays readable and small. What is read has the type its field says,
or is refused by name: nothing behind this file meets a string where a number should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadFile, ForeignFile, TierwiseError
from .graph import Graph, Op, Phase, Region, RegionCall, Role, Storage
from .judge import check_graph, choice_faults
from .machine import Link, Machine, Processor, Tier
from .problem import Codec, Costs, Problem, Variant
from .run import Comparison, Outcome, Row, Run, Within
from .schedule import Compute, Copy, Free, Schedule, Step
from .timeline import Curve, Span, Timeline

FORMAT = 1
Json = dict[str, Any]
Document = Graph | Machine | Problem | Schedule | Timeline | Run


# -- files ------------------------------------------------------------------------------------------------------------------------------


def save(document: Document, path: str | Path, *, graph: Graph | None = None) -> None:
    """Write a document; `graph` stamps a schedule or timeline with the graph it is for. Names ending in .gz are compressed."""
    write(dumps(document, graph=graph), path)


def write(text: str, path: str | Path) -> None:
    """Write a file whole or not at all; names ending in .gz are compressed."""
    data = text.encode()
    target, scratch = Path(path), None
    try:
        if target.suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a pipe or a device: there is nothing to replace
        else:
            scratch = target.with_name(target.name + ".part")  # whole or not at all: a full disk leaves the old file as it was
            scratch.write_bytes(data)
            scratch.replace(target)
    except (OSError, ValueError) as error:
        if scratch is not None:
            with contextlib.suppress(OSError, ValueError):
                scratch.unlink()
        why = getattr(error, "strerror", None) or error
        raise BadFile(f"cannot write {path}: {why}; name a file in a folder that exists and has room") from None


def load(path: str | Path, kind: type[Any] | tuple[type[Any], ...], *, graph: Graph | None = None) -> Any:
    """Read a document of the given type; `graph` refuses a schedule made for another one."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; name an existing file") from None
    try:
        return loads(data.decode(), kind, graph=graph)
    except BadFile as error:
        raise type(error)(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: not a text file; expected a Tierwise {_names(kind)}") from None


def dumps(document: Document, *, graph: Graph | None = None) -> str:
    stamp = {"graph": fingerprint(graph)} if graph is not None else {}
    return json.dumps(head(type(document)) | stamp | _FORMS[type(document)][1](document), separators=(",", ":"))


def head(kind: type[Any]) -> Json:
    """What a document of this type begins with."""
    return {"tierwise": _FORMS[kind][0], "format": FORMAT}


def loads(text: str, kind: type[Any] | tuple[type[Any], ...], *, graph: Graph | None = None) -> Any:
    wanted, names = kind if isinstance(kind, tuple) else (kind,), _names(kind)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"not JSON ({error}); expected a Tierwise {names}") from None
    if not isinstance(data, dict) or "tierwise" not in data:
        raise ForeignFile(f"not a Tierwise file; expected a {names}")
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
    except KeyError as error:
        raise BadFile(f"corrupt {data['tierwise']}: {error} is missing or not known; make the file again") from None
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadFile(f"corrupt {data['tierwise']}: {error}; make the file again") from None


def _names(kind: type[Any] | tuple[type[Any], ...]) -> str:
    return " or ".join(_FORMS[k][0] for k in (kind if isinstance(kind, tuple) else (kind,)))


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


_IS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "tuple[int, ...]": lambda value: type(value) is list and all(type(item) is int for item in value),
    "tuple[tuple[int, int], ...]": lambda value: type(value) is list and all(_IS["tuple[int, ...]"](pair) and len(pair) == 2 for pair in value),
    "Mapping[str, float]": lambda value: type(value) is dict and all(_IS["float"](rate) and rate > 0 for rate in value.values()),
    "Role": lambda value: value in list(Role),
    "Phase": lambda value: value in list(Phase),
    "Outcome": lambda value: value in list(Outcome),
    "Mapping[int, int]": lambda value: _keys_are_ids(value) and all(type(size) is int and size >= 0 for size in value.values()),
    "Mapping[int, str]": lambda value: _keys_are_ids(value) and all(type(name) is str for name in value.values()),
    "tuple[int, ...] | None": lambda value: value is None or _IS["tuple[int, ...]"](value),
    "int | None": lambda value: value is None or type(value) is int,
    "float | None": lambda value: value is None or _IS["float"](value),
}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple[int, ...]": tuple,
    "tuple[tuple[int, int], ...]": lambda value: tuple(map(tuple, value)),
    "tuple[int, ...] | None": lambda value: value if value is None else tuple(value),
    "Mapping[int, int]": lambda value: {int(key): item for key, item in value.items()},
    "Mapping[int, str]": lambda value: {int(key): item for key, item in value.items()},
    "Role": Role,
    "Phase": Phase,
    "Outcome": Outcome,
}


def _keys_are_ids(value: Any) -> bool:
    return type(value) is dict and all(key.isdecimal() for key in value)


def _build(kind: type[Any], item: Json) -> Any:
    """A small dataclass from a dict, each value of the type its field says."""
    said = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name, value in item.items():
        if name not in said:
            raise ValueError(f"{kind.__name__} has no {name!r}")
        if not _IS[said[name]](value):
            raise ValueError(f"{name} of {kind.__name__} {item.get('name', item.get('id', ''))} is {value!r}, not {said[name]}")
    return kind(**{name: _MAKE[said[name]](value) if said[name] in _MAKE else value for name, value in item.items()})


def _graph_out(graph: Graph) -> Json:
    return {
        "storages": [_plain(storage) for storage in graph.storages],
        "ops": [_plain(op) for op in graph.ops],
        "regions": [_plain(region) for region in graph.regions],
        "calls": [_plain(call) for call in graph.calls],
    }


def _graph_in(data: Json) -> Graph:
    graph = Graph(
        ops=tuple(_build(Op, item) for item in data["ops"]),
        storages=tuple(_build(Storage, item) for item in data["storages"]),
        regions=tuple(_build(Region, item) for item in data["regions"]),
        calls=tuple(_build(RegionCall, item) for item in data["calls"]),
    )
    check_graph(graph)
    return graph


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
        tiers=tuple(_build(Tier, item) for item in data["tiers"]),
        links=tuple(_build(Link, item) for item in data["links"]),
        processors=tuple(_build(Processor, item) for item in data["processors"]),
    )
    named = machine.tier_named
    if not machine.processors:
        raise ValueError("a machine needs a processor")
    ends = [end for link in machine.links for end in (link.src, link.dst, link.staging_tier)]
    for tier in [p.tier for p in machine.processors] + [end for end in ends + [t.within for t in machine.tiers] if end]:
        if tier not in named:
            raise ValueError(f"no tier named {tier!r}")
    if len(named) < len(machine.tiers) or len(machine.processor_named) < len(machine.processors):
        raise ValueError("two tiers or two processors have the same name")
    if any(not link.lanes for link in machine.links):
        raise ValueError("every link needs a lane")
    times = [
        n for link in machine.links for n in (link.latency_seconds, link.staging_bytes, link.fault_seconds, link.fault_bytes, link.compute_share)
    ]
    rates = [n for p in machine.processors for n in (p.bytes_per_second, p.launch_seconds)]
    if min([tier.capacity_bytes for tier in machine.tiers] + times + rates) < 0:
        raise ValueError("a capacity, rate or time is below 0")
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
    } | {name: [_plain(item) for item in items] for name, items in (("codecs", problem.costs.codecs), ("variants", problem.costs.variants)) if items}


def _problem_in(data: Json) -> Problem:
    graph, machine = _graph_in(data["graph_data"]), _machine_in(data["machine"])
    seconds = {(int(op), processor): float(value) for processor, table in data["op_seconds"].items() for op, value in table.items()}
    if not all(value >= 0 and math.isfinite(value) for value in seconds.values()):
        raise ValueError("an op takes less than 0 or endless seconds")
    if strangers := {processor for _, processor in seconds} - set(machine.processor_named):
        raise ValueError(f"no processor named {min(strangers)!r}")
    if {op for op, _ in seconds} != set(range(len(graph.ops))):
        raise ValueError("op_seconds does not name exactly the ops of the graph")
    codecs = tuple(_build(Codec, item) for item in data.get("codecs", ()))
    variants = tuple(_build(Variant, item) for item in data.get("variants", ()))
    problem = Problem(graph, machine, Costs(seconds, codecs, variants), bool(data["cyclic"]))
    for fault in choice_faults(problem):
        raise ValueError(fault)
    return problem


_STEP_TYPES: dict[str, type[Compute] | type[Copy] | type[Free]] = {"compute": Compute, "copy": Copy, "free": Free}
_STEP_NAMES = {Compute: "compute", Copy: "copy", Free: "free"}


def _schedule_out(schedule: Schedule) -> Json:
    return {
        "steps": [{"do": _STEP_NAMES[type(step)]} | _plain(step) for step in schedule.steps],
        "home": {storage: list(tiers) for storage, tiers in schedule.home.items()},
        "addresses": [[step, storage, offset] for (step, storage), offset in schedule.addresses.items()],
    } | ({"notes": list(schedule.notes)} if schedule.notes else {})


def _schedule_in(data: Json) -> Schedule:
    if not all(isinstance(tiers, list) and all(map(_IS["str"], tiers)) for tiers in data["home"].values()):
        raise ValueError("a home is not a list of tiers")
    if not all(_IS["tuple[int, ...]"](item) for item in data["addresses"]):
        raise ValueError("an address is not three whole numbers")
    if not all(map(_IS["str"], notes := data.get("notes", []))):
        raise ValueError("a note is not text")
    return Schedule(
        steps=tuple(_step_in(item) for item in data["steps"]),
        home={int(storage): tuple(tiers) for storage, tiers in data["home"].items()},
        addresses={(step, storage): offset for step, storage, offset in data["addresses"]},
        notes=tuple(notes),
    )


def _step_in(item: Json) -> Step:
    item = dict(item)
    step: Step = _build(_STEP_TYPES[item.pop("do")], item)
    return step


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
    if not all(map(_IS["int"], data["peak_bytes"].values())):
        raise ValueError("a peak is not a whole number of bytes")
    return Timeline(
        seconds=float(data["seconds"]),
        measured=bool(data["measured"]),
        peak_bytes=dict(data["peak_bytes"]),
        spans=tuple(Span(int(step), str(lane), float(start), float(end)) for step, lane, start, end in data["spans"]),
        memory={
            tier: {role: Curve(tuple(curve["seconds"]), tuple(curve["nbytes"])) for role, curve in roles.items()}
            for tier, roles in data["memory"].items()
        },
    )


_PARTS: dict[str, tuple[Callable[[Any], Json], Callable[[Json], Any]]] = {
    "problem": (_problem_out, _problem_in),
    "schedule": (_schedule_out, _schedule_in),
    "predicted": (_timeline_out, _timeline_in),
    "measured": (_timeline_out, _timeline_in),
}
_HISTORIES = ("losses", "untouched_losses", "step_seconds")


def _run_out(run: Run) -> Json:
    data: Json = {"name": run.name}
    for part, (write, _) in _PARTS.items():
        if (value := getattr(run, part)) is not None:
            data[part] = write(value)
    if run.comparisons:
        data["comparisons"] = [_plain(table) | {"rows": [_plain(row) for row in table.rows]} for table in run.comparisons]
    for history in _HISTORIES:
        if values := getattr(run, history):  # JSON has no NaN, and a diverged loss is one
            data[history] = [value if math.isfinite(value) else None for value in values]
    if run.within is not None:
        data["within"] = [_plain(block) for block in run.within]
    rest = {"policy": run.policy, "words": list(run.words), "reserved_bytes": run.reserved_bytes, "unaccounted_bytes": run.unaccounted_bytes}
    return data | {name: value for name, value in rest.items() if value not in ("", [], None)}


def _run_in(data: Json) -> Run:
    parts = {part: read(data[part]) for part, (_, read) in _PARTS.items() if part in data}
    words, texts = data.get("words", []), [data["name"], data.get("policy", "")]
    if type(words) is not list or not all(map(_IS["str"], [*texts, *words])):
        raise ValueError("the name, the policy and the words of a run are text")
    for history in _HISTORIES:
        if not all(map(_IS["float | None"], data.get(history, []))):
            raise ValueError(f"{history} are not numbers")
        parts[history] = tuple(math.nan if value is None else float(value) for value in data.get(history, []))
    for size in ("reserved_bytes", "unaccounted_bytes"):
        if not _IS["int | None"](data.get(size)):
            raise ValueError(f"{size} is {data[size]!r}, not a whole number")
        parts[size] = data.get(size)
    run = Run(
        name=data["name"],
        policy=data.get("policy", ""),
        words=tuple(words),
        comparisons=tuple(_comparison_in(table) for table in data.get("comparisons", [])),
        within=tuple(_build(Within, block) for block in data["within"]) if "within" in data else None,
        **parts,
    )
    _check_places(run)
    return run


def _comparison_in(data: Json) -> Comparison:
    numbers = {name: value for name, value in data.items() if name != "rows"}
    if not all(map(_IS["float"], numbers.values())):
        raise ValueError("a number of a comparison is not one")
    return Comparison(rows=tuple(_build(Row, row) for row in data["rows"]), **numbers)


def _check_places(run: Run) -> None:
    """What the parts of a run say of each other: ids and places that exist. Whether the schedule is legal is the judge's to say."""
    if run.schedule is None:
        return
    steps = run.schedule.steps
    for timeline in (run.predicted, run.measured):
        if timeline is not None and not all(0 <= span.step < len(steps) for span in timeline.spans):
            raise ValueError(f"a span names a step that is not among the {len(steps)} of the schedule")
    if run.problem is None:
        return
    ops, storages = len(run.problem.graph.ops), len(run.problem.graph.storages)
    if not all(0 <= step.op < ops if isinstance(step, Compute) else 0 <= step.storage < storages for step in steps):
        raise ValueError("the schedule names an op or storage that the graph does not have")
    if not all(0 <= storage < storages for storage in run.schedule.home):
        raise ValueError("a home is of a storage that the graph does not have")


_FORMS: dict[type[Any], tuple[str, Callable[[Any], Json], Callable[[Json], Any]]] = {
    Graph: ("graph", _graph_out, _graph_in),
    Machine: ("machine", _machine_out, _machine_in),
    Problem: ("problem", _problem_out, _problem_in),
    Schedule: ("schedule", _schedule_out, _schedule_in),
    Timeline: ("timeline", _timeline_out, _timeline_in),
    Run: ("run", _run_out, _run_in),
}
