"""tierwise demo: the whole way on any laptop, in under a minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..demonstration import Demonstration

SHOWN_LOSSES = 5
BARS = "▁▂▃▄▅▆▇█"


def demo(
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="Where to write the page: one HTML file.")] = "report.html",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=2, help="How many steps to train, twice.")] = 40,
) -> None:
    """Train a small GPT on the CPU inside a budget of memory, and the same without one; compare the two, and write the report."""
    import sys

    from .. import report
    from ..integrations.progress import Teller
    from ..ir import serial
    from . import _terminal as terminal
    from ._inputs import check_writable, record_of

    record = record_of(out)
    check_writable(out, record)
    line = Teller()
    tell: Callable[[str], None] = line if sys.stderr.isatty() else terminal.say
    try:
        tell("loading PyTorch")
        from ..demonstration import demonstrate

        found = demonstrate(steps, progress=lambda what: tell(what))
    finally:
        line.over()
    _print(found)
    serial.save(found.run, record)
    serial.write(report.render([found.run], report.summarize([found.run])), out)
    terminal.say(f"Wrote {out}, to be opened in a browser, and {record}, what it was made of.")
    terminal.say("Then, for a model of yours, before renting a card and on the card:")
    terminal.say_next("tierwise", "estimate", "llama-7b", "--batch", "8", "--seq", "2048", "--gpu", "rtx4090")
    terminal.say_next("tierwise", "run", "--budget", "20GiB", "train.py")


def _print(found: Demonstration) -> None:
    from ..units import format_bytes
    from . import _terminal as terminal
    from . import compare

    out = terminal.console()
    print()
    out.print("1. What published policies would do with this step, op by op", style="bold")
    compare.print_comparison(found.comparison, "the CPU in the place of a GPU", blank=False)
    print()
    out.print("2. What Tierwise does with it, block by block", style="bold")
    for sentence in found.run.words:
        print(f"  {sentence}")
    print()
    out.print("3. Trained for real, on a device that has no more than the budget", style="bold")
    untouched, losses = found.run.untouched_losses, found.run.losses
    places = sorted({round(place * (len(losses) - 1) / (SHOWN_LOSSES - 1)) for place in range(SHOWN_LOSSES)})
    columns = (terminal.Column("loss at step", right=False), *(terminal.Column(str(place + 1)) for place in places), terminal.Column("", right=False))
    rows = (("untouched", untouched), ("inside the budget", losses))
    lines = [terminal.Line((name, *(f"{row[place]:.4f}" for place in places), sparkline(row))) for name, row in rows]
    terminal.print_table(columns, lines)
    print()
    peak, budget = map(format_bytes, (found.peak_bytes, found.budget_bytes))
    out.print(f"All {len(losses)} losses and all {found.parameters:,} parameters are equal, bit for bit.", style="bold green")
    print(f"At most {peak} of {budget} were used, measured.")


def sparkline(values: tuple[float, ...], width: int = 20) -> str:
    """(3.0, 2.0, 1.0) -> '█▅▁'"""
    picked = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)] if len(values) > width else list(values)
    low, high = min(picked), max(picked)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for value in picked)
