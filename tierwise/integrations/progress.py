"""What fit is doing, while a terminal watches: one line with a bar that moves, gone when the work is done; then one sentence that stays."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from ..errors import BadInput
from ..units import parse_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHARE = re.compile(r"(\d[\d.]*(?: ?[KMGT]?i?B)?) of (\d[\d.]*(?: ?[KMGT]?i?B)?)")


class Teller:
    """Call it with a sentence before each piece of work, and `over` with what came of it. Says nothing where nobody watches."""

    def __init__(self) -> None:
        self._shown: tuple[Progress, TaskID] | None = None

    def __call__(self, what: str) -> None:
        if not sys.stderr.isatty():
            return
        if self._shown is None:
            self._shown = _bar()
        bar, task = self._shown
        done, total = share_in(what) or (0.0, None)
        bar.reset(task, description=f"tierwise: {what}", completed=done, total=total)  # type: ignore[arg-type]

    def over(self, sentence: str = "") -> None:
        """The work is done; nothing is left of the line but this sentence."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None
        if sentence and sys.stderr.isatty():
            print(f"tierwise: {sentence}", file=sys.stderr)


def share_in(sentence: str) -> tuple[float, float] | None:
    """'locking host memory, 1.00 GiB of 4.00 GiB' -> (1 << 30, 4 << 30); None where nothing is said to be of something."""
    found = _SHARE.search(sentence)
    try:
        return (_number(found[1]), _number(found[2])) if found else None
    except BadInput:
        return None


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[\d.]+", text) else float(parse_bytes(text))


def _bar() -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    bar.start()
    return bar, bar.add_task("", total=None)
