"""Checkmate against hand-worked steps and against brute force over every legal list of Compute and Free."""

from __future__ import annotations

import heapq
from itertools import count

import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, awkward, chain, masters

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Compute, Graph, Op, Phase, Problem, Region, RegionCall, Role, check_schedule, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import keep_all, plan
from tierwise.policies._nodes import Nodes, runs_of, schedule_of


def device_seconds(problem, schedule) -> float:
    return sum(problem.device_seconds[step.op] for step in schedule.steps if isinstance(step, Compute))


def recomputed(problem, schedule) -> list[str]:
    ops = [step.op for step in schedule.steps if isinstance(step, Compute)]
    return [problem.graph.ops[op].name for place, op in enumerate(ops) if op in ops[:place]]


def skip_over_two():
    """a is read at once and again two layers later, in both directions; sizes and seconds differ."""
    b = GraphBuilder()
    x = b.storage("x", 4, Role.INPUT)
    a, u, v, e = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in (("a", 10), ("u", 20), ("v", 20), ("e", 10)))
    b.op("fa", FORWARD, [x], [a], seconds=3)
    b.op("fu", FORWARD, [a], [u], seconds=1)
    b.op("fv", FORWARD, [u], [v], seconds=2)
    b.op("fe", FORWARD, [v, a], [e], seconds=1)
    de, dv, du, da = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in (("de", 10), ("dv", 20), ("du", 20), ("da", 10)))
    b.op("loss", BACKWARD, [e], [de])
    b.op("be", BACKWARD, [de, v], [dv])
    b.op("bv", BACKWARD, [dv, u], [du], workspace_bytes=5)
    b.op("bu", BACKWARD, [du, a], [da])
    b.op("ba", BACKWARD, [da, x], [])
    return b.problem()


def uneven():
    """A chain in which what is large is cheap to make again, with an op of two outputs."""
    b = GraphBuilder()
    x = b.storage("x", 3, Role.INPUT)
    a, mask, c, d = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in (("a", 12), ("mask", 5), ("c", 30), ("d", 7)))
    b.op("fa", FORWARD, [x], [a, mask], seconds=4)
    b.op("fc", FORWARD, [a], [c], seconds=0.5)
    b.op("fd", FORWARD, [c], [d], seconds=2)
    dd, dc, da, dx = (b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes in (("dd", 7), ("dc", 30), ("da", 12), ("dx", 3)))
    b.op("loss", BACKWARD, [d], [dd])
    b.op("bd", BACKWARD, [dd, c], [dc])
    b.op("bc", BACKWARD, [dc, a], [da])
    b.op("ba", BACKWARD, [da, mask, x], [dx])
    return b.problem()


def least_seconds(problem: Problem, *, only_forward: bool = True) -> float | None:
    """The fewest seconds of any legal list of Compute and Free on the device, by search over what is there and how far the program is."""
    graph = problem.graph
    capacity = problem.budget_bytes - sum(s.nbytes for s in graph.storages if s.lasting)
    size = [0 if s.lasting else s.nbytes for s in graph.storages]
    start = (0, frozenset(s.id for s in graph.storages if s.role is Role.INPUT))
    if sum(size[s] for s in start[1]) > capacity:
        return None
    best, ties = {start: 0.0}, count()
    heap = [(0.0, next(ties), start)]
    while heap:
        seconds, _, (done, here) = heapq.heappop(heap)
        if seconds > best[done, here]:
            continue
        if done == len(graph.ops):
            return seconds
        moves = [(seconds, (done, here - {storage})) for storage in here]
        for op in graph.ops[: done + 1]:
            there = here | {s.id for s in graph.storages if s.lasting}
            if may_run(graph, op, done, only_forward) and there.issuperset(op.reads + op.mutates):
                after, peak = after_running(graph, op, here, size)
                if peak <= capacity:
                    moves.append((seconds + problem.device_seconds[op.id], (done + (op.id == done), after)))
        for reached, state in moves:
            if reached < best.get(state, float("inf")):
                best[state] = reached
                heapq.heappush(heap, (reached, next(ties), state))
    return None


