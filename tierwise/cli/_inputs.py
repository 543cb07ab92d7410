"""What people type, as values: budgets, lists of policies, options of a policy. Everything that makes no sense is BadInput."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput, UnknownName
from ..units import parse_bytes

if TYPE_CHECKING:
    from types import ModuleType

StepArgument = Annotated[str, typer.Argument(metavar="STEP", help="A step: a graph or problem file, or a published trace.", show_default=False)]
MachineOption = Annotated[
    str | None,
    typer.Option("--machine", metavar="M", help="A shipped machine or a machine file; a graph needs one.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print data as JSON, in bytes and seconds.")]


def stem(step: str) -> str:
    """'steps/gpt-small.step.json.gz' -> 'gpt-small', a name for what is made of it."""
    from pathlib import Path

    return Path(step).name.removesuffix(".gz").removesuffix(".json").removesuffix(".step")


def record_of(page: str) -> str:
    """The file beside a page that has what it was made of."""
    from pathlib import Path

    if Path(page).suffix == ".json":
        raise BadInput(f"{page} would be the page and, beside it, what the page is made of; name the page {Path(page).with_suffix('.html')}")
    return Path(page).with_suffix(".json").as_posix()


def check_writable(*names: str | None) -> None:
    """Where nothing can be written is said before the work, not behind it."""
    import os
    from pathlib import Path

    for path in (Path(name) for name in names if name is not None):
        if path.is_dir():
            raise BadInput(f"cannot write {path}: it is a folder; name a file")
        if (path.is_file() or not path.exists()) and not os.access(path.parent, os.W_OK):  # pipes and devices are written in place
            raise BadInput(f"cannot write {path}: {path.parent} is no folder that can be written to; name a file in one that is")


def policy_names(text: str) -> list[str]:
    """'all', or names with commas between them."""
    from .. import policies

    known = policies.names()
    if text == "all":
        return known
    chosen = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not chosen:
        raise BadInput(f"{text!r} names no policy; write 'all' or some of {', '.join(known)}")
    for name in chosen:
        if name not in known:
            raise UnknownName("policy", name, known)
    return chosen


def budgets(texts: Iterable[str] | None) -> list[str | None]:
    """Each --budget may hold several with commas between them; none is the whole card."""
    found: list[str | None] = [part.strip() for text in texts or () for part in text.split(",")]
    return found or [None]


def policy_options(policy: str, assignments: Iterable[str] | None) -> dict[str, Any]:
    """['prefetch_ops=2'] -> {'prefetch_ops': 2}, each value of the type of the option's default."""
    from .. import policies

    module = policies.load(policy)
    found = {}
    for assignment in assignments or ():
        key, equals, text = assignment.partition("=")
        if not equals:
            raise BadInput(f"option {assignment!r} is not of the form key=value, such as key=2")
        found[key.strip()] = _value(module, policy, key.strip(), text.strip())
    return found


def options_of(policy: str) -> dict[str, Any]:
    """The options a policy takes, with their defaults."""
    from .. import policies

    return {name: parameter.default for name, parameter in _parameters(policies.load(policy)).items()}


def _parameters(module: ModuleType) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(module.plan).parameters.items())[1:])


def _value(module: ModuleType, policy: str, key: str, text: str) -> Any:
    known = _parameters(module)
    if key not in known:
        if not known:
            raise BadInput(f"{policy} takes no options, and was given {key!r}")
        raise UnknownName(f"option of {policy}", key, known)
    default = known[key].default
    annotation = str(known[key].annotation)
    if text.lower() in ("none", "") and (default is None or "None" in annotation):
        return None
    if isinstance(default, bool) or (default is None and "bool" in annotation):
        if text.lower() not in ("true", "false"):
            raise BadInput(f"option {key} of {policy} is true or false, not {text!r}")
        return text.lower() == "true"
    if key.endswith("_bytes"):
        return parse_bytes(text)
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if isinstance(default, kind) or (default is None and kind.__name__ in annotation):
            try:
                value = kind(text)
                if math.isfinite(value):
                    return value
            except ValueError:
                pass
            raise BadInput(f"option {key} of {policy} is {words}, such as {default or kind(1)}, not {text!r}")
    return text
