"""tierwise policies: every policy, or the whole card of one."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ._inputs import JsonOption


def policies(
    name: Annotated[str | None, typer.Argument(metavar="[POLICY]", help="One policy, in full.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """List the policies: what each decides, where it comes from, what it needs."""
    from .. import policies as zoo
    from . import _terminal as terminal

    if name is not None:
        return _one(name, as_json)
    cards = [zoo.card(found) for found in zoo.names()]
    if as_json:
        return terminal.print_json([dataclasses.asdict(card) for card in cards])
    columns = (
        terminal.Column("policy", right=False),
        terminal.Column("year"),
        terminal.Column("needs", right=False),
        terminal.Column("", right=False),
    )
    terminal.print_table(
        columns,
        [terminal.Line((card.name, str(card.year or "-"), ", ".join(card.requires) or "-"), rest=card.summary) for card in cards],
    )
    terminal.say_next("tierwise", "policies", cards[-1].name)


def _one(name: str, as_json: bool) -> None:
    from .. import policies as zoo
    from . import _terminal as terminal
    from ._inputs import options_of

    if name not in zoo.names():
        zoo.load(name)  # says which name is nearest
    card, options = zoo.card(name), options_of(name)
    if as_json:
        return terminal.print_json(dataclasses.asdict(card) | {"options": {key: repr(default) for key, default in options.items()}})
    facts = {
        name: card.summary,
        "paper": card.paper,
        "idea": card.idea,
        "rule": card.rule,
        "differs": card.differs,
        "decides": card.decides,
        "needs": ", ".join(card.requires) or "nothing beyond the device",
        "exactness": card.exactness,
        "options": ", ".join(f"{key}={default}" for key, default in options.items()) or "none",
    }
    terminal.print_table((terminal.Column("policy", right=False),), [terminal.Line((key,), rest=text) for key, text in facts.items()])
    terminal.say_next("tierwise", "plan", "examples/gpt-small.step.json", "--machine", "h200", "--budget", "6GiB", "--policy", name)
