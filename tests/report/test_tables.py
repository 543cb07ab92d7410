from __future__ import annotations

from report.example_runs import planned

from tierwise.ir import Comparison, Outcome, Row, Run
from tierwise.report.tables import grouped


def table(budget, *rows):
    return Comparison(budget, 5.0, 9.0, 60, tuple(Row(policy, Outcome.FITS, peak_bytes=peak, seconds=seconds) for policy, peak, seconds in rows))


def test_runs_of_one_step_share_a_table():
    (group,) = grouped([planned("chen"), planned("vdnn"), planned("chen", 60)])
    assert group.name == "chain on toy"
    assert [(t.budget_bytes, [row.policy for row in t.rows]) for t in group.tables] == [
        (50, ["keep_all", "vdnn", "chen"]),
        (60, ["keep_all", "chen"]),
    ]


def test_other_steps_have_their_own():
    row = Row("keep_all", Outcome.FITS, peak_bytes=60, seconds=8.0)
    other = Run("other", comparisons=(Comparison(50, 5.0, 8.0, 60, (row,)),))
    empty = Run("empty", comparisons=(Comparison(50, 5.0, 7.0, 60, ()),))
    assert [group.name for group in grouped([planned("chen"), other, empty])] == ["chain on toy", "other"]


def test_the_frontier():
    """a is smallest, b is fastest, c is beaten by b at the same size, d by a at the same time."""
    (group,) = grouped([Run("x", comparisons=(table(100, ("a", 10, 9.0), ("b", 20, 5.0), ("c", 20, 6.0), ("d", 15, 9.0)),))])
    assert {curve.policy: curve.points[0].on_frontier for curve in group.curves} == {"a": True, "b": True, "c": False, "d": False}


def test_a_curve_has_a_policy_at_every_budget_that_changes_it():
    tables = (table(10, ("a", 10, 9.0)), table(50, ("a", 40, 6.0)), table(60, ("a", 40, 6.0)))
    (group,) = grouped([Run("x", comparisons=tables)])
    assert [(p.budget_bytes, p.peak_bytes) for p in group.curves[0].points] == [(10, 10), (50, 40)]


def test_what_did_not_fit_is_not_a_point():
    rows = (Row("a", Outcome.INFEASIBLE, least_bytes=70), Row("keep_all", Outcome.DOES_NOT_FIT, peak_bytes=60, seconds=9.0))
    (group,) = grouped([Run("x", comparisons=(Comparison(50, 5.0, 9.0, 60, rows),))])
    assert [curve.policy for curve in group.curves] == ["keep_all"]