def may_run(graph: Graph, op: Op, done: int, only_forward: bool) -> bool:
    if op.id == done:
        return True
    if op.mutates or not op.replayable or (only_forward and op.phase is not Phase.FORWARD):
        return False
    written_since = {s for later in graph.ops[op.id + 1 : done] for s in later.writes + later.mutates}
    return written_since.isdisjoint(op.reads + op.writes)


def after_running(graph: Graph, op: Op, here: frozenset[int], size: list[int]) -> tuple[frozenset[int], int]:
    level = peak = sum(size[s] for s in here)
    scratch, now = op.workspace_bytes, set(here)
    taken_over = {new: old for old, new in op.in_place}
    for made in (s for s in op.writes if not graph.storages[s].lasting):
        if made in taken_over:
            level -= size[taken_over[made]]
            now.discard(taken_over[made])
        if made not in here:
            level += size[made]
        elif made not in taken_over:
            scratch += size[made]
        now.add(made)
        peak = max(peak, level)
    return frozenset(now), max(peak, level + scratch)


@pytest.mark.parametrize(
    "problem",
    [chain(3), chain(4), chain(4, cyclic=False), chain(3, weight_bytes=4), skip_over_two(), uneven(), awkward(), masters()],
    ids=["chain3", "chain4", "cold", "weights", "skip", "uneven", "awkward", "masters"],
)
def test_no_schedule_is_faster(problem):
    """At every budget from all it could use down to one below the least: as fast as brute force, or infeasible like it."""
    budget = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    tried = 0
    while True:
        asked = problem.with_budget(budget)
        best = least_seconds(asked)
        if best is None:
            with pytest.raises(InfeasibleBudget) as refused:
                plan(asked, "checkmate")
            assert refused.value.least_bytes is None or refused.value.least_bytes > budget
            break
        schedule = plan(asked, "checkmate")
        assert device_seconds(asked, schedule) == pytest.approx(best, abs=1e-9)
        tried += 1
        budget = peak_bytes(asked, schedule)["hbm"] - 1
    assert tried >= 2


def test_the_solver_alone_finds_it_too(monkeypatch):
    """Without a first answer to beat."""
    monkeypatch.setattr("tierwise.policies._stages.evict_in_order", lambda *given: None)
    for problem, budget in ((chain(4), 40), (skip_over_two(), 78), (uneven(), 70), (awkward(), 50)):
        asked = problem.with_budget(budget)
        assert device_seconds(asked, plan(asked, "checkmate")) == pytest.approx(least_seconds(asked))


def test_one_byte_too_few_costs_one_recomputation():
    # Everything takes 60: batch, a0 to a3 and d3 at the loss. One activation must go, and one op brings it back.
    problem = chain(4).with_budget(59)
    schedule = plan(problem, "checkmate")
    assert len(recomputed(problem, schedule)) == 1
    assert device_seconds(problem, schedule) == 10


def test_the_smallest_chain():
    # Four slots, of which the batch keeps one: a2 is kept for bwd3, a1 is made from the batch for bwd2, a0 for bwd1.
    problem = chain(4).with_budget(40)
    schedule = plan(problem, "checkmate")
    assert recomputed(problem, schedule) == ["fwd0", "fwd1", "fwd0"]
    with pytest.raises(InfeasibleBudget) as refused:
        plan(problem.with_budget(39), "checkmate")
    assert refused.value.least_bytes == 40


def test_with_room_for_everything_nothing_is_recomputed():
    problem = chain(30).with_budget(320)  # batch, thirty activations and a gradient
    assert plan(problem, "checkmate") == keep_all.plan(problem)


