"""The documents that claim to run do run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from docs import make_accuracy

ROOT = Path(__file__).parent.parent


def test_from_scratch_runs_as_it_stands():
    text = (ROOT / "docs" / "from_scratch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    source = "\n".join(blocks)
    assert 150 <= len(source.splitlines()) <= 280
    exec(compile(source, "docs/from_scratch.md", "exec", dont_inherit=True), {"__name__": "__main__"})


def test_misses_and_failures_are_on_the_page(tmp_path):
    phases = {"forward": {"seconds": 0.5, "host": 0.4, "busy": 0.3}}
    kept = {
        "way": "eager", "seconds": 1.0, "predicted_seconds": 0.94, "seconds_error": -0.06, "roofline_error": 0.5, "peak_bytes": 1000,
        "predicted_peak_bytes": 1000, "peak_error": 0.0, "batch": 8, "seq": None,
    }  # fmt: skip
    rows = [
        {"case": "net", **kept, "notes": [], "detail": {"predicted": phases, "measured": phases, "kernels": {"busy": 0.25}}},
        {"case": "other", **kept, "seconds_error": 0.01, "notes": ["half of it is a guess"], "peak_error": -0.04},
        {"case": "third", "way": "failed", "seconds": None, "notes": ["Traceback\nValueError: no"]},
    ]
    path = tmp_path / "2026-01-01-accuracy.json"
    path.write_text(json.dumps({"date": "2026-01-01", "commit": "abc", "command": "x", "versions": {"torch": "2"}, "rows": rows}), encoding="utf-8")
    page = make_accuracy.accuracy_page(path)
    assert "| peak | within 3% | 1 of 2 rows |" in page and "| step time, measured profile | within 5% | 1 of 2 rows |" in page
    assert "| net | 8 | eager | 1000.0 ms | 940.0 ms | **-6.0%** | +50% | 1000 B | 1000 B | +0.0% |" in page
    assert "- **net, eager**: step **-6.0%**, peak +0.0%; forward 500.0 ms (the host 400.0 ms), predicted 500.0 ms (busy 300.0 ms" in page
    assert "the GPU was busy for 250.0 ms" in page and "- **other, eager**: step +1.0%, peak **-4.0%**." in page
    assert "- **third**: failed; ValueError: no" in page and "other, eager: half of it is a guess" in page
