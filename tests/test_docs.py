"""The documents that claim to run do run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_from_scratch_runs_as_it_stands():
    text = (ROOT / "docs" / "from_scratch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    source = "\n".join(blocks)
    assert 150 <= len(source.splitlines()) <= 280
    exec(compile(source, "docs/from_scratch.md", "exec", dont_inherit=True), {"__name__": "__main__"})