def test_backward_ops_run_again_only_if_asked():
    # Three weights of 4 and their gradients: 59 holds no forward-only plan, but a gradient can be thrown away and made again.
    problem = chain(3, weight_bytes=4).with_budget(59)
    with pytest.raises(InfeasibleBudget):
        plan(problem, "checkmate")
    schedule = plan(problem, "checkmate", recompute_backward=True)
    assert any(name.startswith("bwd") for name in recomputed(problem, schedule))
    assert device_seconds(problem, schedule) == least_seconds(problem, only_forward=False)


def test_rounding_fits_and_stays_near_the_best():
    for budget in (90, 70, 60):
        problem = chain(10).with_budget(budget)
        best = device_seconds(problem, plan(problem, "checkmate", solver="exact"))
        rounded = plan(problem, "checkmate", solver="rounding")
        assert best <= device_seconds(problem, rounded) <= 1.1 * best


def test_a_large_step_is_planned_in_nodes():
    problem = chain(300).with_budget(1500)  # half of what everything takes
    schedule = plan(problem, "checkmate", max_nodes=40)
    assert device_seconds(problem, schedule) <= 1.3 * 601  # half the activations, each made again once: 1.25


def test_an_unknown_solver_is_refused():
    with pytest.raises(BadInput, match="auto, exact, rounding"):
        plan(chain(3), "checkmate", solver="gurobi")


# -- nodes ------------------------------------------------------------------------------------------------------------------------------


def test_few_ops_are_nodes_of_their_own():
    assert runs_of(chain(3), 7) == [range(k, k + 1) for k in range(7)]


def test_nodes_are_cut_at_region_calls_and_phases_first():
    graph = chain(4, weight_bytes=1).graph  # fwd0-3, loss, bwd3-0, step0-3
    region = [0, 0, 1, 1, 1, 1, 1, 0, 0, -1, -1, -1, -1]
    ops = tuple(Op(op.id, op.name, op.phase, op.reads, op.writes, region=region[op.id], mutates=op.mutates) for op in graph.ops)
    calls = (RegionCall(0, 0, "first"), RegionCall(1, 0, "second"))
    problem = Problem(Graph(ops, graph.storages, (Region(0, "pair", "first"),), calls), chain().machine, chain(4, weight_bytes=1).costs)
    assert runs_of(problem, 5) == [range(0, 2), range(2, 4), range(4, 7), range(7, 9), range(9, 13)]
    # With room for more the longest run is halved; the updates run once whatever happens, so they stay together.
    assert runs_of(problem, 6) == [range(0, 2), range(2, 4), range(4, 6), range(6, 7), range(7, 9), range(9, 13)]
    assert runs_of(problem, 3) == [range(0, 4), range(4, 9), range(9, 13)]


def test_a_node_counts_bytes_as_the_judge_does():
    # relu_ takes over a; norm's op changes a buffer. One node of conv, relu_ and norm holds a, then r in its place, then mean as well.
    problem = awkward()
    nodes = Nodes(problem, [range(0, 3), *(range(k, k + 1) for k in range(3, 9))])
    first = nodes.nodes[0]
    assert [stretch.peak for stretch in first.stretches] == [10, 12]  # x may go behind conv, r and mean behind norm
    assert first.grows == 12
    assert first.again_until == 0  # the buffer is overwritten: the node runs once


def test_a_second_run_nobody_reads_is_left_out():
    problem = chain(2)  # fwd0 fwd1 loss bwd1 bwd0
    schedule = schedule_of(problem, [0, 1, 0, 2, 0, 3, 4])
    assert list(schedule_lines(problem.graph, schedule)) == [
        "compute fwd0", "compute fwd1", "free a0 hbm", "compute loss", "free a1 hbm", "recompute fwd0", "compute bwd1", "free a0 hbm", "free d1 hbm",
        "compute bwd0", "free batch hbm", "free d0 hbm",
    ]  # fmt: skip
    check_schedule(problem, schedule)
