"""`package.module:factory`: the user's own model and batch, with errors that name the place in the user's code."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import BadInput
from .torch_compat import READS_VALUES

_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NOT_THE_USERS = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")


def looks_like_factory(spec: str) -> bool:
    return _SPEC.fullmatch(spec) is not None


def call_factory(spec: str, *, batch: int | None, seq: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """The factory's (model, batch). It is called with those of batch and seq that were given."""
    with _importable(Path.cwd()):
        factory = _load(spec)
        options = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
        _check_signature(spec, factory, options)
        try:
            made = factory(**options)
        except Exception as error:
            raise BadInput(f"{spec} raised {_told(error)} at {_place(error) or _home(factory)}; {_advice(error)}") from error
    return _checked(spec, factory, made)


def _load(spec: str) -> Callable[..., Any]:
    module_name, _, path = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise BadInput(f"there is no module {error.name!r} for {spec}; looked in {Path.cwd()} and in the installed packages") from None
        raise BadInput(f"importing {module_name} for {spec} needs {error.name!r}, which is not installed, at {_place(error)}") from error
    except Exception as error:
        raise BadInput(f"importing {module_name} for {spec} raised {_told(error)} at {_place(error) or module_name}; correct it there") from error
    walked = module_name
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [name for name in dir(found) if not name.startswith("_")], n=1)
            raise BadInput(f"{walked} has no {part!r}" + (f"; did you mean {near[0]!r}?" if near else f", which {spec} asks for"))
        found, walked = getattr(found, part), f"{walked}.{part}"
    if not callable(found):
        raise BadInput(f"{spec} is a {type(found).__name__}, not a function; name a function that returns (model, batch)")
    factory: Callable[..., Any] = found
    return factory


def _check_signature(spec: str, factory: Callable[..., Any], options: Mapping[str, int]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in options:
        if name not in signature.parameters and not takes_any:
            raise BadInput(f"{name} was given, and {spec} at {_home(factory)} has no parameter {name!r}; leave {name} out, or add it to the factory")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise BadInput(f"{spec} at {_home(factory)} cannot be called as it stands: {error}; give its parameters defaults") from None


def _checked(spec: str, factory: Callable[..., Any], made: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    wanted = "return (model, batch): an nn.Module and a dict of tensors by the names of its forward's parameters"
    if not isinstance(made, tuple) or len(made) != 2:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"{type(made).__name__}"
        raise BadInput(f"{spec} at {_home(factory)} returned {what}; {wanted}")
    model, batch = made
    if not isinstance(model, nn.Module):
        raise BadInput(f"{spec} at {_home(factory)} returned {type(model).__name__} as its model; {wanted}")
    if not isinstance(batch, Mapping) or not batch:
        raise BadInput(
            f"{spec} at {_home(factory)} returned {'an empty' if isinstance(batch, Mapping) else 'a'} {type(batch).__name__} as its batch; {wanted}"
        )
    for key, value in batch.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise BadInput(f"{spec} at {_home(factory)} returned a batch with {key!r}: {type(value).__name__}; {wanted}")
    return model, dict(batch)


def _told(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _advice(error: BaseException) -> str:
    if isinstance(error, READS_VALUES):
        return "while a step is captured tensors have shapes and no values, so compute this number in Python, without .item() or a test on a tensor"
    return "correct it there"


def _place(error: BaseException) -> str | None:
    """file:line of the deepest frame in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def _home(factory: Callable[..., Any]) -> str:
    """file:line where the factory is defined."""
    try:
        return f"{_short(inspect.getsourcefile(factory) or '?')}:{inspect.getsourcelines(factory)[1]}"
    except (TypeError, OSError):
        return f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', '?')}"


def _short(file: str) -> str:
    """As the user would type it: relative when it is under the current directory."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
