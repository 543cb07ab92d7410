"""Numbers worked by hand on chain(4): a batch of 10 bytes, four activations of 10, links of 10 bytes a second."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from problems import chain, machine

from tierwise import machines, pipeline, policies
from tierwise.errors import BadInput
from tierwise.ir import Machine, Outcome, Processor, Tier, peak_bytes, serial

KEPT_BYTES = 60  # batch, a0 to a3, and the gradient the loss makes
KEPT_SECONDS = 9.0  # four forward, the loss, four backward


def rows(problem, names, **more):
    return {row.policy: row for row in pipeline.compare(problem, names, **more).rows}


def test_the_reference_fits():
    problem = chain(4)
    row = pipeline.reference(problem).row
    assert (row.outcome, row.peak_bytes, row.seconds) == (Outcome.FITS, KEPT_BYTES, KEPT_SECONDS)
    assert (row.recomputed_ops, row.copied_bytes) == (0, 0)


def test_the_reference_is_there_even_where_it_does_not_fit():
    found = pipeline.compare(chain(4).with_budget(59), ["keep_all"])
    (row,) = found.rows
    assert (row.outcome, row.peak_bytes, row.seconds, row.least_bytes) == (Outcome.DOES_NOT_FIT, KEPT_BYTES, KEPT_SECONDS, KEPT_BYTES)
    assert (found.keep_all_seconds, found.keep_all_bytes, found.budget_bytes) == (KEPT_SECONDS, KEPT_BYTES, 59)


def test_a_row_counts_what_is_recomputed():
    problem = chain(4).with_budget(50)
    answer = pipeline.answer(problem, "chen", segments="sqrt")
    again = len([s for s in answer.schedule.steps if type(s).__name__ == "Compute"]) - len(problem.graph.ops)
    assert answer.row.recomputed_ops == again > 0
    assert answer.row.recomputed_seconds == again * 1.0
    assert answer.row.seconds == KEPT_SECONDS + again


def test_a_row_counts_what_is_copied_and_stands_against_both_references():
    found = pipeline.compare(chain(4).with_budget(50), ["vdnn", "keep_all"])
    keep_all, vdnn = found.rows
    copies = [s for s in pipeline.answer(chain(4).with_budget(50), "vdnn").schedule.steps if type(s).__name__ == "Copy"]
    assert vdnn.copied_bytes == 10 * len(copies) > 0
    assert vdnn.times_keep_all == vdnn.seconds / KEPT_SECONDS
    assert vdnn.times_bound == vdnn.seconds / found.bound_seconds >= 1
    assert keep_all.times_keep_all == 1


def test_an_infeasible_policy_is_a_row_with_its_smallest_budget():
    problem = chain(4).with_budget(30)
    row = rows(problem, ["chen"])["chen"]
    assert row.outcome is Outcome.INFEASIBLE and row.seconds is None
    schedule = policies.plan(problem.with_budget(row.least_bytes), "chen")
    assert peak_bytes(problem, schedule)["hbm"] <= row.least_bytes
    with pytest.raises(Exception, match="smallest"):
        policies.plan(problem.with_budget(row.least_bytes - 1), "chen")


def test_a_policy_that_misses_a_tier_is_a_row_that_says_so():
    alone = Machine("alone", (Tier("hbm", 50),), (), (Processor("gpu", "hbm"),))
    row = rows(chain(4, on=alone), ["vdnn"])["vdnn"]
    assert row.outcome is Outcome.MISSING and "vdnn needs 'dram'" in row.reason


def outsider(monkeypatch, plan) -> None:
    module = ModuleType("outsider")
    module.plan = plan
    monkeypatch.setitem(sys.modules, "outsider", module)
    monkeypatch.setattr(policies, "_outsiders", lambda: {"outsider": type("Point", (), {"load": lambda self: module})()})


def test_a_policy_that_crashes_costs_only_its_own_row(monkeypatch):
    outsider(monkeypatch, lambda problem: 1 // 0)
    found = rows(chain(4), ["outsider", "keep_all"])
    assert found["keep_all"].outcome is Outcome.FITS
    assert found["outsider"].outcome is Outcome.CRASHED and "ZeroDivisionError" in found["outsider"].reason


def test_a_schedule_the_judge_refuses_is_a_row_with_the_reason(monkeypatch):
    def forgets_an_op(problem):
        whole = policies.load("keep_all").plan(problem)
        return type(whole)(whole.steps[:-3], whole.home)

    outsider(monkeypatch, forgets_an_op)
    row = rows(chain(4), ["outsider"])["outsider"]
    assert row.outcome is Outcome.REFUSED and row.reason


def test_bad_options_are_the_users_mistake_and_no_row():
    with pytest.raises(BadInput, match="did you mean 'segments'"):
        pipeline.compare(chain(4), ["chen"], options={"chen": {"segmants": "sqrt"}})


def test_rows_stand_in_order():
    found = pipeline.compare(chain(6).with_budget(60), ["zero_offload", "vdnn", "chen", "keep_all"]).rows
    assert found[0].policy == "keep_all"
    timed = [row.seconds for row in found[1:] if row.seconds is not None]
    assert timed == sorted(timed)
    assert [row.seconds is None for row in found] == sorted(row.seconds is None for row in found)


def test_every_policy_is_announced_once():
    heard: list[str] = []
    pipeline.compare(chain(3), ["chen", "keep_all"], on_policy=heard.append)
    assert heard == ["keep_all", "chen"]


# -- problems ---------------------------------------------------------------------------------------------------------------------------


def test_a_graph_gets_a_machine_a_budget_and_costs(tmp_path):
    graph = chain(2, weight_bytes=4).graph
    serial.save(graph, tmp_path / "g.json")
    problem = pipeline.make_problem(tmp_path / "g.json", "h200", "0.5")
    assert problem.graph == graph
    assert problem.budget_bytes == machines.load("h200").capacity("hbm") // 2
    assert {processor for _, processor in problem.costs.op_seconds} == {"gpu", "cpu"}
    assert pipeline.make_problem(graph, machines.load("h200")).budget_bytes == machines.load("h200").capacity("hbm")


def test_a_problem_brings_its_own_machine(tmp_path):
    serial.save(chain(2), tmp_path / "p.json.gz")
    assert pipeline.make_problem(str(tmp_path / "p.json.gz"), None, "100B") == chain(2).with_budget(100)
    with pytest.raises(BadInput, match="brings its own machine, toy"):
        pipeline.make_problem(tmp_path / "p.json.gz", "h200")


def test_a_graph_without_a_machine_is_refused():
    with pytest.raises(BadInput, match=r"needs a machine .* h200"):
        pipeline.make_problem(chain(2).graph)


def test_a_budget_beyond_the_card_is_refused():
    with pytest.raises(BadInput, match=r"more than the 9\.77 KiB of hbm that toy has"):
        pipeline.make_problem(chain(2, on=machine()), budget="1MiB")
