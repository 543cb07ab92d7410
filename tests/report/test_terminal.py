from __future__ import annotations

from report.example_runs import measured, planned

from tierwise.report import lines, summarize


def test_one_run():
    found = list(lines(summarize([planned("vdnn")])))
    assert found[0] == "chain · vdnn · 50 B"
    assert found[1] == "  The step takes 9.00 s and holds 40 B of hbm, within the budget of 50 B."
    assert found[-9:] == [
        "  lane    busy  share",
        "  gpu   9.00 s   100%",
        "  out   3.00 s    33%",
        "  in    3.00 s    33%",
        "",
        "chain on toy: time against memory, * where nothing is both smaller and faster",
        "policy    peak  step time",
        "vdnn      40 B     9.00 s  *",
        "keep_all  60 B     9.00 s",
    ]


def test_several_runs_have_a_table_first():
    found = list(lines(summarize([planned("chen"), measured(planned("vdnn"))])))
    assert found[:3] == [
        "run                  step time  peak  recomputed  copied  waiting",
        "chain · chen · 50 B     11.0 s  50 B      2.00 s       -  0.00 µs",
        "chain · vdnn · 50 B     9.90 s  41 B           -    60 B  0.00 µs",
    ]
    assert "  step time          9.00 s    9.90 s  +10.0%" in found
