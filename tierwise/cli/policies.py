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
        rows = [dataclasses.asdict(card) | {"status": "policy"} for card in cards]
        return terminal.print_json(rows + [dataclasses.asdict(absent) for absent in zoo.ABSENT])
    columns = (
        terminal.Column("policy", right=False),
        terminal.Column("paper", right=False),
        terminal.Column("year"),
        terminal.Column("venue", right=False),
        terminal.Column("decides", right=False),
        terminal.Column("fidelity", right=False),
        terminal.Column("runs", right=False),
        terminal.Column("needs", right=False),
        terminal.Column("", right=False),
    )
    lines = [
        terminal.Line(
            (
                f"{card.name} (not exact)" if card.lossy else card.name,
                card.authors or "-",
                str(card.year or "-"),
                card.venue or "-",
                card.decides,
                card.fidelity,
                "simulated" if card.simulated_only_because else "yes",
                ", ".join(card.requires) or "-",
            ),
            rest=card.summary,
        )
        for card in cards
    ]
    lines += [
        terminal.Line((absent.name, absent.authors or "-", str(absent.year), absent.venue), rest=f"{absent.status}: {absent.reason}")
        for absent in zoo.ABSENT
    ]
    terminal.print_table(columns, lines)
    for title, said in (("simulated only", "simulated_only_because"), ("exactness", "exactness")):
        why: dict[str, list[str]] = {}
        for card in cards:
            if getattr(card, said) not in ("", "exact"):
                why.setdefault(getattr(card, said), []).append(card.name)
        if why:
            print()
        lines = [terminal.Line((", ".join(names),), rest=reason) for reason, names in why.items()]
        terminal.print_table((terminal.Column(title, right=False),), lines)
    terminal.say_next("tierwise", "policies", cards[-1].name)


def _one(name: str, as_json: bool) -> None:
    from .. import policies as zoo
    from ..errors import BadInput
    from . import _terminal as terminal
    from ._inputs import options_of

    if name in (absent.name for absent in zoo.ABSENT):
        absent = next(absent for absent in zoo.ABSENT if absent.name == name)
        raise BadInput(f"{name} ({absent.paper.rstrip('.')}) has no policy here, {absent.status}: {absent.reason}")
    if name not in zoo.names():
        zoo.load(name)  # says which name is nearest
    card, options = zoo.card(name), options_of(name)
    if as_json:
        return terminal.print_json(dataclasses.asdict(card) | {"options": {key: repr(default) for key, default in options.items()}})
    facts = {
        name: card.summary,
        **card.facts | {"published": card.facts["published"] or "-"},
        "options": ", ".join(f"{key}={default}" for key, default in options.items()) or "none",
    }
    terminal.print_table((terminal.Column("policy", right=False),), [terminal.Line((key,), rest=text) for key, text in facts.items()])
    terminal.say_next("tierwise", "plan", "examples/gpt-small.step.json", "--machine", "h200", "--budget", "6GiB", "--policy", name)
