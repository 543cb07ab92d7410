"""A run is written in one call and read back equal; parts that do not belong together are refused."""

from __future__ import annotations

import json
import math

import pytest
from problems import chain

from tierwise.errors import BadFile
from tierwise.ir import Comparison, Compute, Outcome, Row, Run, Schedule, Span, Timeline, Within, serial

PROBLEM = chain(2)
SCHEDULE = Schedule(tuple(Compute(op) for op in range(len(PROBLEM.graph.ops))), home={0: ("hbm",)})
TIMELINE = Timeline(seconds=5.0, peak_bytes={"hbm": 40}, spans=(Span(0, "gpu", 0.0, 1.0),), memory={}, measured=True)
TABLE = Comparison(
    50, 4.0, 5.0, 60, (Row("chen", Outcome.FITS, peak_bytes=50, seconds=6.0, recomputed_ops=1), Row("vdnn", Outcome.MISSING, reason="no dram"))
)
RUN = Run(
    "chain", PROBLEM, SCHEDULE, TIMELINE, TIMELINE, "chen", (TABLE,), ("one word",), (2.0, 1.0), (2.0, 1.0), (0.5,), reserved_bytes=7,
    unaccounted_bytes=3, within=(Within("blocks.0", 40, 0.5),),
)  # fmt: skip


@pytest.mark.parametrize(
    "run", [RUN, Run("empty"), Run("nothing within", within=()), Run("measured only", measured=TIMELINE), Run("tables", comparisons=(TABLE, TABLE))]
)
def test_round_trip(run, tmp_path):
    serial.save(run, tmp_path / "run.json.gz")
    assert serial.load(tmp_path / "run.json.gz", Run) == run


def test_a_loss_that_is_not_a_number_stays_one():
    text = serial.dumps(Run("diverged", losses=(1.0, math.nan, math.inf)))
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["losses"] == [1.0, None, None]
    first, *rest = serial.loads(text, Run).losses
    assert first == 1.0 and all(map(math.isnan, rest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["predicted"]["spans"].append([99, "gpu", 0, 1]), "a span names a step that is not among the 5 of the schedule"),
        (lambda d: d["schedule"]["steps"].append({"do": "compute", "op": 99}), "an op or storage that the graph does not have"),
        (lambda d: d["schedule"]["home"].update({"99": ["hbm"]}), "a home is of a storage that the graph does not have"),
        (lambda d: d["comparisons"][0]["rows"][0].update(outcome="fine"), "outcome of Row  is 'fine', not Outcome"),
        (lambda d: d["comparisons"][0].update(bound_seconds="1"), "a number of a comparison is not one"),
        (lambda d: d.update(losses=["low"]), "losses are not numbers"),
        (lambda d: d.update(words="ab"), "are text"),
        (lambda d: d.update(reserved_bytes=1.5), "reserved_bytes is 1.5"),
        (lambda d: d.pop("name"), "'name' is missing"),
    ],
)
def test_a_corrupt_run_says_what_is_wrong(change, message):
    data = json.loads(serial.dumps(RUN))
    change(data)
    with pytest.raises(BadFile, match=message):
        serial.loads(json.dumps(data), Run)
