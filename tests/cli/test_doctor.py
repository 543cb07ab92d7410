from __future__ import annotations

import json

from tierwise.profile import surroundings
from tierwise.profile.surroundings import Surroundings


def test_every_line_says_how_it_is(tierwise, tmp_path):
    ran = tierwise("doctor", "--disk", tmp_path, "--quick")
    assert ran.code == 0
    assert all(line.split()[0] in ("ok", "warn", "→") for line in ran.out.splitlines())
    assert ran.err.endswith("Next: tierwise machine --probe -o machine.json\n")


def test_as_data(tierwise, tmp_path):
    found = json.loads(tierwise("doctor", "--disk", tmp_path, "--quick", "--json").out)
    assert found["usable"] is True and found["here"]["torch"]
    assert {finding["level"] for finding in found["findings"]} <= {"ok", "warn"}


def test_what_makes_it_unusable_is_exit_code_1_with_the_mending_command(tierwise, monkeypatch):
    monkeypatch.setattr(surroundings, "look_around", lambda *a, **k: Surroundings("linux", torch=None, torch_problem="gone", memory_bytes=1 << 30))
    ran = tierwise("doctor")
    assert ran.code == 1
    assert ran.out.splitlines()[0].split(maxsplit=2) == ["bad", "torch", "cannot be imported: gone"]
    assert ran.out.splitlines()[1].strip() == "→ pip install 'torch>=2.11'"
