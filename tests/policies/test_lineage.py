"""What it takes to have a dropped storage back, worked by hand."""

from __future__ import annotations

from problems import BACKWARD, FORWARD, GraphBuilder, awkward, chain, shared_weight

from tierwise.ir import Role
from tierwise.policies._lineage import Lineages, last_replays


def named(problem, name: str) -> int:
    return next(s.id for s in problem.graph.storages if s.name == name)


def names(problem, lineage) -> tuple[list[str], list[str], float]:
    sources = sorted(problem.graph.storages[s].name for s in lineage.sources)
    return sources, [problem.graph.ops[op].name for op in sorted(lineage.ops)], lineage.seconds


def test_an_op_may_run_again_until_what_it_touched_is_overwritten():
    problem = chain(2, weight_bytes=1)  # fwd0 fwd1 loss bwd1 bwd0 step0 step1
    assert last_replays(problem.graph) == (5, 6, 6, 6, 5, 5, 6)  # step0 overwrites w0, step1 w1; updates do not run again at all
    problem = shared_weight()  # f0 f1 loss b1 b0 add step: b0 makes g, which add changes
    assert last_replays(problem.graph) == (6, 6, 6, 6, 5, 5, 6)
    problem = awkward()
    assert last_replays(problem.graph)[3] == 3  # dropout cannot be replayed


def test_the_nearest_ancestors_that_stay():
    problem = chain(4)  # fwd0-3 loss bwd3-0: a0 is read last by bwd1 (7), a1 by bwd2 (6), a2 by bwd3 (5)
    lineages = Lineages(problem)
    assert names(problem, lineages.lineage(named(problem, "a2"), 5)) == (["a1"], ["fwd2"], 1)


def test_a_dropped_source_is_replaced_by_its_own():
    problem = chain(4)
    lineages = Lineages(problem)
    a1, a2 = named(problem, "a1"), named(problem, "a2")
    lineages.lineage(a2, 5)
    lineages.drop(a1, 2, 6)
    assert names(problem, lineages.lineage(a2, 5)) == (["a0"], ["fwd1", "fwd2"], 2)
    assert names(problem, lineages.lineage(a1, 6)) == (["a0"], ["fwd1"], 1)
    lineages.restore(a1, 2, 6)
    assert names(problem, lineages.lineage(a2, 5)) == (["a1"], ["fwd2"], 1)


def test_a_drop_counts_only_while_it_lasts():
    problem = chain(4)
    lineages = Lineages(problem)
    lineages.drop(named(problem, "a0"), 1, 3)  # back again for fwd3, say
    assert names(problem, lineages.lineage(named(problem, "a1"), 3)) == (["batch"], ["fwd0", "fwd1"], 2)
    assert names(problem, lineages.lineage(named(problem, "a1"), 6)) == (["a0"], ["fwd1"], 1)


def test_what_the_program_is_done_with_is_no_source_but_inputs_can_be_kept():
    b = GraphBuilder()
    x, a, c, d, e = (b.storage(n, 10, Role.INPUT if n == "x" else Role.ACTIVATION) for n in ("x", "a", "c", "d", "e"))
    b.op("fa", FORWARD, [x], [a], seconds=3)
    b.op("fc", FORWARD, [a], [c], seconds=2)
    b.op("fd", FORWARD, [c], [d])
    b.op("back", BACKWARD, [c, d], [e])
    problem = b.problem()
    assert names(problem, Lineages(problem).lineage(c, 3)) == (["x"], ["fa", "fc"], 5)


def test_an_op_that_two_ways_lead_through_counts_once():
    b = GraphBuilder()
    x, a, left, right, out, y = (b.storage(n, 10, Role.INPUT if n == "x" else Role.ACTIVATION) for n in ("x", "a", "left", "right", "out", "y"))
    b.op("fa", FORWARD, [x], [a], seconds=5)
    b.op("fl", FORWARD, [a], [left])
    b.op("fr", FORWARD, [a], [right])
    b.op("fo", FORWARD, [left, right], [out])
    b.op("idle", FORWARD, [x], [])
    b.op("back", BACKWARD, [out], [y])
    problem = b.problem()
    assert names(problem, Lineages(problem).lineage(out, 5)) == (["x"], ["fa", "fl", "fr", "fo"], 8)


def test_nothing_brings_back_what_depends_on_an_overwritten_weight_or_on_a_random_op():
    problem = chain(2, weight_bytes=1)
    lineages = Lineages(problem)
    assert lineages.lineage(named(problem, "a0"), 5) is not None  # just before step0
    assert lineages.lineage(named(problem, "a0"), 6) is None
    problem = awkward()
    assert Lineages(problem).lineage(named(problem, "mask"), 7) is None
    assert Lineages(problem).lineage(named(problem, "x"), 7) is None


def test_an_in_place_op_is_traced_past_the_storage_it_took_over():
    problem = awkward()  # conv makes a, relu_ turns it into r
    assert names(problem, Lineages(problem).lineage(named(problem, "r"), 8)) == (["x"], ["conv", "relu_"], 2)
