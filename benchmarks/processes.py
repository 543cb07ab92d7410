"""Rows that a case says from a process of its own, one JSON object a line behind a word, as they come: whoever stops it has what was said so far."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any


class Process:
    """Iterate for its rows; then `code` is how it ended and `talk` what it wrote to stderr."""

    def __init__(self, command: list[str], word: str) -> None:
        self._command, self._word = command, f"{word} "
        self.code, self.talk = 0, ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | dict(os.environ)
        with (
            tempfile.TemporaryFile("w+") as talk,
            subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE, stderr=talk, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(self._word):
                    yield json.loads(line.removeprefix(self._word))
            self.code = process.wait()
            talk.seek(0)
            self.talk = talk.read()
