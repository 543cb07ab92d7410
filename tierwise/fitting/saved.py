"""A program in a file, for the step it was made for and no other.

The file says what it is for: the model (names and sizes of what lasts), the shapes (what the step is given), the whole step, what regions can choose
from, the machine, and the version of torch. Whoever loads it has a menu; where the two differ, that is said, and the plan is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import BadFile, InvalidSchedule, OverCapacity, TierwiseError
from ..ir import CallPlan, Graph, Menu, Placement, Program, Role, check_schedule, serial
from ..ir.placement import IN_FLIGHT
from ..lower import image
from ..units import format_bytes

KIND, FORMAT = "plan", 1

# What is compared, in this order, and what to say where it differs.
DIFFERENCES = {
    "model": "another model: its parameters have other names or sizes",
    "shapes": "other inputs: what the step is given has another size",
    "step": "another step of this model: its ops are not the same",
    "choices": "other choices: what regions can save and recompute is not the same",
    "machine": "another machine",
    "torch": "another version of torch",
}


def save_program(program: Program, menu: Menu, budget_bytes: int, path: str | Path, *, holds_output: bool = True) -> None:
    """Whole or not at all. `holds_output`: whether the loop that it is for holds what the model returns."""
    found = {
        "tierwise": KIND,
        "format": FORMAT,
        "for": fingerprint(menu),
        "budget_bytes": budget_bytes,
        "holds_output": holds_output,
        "program": {
            "policy": program.policy,
            "words": list(program.words),
            "update": program.update,
            "ahead": program.ahead,
            "in_flight": program.in_flight,
            "calls": {str(call): asdict(plan) for call, plan in program.calls.items()},
            "outside": {str(gap): asdict(plan) for gap, plan in program.outside.items()},
            "states": {unit: asdict(place) for unit, place in program.states.items()},
        },
    }
    serial.write(json.dumps(found, indent=1), path)


def holds_output(path: str | os.PathLike[str]) -> bool:
    """Whether the loop of a saved plan holds what the model returns; True for a file that cannot be read, which whoever loads it says."""
    try:
        return bool(_read(Path(path)).get("holds_output", True))
    except BadFile:
        return True


def load_program(path: str | Path, menu: Menu) -> Program:
    """The program in a file, if it was made for this menu and fits into its budget."""
    data = _read(path)
    here, there = fingerprint(menu), data["for"]
    for part, words in DIFFERENCES.items():
        if there.get(part) != here[part]:
            names = f" ({there.get(part)}, and this is {here[part]})" if part in ("machine", "torch") else ""
            raise BadFile(f"{path}: this plan is for {words}{names}; plan again, by leaving the file out")
    try:
        program = _program(data["program"])
    except (KeyError, TypeError, ValueError, AttributeError, TierwiseError) as error:
        raise BadFile(f"{path}: corrupt plan: {error}; plan again, by leaving the file out") from None
    _check(path, program, menu)
    return program


def fingerprint(menu: Menu) -> dict[str, str]:
    """What a plan is for, part by part."""
    graph, machine = menu.problem.graph, menu.problem.machine
    choices = [
        (region, choice.name, choice.reads_inputs, choice.reads_outputs, [(value.name, value.nbytes) for value in choice.saved])
        for region, found in sorted(menu.choices.items())
        for choice in found
    ]
    return {
        "model": _digest((s.name, s.nbytes) for s in graph.storages if s.lasting and s.role in (Role.PARAM, Role.BUFFER)),
        "shapes": _digest((s.name, s.nbytes) for s in graph.storages if s.role is Role.INPUT),
        "step": _step(graph),
        "choices": _digest(choices),
        "machine": f"{machine.name} with {', '.join(tier.name for tier in machine.tiers)}",
        "torch": str(torch.__version__),
    }


def _step(graph: Graph) -> str:
    return serial.fingerprint(graph)


def _digest(items: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()[:16]


def _read(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; name a file that Plan.save wrote") from None
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: not JSON ({error}); name a file that Plan.save wrote, or leave it out to plan again") from None
    if not isinstance(data, dict) or data.get("tierwise") != KIND:
        raise BadFile(f"{path}: not a saved plan; name a file that Plan.save wrote")
    if data.get("format") != FORMAT:
        raise BadFile(f"{path}: a plan of format {data.get('format')!r}; this version reads format {FORMAT}: plan again, by leaving the file out")
    if not isinstance(data.get("for"), dict) or not isinstance(data.get("program"), dict):
        raise BadFile(f"{path}: corrupt plan: it does not say what it is for, or what to do; plan again, by leaving the file out")
    return data


def _program(data: dict[str, Any]) -> Program:
    return Program(
        calls={int(call): _call(plan) for call, plan in data["calls"].items()},
        policy=str(data["policy"]),
        words=tuple(map(str, data["words"])),
        outside={int(gap): _call(plan) for gap, plan in data["outside"].items()},
        states={str(unit): Placement(**place) for unit, place in data["states"].items()},
        update=str(data["update"]),
        ahead=_regions("parameters come {} regions ahead", data.get("ahead", 1)),
        in_flight=_regions("gradients of {} regions wait", data.get("in_flight", IN_FLIGHT)),
    )


def _regions(what: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(what.format(repr(value)))
    return value


def _call(data: dict[str, Any]) -> CallPlan:
    plan = CallPlan(**{**data, "sent": tuple(data["sent"])})
    if not isinstance(plan.choice, str) or not all(isinstance(n, int) and n >= 1 for n in (plan.release, plan.fetch)):
        raise ValueError(f"a call's plan is {data}")
    return plan


def _check(path: str | Path, program: Program, menu: Menu) -> None:
    """Its image is judged like any other: the budget may have shrunk."""
    try:
        made = image(menu, program)
        check_schedule(made.problem, made.schedule)
    except OverCapacity as error:
        raise BadFile(
            f"{path}: this plan needs {format_bytes(error.needed_bytes)} of {error.tier}, and there are "
            f"{format_bytes(menu.problem.machine.capacity(error.tier))}; give it as much as it was made for, or plan again, by leaving the file out"
        ) from None
    except (InvalidSchedule, StopIteration, KeyError, IndexError, TierwiseError) as error:
        raise BadFile(f"{path}: corrupt plan: {error}; plan again, by leaving the file out") from None
