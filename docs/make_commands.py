"""The page of commands: what every command says of itself with --help. Nothing there is typed in."""

from __future__ import annotations

import typer.main

from tierwise.cli import VERBS, app

WIDTH = 100


def help_of(verb: str | None = None) -> str:
    """The text of `tierwise VERB --help`, at one width wherever it is made."""
    group = typer.main.get_command(app)
    with group.make_context("tierwise", [], resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH) as top:
        if verb is None:
            return group.get_help(top).strip()
        command = group.commands[verb]  # type: ignore[attr-defined]
        with command.make_context(verb, [], parent=top, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH) as context:
            return str(command.get_help(context)).strip()


def commands_page() -> str:
    parts = ["# Commands\n\nWhat each says with `--help`.\n", f"```text\n{help_of()}\n```\n"]
    parts += [f"## tierwise {verb}\n\n```text\n{help_of(verb)}\n```\n" for verb in VERBS]
    return "\n".join(parts)
