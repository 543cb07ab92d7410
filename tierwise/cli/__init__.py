"""The command line: one file per verb, each importing what it needs when it is called, so that the quick verbs stay quick.

Data goes to stdout and talk to stderr. Bad input ends in one sentence on stderr and exit code 2, Ctrl-C in exit code 130.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ..errors import TierwiseError, UnknownName
from . import capture, compare, demo, doctor, estimate, machine, plan, policies, report, run, simulate

app = typer.Typer(name="tierwise", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        print(f"tierwise {__version__}")
        raise typer.Exit


@app.callback()
def tierwise(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False) -> None:
    """Train models that do not fit: one plan for memory, links, disk and recomputation, from one number of bytes."""


VERBS: dict[str, Callable[..., int | None]] = {
    "demo": demo.demo,
    "run": run.run,
    "capture": capture.capture,
    "estimate": estimate.estimate,
    "policies": policies.policies,
    "machine": machine.machine,
    "plan": plan.plan,
    "simulate": simulate.simulate,
    "compare": compare.compare,
    "report": report.report,
    "doctor": doctor.doctor,
}
for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × or µ shows ? instead
    try:
        code = _run(words)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TierwiseError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        _abandon_stdout()
        return 0 if error.errno == errno.EPIPE else _fail(f"cannot write to stdout: {error.strerror}; send it to a place that has room")
    except Exception as error:
        if hasattr(error, "format_message"):  # a mistake in the command line itself, found by typer
            return _fail(_sentence(error, words))
        raise


def _run(words: list[str]) -> object:
    if len(words) == 1 and (verb := VERBS.get(words[0])) and all(p.default is not p.empty for p in inspect.signature(verb).parameters.values()):
        return verb()  # nothing to parse, and typer's parser takes longer to start than the verb takes to answer
    if words[0] == "run":
        words = with_script_apart(words)
    return app(args=words, prog_name="tierwise", standalone_mode=False)


def with_script_apart(words: list[str]) -> list[str]:
    """The options of a script are its own: they stand behind --, where nobody parses them."""
    import typer.main

    parameters = typer.main.get_command(app).commands["run"].params  # type: ignore[attr-defined]
    values = [name for parameter in parameters for name in parameter.opts if not getattr(parameter, "is_flag", True)]
    ours, script = run.split(words[1:], values)
    return ["run", *ours, *(["--", *script] if script else [])]


def _sentence(error: Any, words: Sequence[str]) -> str:
    """What typer found wrong with the command line, in our words."""
    context = getattr(error, "ctx", None)
    if hasattr(error, "option_name") and hasattr(error, "possibilities") and context is not None:
        return str(UnknownName("option", error.option_name, [name for parameter in context.command.params for name in parameter.opts]))
    if "No such command" in error.format_message():
        return str(UnknownName("command", next(word for word in words if not word.startswith("-")), VERBS))
    message = error.format_message().strip().rstrip(".")
    verb = f" {words[0]}" if words[0] in VERBS else ""
    return f"{message[0].lower()}{message[1:]}; see tierwise{verb} --help"


def _fail(sentence: str) -> int:
    print(f"tierwise: {sentence}", file=sys.stderr)
    return 2


def _abandon_stdout() -> None:
    """What is still in the buffer cannot be written; without this the interpreter would try again on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
