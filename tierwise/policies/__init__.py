"""Problem -> Schedule. One paper, one file; the file's name is the policy's name, and a new file is in court the day it lands.

`plan` finds the file, calls it, and hands the result to the judge. A policy that does not fit the budget is refused with the smallest
budget it can do. Cards (what `tierwise policies` shows) are read from the files without importing them.

A policy's file has a docstring and a few constants, all plain literals:

    name: one sentence, what it does with the bytes.

    Paper    authors, venue year, arXiv number.       the first "Venue 20xx" between commas gives venue and year
    Idea     why it works.
    Rule     what is chosen, as in the paper.
    Differs  what is left out, added or inferred.

    DECIDES = "what to recompute"                     in a few words
    FIDELITY = "faithful"                             or "like": the paper's rule was not to be had, and Differs says what was inferred
    EXECUTABLE = True                                 or "simulated only: why its plans cannot run at region boundaries"
    REQUIRES = {"dram"}                               tiers and processors it cannot do without; nothing unless given
    EXACTNESS = "exact"                               or "exact if ...", "lossy: ..."; exact unless given
    YEAR, VENUE = 2016, "MICRO"                       only where the Paper line does not say them

A policy whose plans are for a step other than the one it is given has a second function, `prepare`, with some of the options of `plan`: it
returns the problem with the codecs or kernels the paper counts on, or with its batch split. `planned` returns that problem with the plan.

What is published but has no file is named in ABSENT, with the reason.

Outsiders register a module with the same shape under the entry point group "tierwise.policies".
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import BadInput, InfeasibleBudget, MissingTier, NotExecutable, OverCapacity, UnknownName
from ..ir import Problem, Schedule, check_schedule, peak_bytes
from ..units import exact_bytes, format_bytes

CONSTANTS = ("DECIDES", "REQUIRES", "EXACTNESS", "EXECUTABLE", "FIDELITY", "YEAR", "VENUE")
FIDELITIES = ("faithful", "like", "ours")
SIMULATED_ONLY = "simulated only: "
LEAST_BUDGET_TRIES = 10  # halvings of the interval in which the smallest budget is looked for: a thousandth of it


@dataclass(frozen=True, slots=True)
class Card:
    """What a policy's file says of itself."""

    name: str
    summary: str
    paper: str
    year: int | None
    venue: str
    idea: str
    rule: str
    differs: str
    decides: str
    requires: tuple[str, ...]
    exactness: str
    executable: bool | str  # True, or "simulated only: " and why
    fidelity: str  # "faithful", or "like": a reading of a rule that could not be looked up

    @property
    def simulated_only_because(self) -> str:
        return "" if self.executable is True else str(self.executable).removeprefix(SIMULATED_ONLY)

    @property
    def lossy(self) -> bool:
        """Whether it rounds, or trains another way, without being asked to."""
        return self.exactness.startswith("lossy")

    @property
    def authors(self) -> str:
        return _first_author(self.paper)

    @property
    def facts(self) -> dict[str, str]:
        """By title, for a terminal or a page; what is not known is empty."""
        return {
            "paper": self.paper,
            "published": f"{self.venue} {self.year}" if self.year else "",
            "idea": self.idea,
            "rule": self.rule,
            "differs": self.differs,
            "decides": self.decides,
            "needs": ", ".join(self.requires) or "nothing beyond the device",
            "exactness": self.exactness,
            "fidelity": self.fidelity,
            "runs": f"{SIMULATED_ONLY}{self.simulated_only_because}" if self.simulated_only_because else "yes",
        }


@dataclass(frozen=True, slots=True)
class Absent:
    """A published system that has no policy here, and why."""

    name: str
    paper: str
    year: int
    venue: str
    status: str  # "unknown", or "not applicable yet"
    reason: str

    @property
    def authors(self) -> str:
        return _first_author(self.paper)


def _first_author(paper: str) -> str:
    """As papers are cited; nothing where there is none."""
    first = paper.partition(",")[0]
    return "" if paper.startswith(("none", "named")) else first if "et al." in first else f"{first} et al."


ABSENT = (
    Absent("flexgen", "Sheng et al., ICML 2023, arXiv:2303.06865.", 2023, "ICML", "not applicable yet",
           "places weights, key-value cache and activations of inference; the steps here are training steps"),
    Absent("gtbm", "named in our sources as HPDC 2020, without a title.", 2020, "HPDC", "unknown",
           "no paper, page or repository under this name was found, so there is no rule to build"),
    Absent("tmof", "Lin, Chen, Cheng, Yang, HPCA 2023.", 2023, "HPCA", "not applicable yet",
           "divides swaps among GPUs that share an uplink; a problem here has one device"),
)  # fmt: skip


@functools.cache
def _outsiders() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group="tierwise.policies")}


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith("_")}


def names() -> list[str]:
    return sorted({*_files(), *_outsiders()})


def load(name: str) -> ModuleType:
    if name in _files():
        return importlib.import_module(f"{__name__}.{name}")
    if name in _outsiders():
        module: ModuleType = _outsiders()[name].load()
        return module
    raise UnknownName("policy", name, names())


