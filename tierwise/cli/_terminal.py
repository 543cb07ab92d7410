"""Aligned tables and talk. Plain text when piped, a little colour on a terminal, never a wrapped cell."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

NARROW_GAP, WIDE_GAP = 1, 2


@dataclass(frozen=True, slots=True)
class Column:
    title: str  # may have two lines
    right: bool = True
    optional: bool = False  # left out, if it is the last, where the terminal is too narrow for it


@dataclass(frozen=True, slots=True)
class Line:
    """Cells for the first columns; `rest` is text that runs on from there to the end of the line."""

    cells: tuple[str, ...]
    rest: str = ""
    style: str = ""


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_table(columns: Sequence[Column], lines: Sequence[Line]) -> None:
    """Columns as wide as their widest cell, closer together if that makes the table fit the terminal."""
    out = console()
    titles = [column.title.split("\n") for column in columns]
    height = max(map(len, titles))
    titles = [[""] * (height - len(title)) + title for title in titles]
    widths = [max(len(text) for text in [*title, *(line.cells[i] for line in lines if i < len(line.cells))]) for i, title in enumerate(titles)]
    room = out.width if out.is_terminal else None
    gap = WIDE_GAP
    if room is not None and sum(widths) + gap * (len(widths) - 1) > room:
        gap = NARROW_GAP
        while columns[-1].optional and sum(widths) + gap * (len(widths) - 1) > room:
            columns, titles, widths = columns[:-1], titles[:-1], widths[:-1]
    for row in range(height if any(map(any, titles)) else 0):
        out.print(_aligned(columns, widths, gap, [title[row] for title in titles]), style="bold")
    for line in lines:
        text = _aligned(columns, widths, gap, line.cells)
        if line.rest:
            text = _run_on(text.ljust(sum(widths[: len(line.cells)]) + gap * len(line.cells)), line.rest, room)
        out.print(text, style=line.style)


def _aligned(columns: Sequence[Column], widths: Sequence[int], gap: int, cells: Sequence[str]) -> str:
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width) for column, width, cell in zip(columns, widths, cells, strict=False)
    ]  # fmt: skip
    return (" " * gap).join(padded).rstrip()


def _run_on(start: str, rest: str, room: int | None) -> str:
    if room is None or room - len(start) < 20:
        return start + rest
    return textwrap.fill(rest, room, initial_indent=start, subsequent_indent=" " * len(start))


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """Talk: to stderr."""
    console(stderr=True).print(text, style="dim")


def say_next(*words: str) -> None:
    """The last line: the next command to type."""
    console(stderr=True).print(f"Next: {shlex.join(words)}", style="bold")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr while a terminal watches; call the result with the name of each piece of work before it starts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=total)
        started = 0

        def begin(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, completed=started, total=max(total, started + 1))
            started += 1

        yield begin
