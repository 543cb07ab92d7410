"""`tierwise run`: an unmodified script trains inside a budget. It runs as Python would run it, and a lookout notes the optimizers it makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from ..errors import BadInput, TierwiseError
from ..ir import Run
from .lookout import Lookout, refuse_several_ranks, say


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    run: Run | None  # of the model that was fitted last


def run_script(words: Sequence[str], *, watch: bool = False, **settings: Any) -> Outcome:
    """Run `script.py ARGS` or `-m module ARGS` as Python would, its training under tierwise.fit(..., **settings)."""
    refuse_several_ranks()
    start = _module(words[1], words[2:]) if words[0] == "-m" else _file(Path(words[0]), words[1:])
    with Lookout(settings, watch=watch) as lookout, _new_optimizers(lookout.note):
        code = _as_python(start)
    return Outcome(code, lookout.finish())


@contextmanager
def _new_optimizers(note: Callable[[Optimizer], None]) -> Iterator[None]:
    """`note` hears of every optimizer that is made."""
    plain = Optimizer.__init__

    @functools.wraps(plain)
    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        plain(optimizer, *args, **kwargs)
        note(optimizer)

    Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Optimizer.__init__ = plain  # type: ignore[method-assign]


# -- as Python runs a script --------------------------------------------------------------------------------------------------------------


def _as_python(start: Callable[[], object]) -> int:
    """The exit code. Errors of the script are shown as Python shows them."""
    try:
        start()
    except SystemExit as leaving:
        return _code(leaving)
    except TierwiseError as error:
        say(str(error))
        return 2
    except BaseException as error:
        error = error.with_traceback(None if _at_compilation(error) else _without_ours(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _file(path: Path, arguments: Sequence[str]) -> Callable[[], object]:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}; name a Python script, or -m and a module") from None
    place = str(path.absolute())
    main = ModuleType("__main__")
    main.__dict__.update(__file__=place, __builtins__=__builtins__)

    def start() -> None:
        sys.modules["__main__"] = main  # and it stays: what the script leaves to the end of the process still finds its names there
        sys.argv = [str(path), *arguments]
        sys.path[0:1] = [str(path.resolve().parent)]
        exec(compile(source, place, "exec", dont_inherit=True), main.__dict__)

    return start


def _module(name: str, arguments: Sequence[str]) -> Callable[[], object]:
    import importlib.util
    import runpy

    sys.path[0:1] = [str(Path.cwd())]
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise BadInput(f"there is no module {name!r} here; name it as Python imports it, such as -m package.train")
    sys.argv = [name, *arguments]
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)
    return 1


def _at_compilation(error: BaseException) -> bool:
    """A script that is no Python: nothing of it ran."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return isinstance(error, SyntaxError) and last is not None and last.tb_frame.f_code.co_filename == __file__


def _without_ours(error: BaseException) -> Any:
    """The traceback from the script's own first line on."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace or error.__traceback__