def card(name: str) -> Card:
    path = _files().get(name)
    source = path.read_text(encoding="utf-8") if path else inspect.getsource(load(name))
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or ""
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in CONSTANTS
    }
    fields = {
        match[1].lower(): " ".join(match[2].split())
        for match in re.finditer(r"^(Paper|Idea|Rule|Differs)\s+(.*?)(?=^(?:Paper|Idea|Rule|Differs)\s|\Z)", text, re.M | re.S)
    }
    # "ASPLOS 2020" between commas: the venue, and the year it names.
    published = re.search(r"(?:^|[,;] )([^,;]*?)\s?\b((?:19|20)\d\d)\b", fields.get("paper", ""))
    return Card(
        name=name,
        summary=text.split("\n", 1)[0].partition(": ")[2],
        paper=fields.get("paper", ""),
        year=constants.get("YEAR", int(published[2]) if published else None),
        venue=str(constants.get("VENUE", published[1] if published else "")),
        idea=fields.get("idea", ""),
        rule=fields.get("rule", ""),
        differs=fields.get("differs", ""),
        decides=constants.get("DECIDES", ""),
        requires=tuple(sorted(constants.get("REQUIRES", ()))),
        exactness=constants.get("EXACTNESS", "exact"),
        executable=constants.get("EXECUTABLE", "simulated only: its file does not say that its plans can be run"),
        fidelity=constants.get("FIDELITY", ""),
    )


def plan(problem: Problem, policy: str, **options: Any) -> Schedule:
    """A legal schedule of this policy within the budget, or the reason why there is none."""
    prepared, schedule = planned(problem, policy, **options)
    if prepared.graph is not problem.graph:
        raise NotExecutable(f"{policy} plans a step of its own making, not the one it was given; it can be simulated and compared, not run")
    return schedule


def planned(problem: Problem, policy: str, **options: Any) -> tuple[Problem, Schedule]:
    """The same, with the problem the schedule is for: the one given, unless the policy prepares another."""
    module = load(policy)
    for tier in sorted(getattr(module, "REQUIRES", ())):
        if tier not in problem.machine.tier_named and tier not in problem.machine.processor_named:
            raise MissingTier(f"{policy} needs {tier!r}; machine {problem.machine.name} has tiers {', '.join(problem.machine.tier_named)} "
                              f"and processors {', '.join(problem.machine.processor_named)}")  # fmt: skip
    _check_options(module, policy, options)
    try:
        return _attempt(problem, module, options)
    except (InfeasibleBudget, OverCapacity) as error:
        if isinstance(error, OverCapacity) and error.tier != problem.device_tier:
            there = format_bytes(problem.machine.capacity(error.tier))
            raise InfeasibleBudget(f"{policy} needs {format_bytes(error.needed_bytes)} of {error.tier} and there are {there}; "
                                   "give it a machine with more, or a larger budget") from None  # fmt: skip
        least = getattr(error, "least_bytes", None) or _least_budget(problem, module, options, error)
        if least is None:
            raise InfeasibleBudget(f"{policy} finds no plan for this step at {format_bytes(problem.budget_bytes)}, nor with all of the card: "
                                   f"{error}; use another policy") from None  # fmt: skip
        raise InfeasibleBudget(
            f"budget {format_bytes(problem.budget_bytes)} is below {format_bytes(least)}, the smallest {policy} can do for this step; "
            f"use a budget of {exact_bytes(least)}, a smaller batch, or another policy",
            least_bytes=least,
        ) from None


def _attempt(problem: Problem, module: ModuleType, options: dict[str, Any]) -> tuple[Problem, Schedule]:
    prepared = _prepared(problem, module, options)
    schedule: Schedule = module.plan(prepared, **options)
    check_schedule(prepared, schedule)
    return prepared, schedule


def _prepared(problem: Problem, module: ModuleType, options: dict[str, Any]) -> Problem:
    prepare = getattr(module, "prepare", None)
    if prepare is None:
        return problem
    known = inspect.signature(prepare).parameters
    prepared: Problem = prepare(problem, **{name: value for name, value in options.items() if name in known})
    return prepared


def _check_options(module: ModuleType, policy: str, options: dict[str, Any]) -> None:
    known = list(inspect.signature(module.plan).parameters)[1:]
    for name in options:
        if name not in known:
            if not known:
                raise BadInput(f"{policy} takes no options, and was given {name!r}")
            raise UnknownName(f"option of {policy}", name, known)


def _least_budget(problem: Problem, module: ModuleType, options: dict[str, Any], error: Exception) -> int | None:
    """The smallest budget at which the policy has a plan, by halving; exact for policies that do not look at the budget."""

    def works(budget_bytes: int) -> bool:
        try:
            _attempt(problem.with_budget(budget_bytes), module, options)
        except (InfeasibleBudget, OverCapacity):
            return False
        return True

    low = problem.budget_bytes
    if isinstance(error, OverCapacity) and works(error.needed_bytes):
        high = error.needed_bytes
        if high - 1 <= low or not works(high - 1):
            return high
        high -= 1
    else:
        high = next((budget for budget in _ample_budgets(problem) if budget > low and works(budget)), 0)
        if not high:
            return None
    for _ in range(LEAST_BUDGET_TRIES):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _ample_budgets(problem: Problem) -> tuple[int, int]:
    """Budgets at which a policy should have a plan: what keeping everything takes, and room for every storage at an address of its own."""
    graph = problem.graph
    kept = peak_bytes(problem, load("keep_all").plan(problem))[problem.device_tier]
    return kept, sum(s.nbytes for s in graph.storages) + max((op.workspace_bytes for op in graph.ops), default=0)
