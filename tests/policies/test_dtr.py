from __future__ import annotations

import random

import numpy as np
import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, chain, machine

from tierwise.errors import InfeasibleBudget, RecomputeLimit, UnknownName
from tierwise.ir import Compute, Role, check_schedule, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import dtr, keep_all, plan
from tierwise.policies._evict import lowest
from tierwise.simulate import simulate


def recomputed(problem, schedule) -> list[str]:
    seen: set[int] = set()
    again = []
    for step in schedule.steps:
        if isinstance(step, Compute):
            if step.op in seen:
                again.append(problem.graph.ops[step.op].name)
            seen.add(step.op)
    return again


def three_storages(*, from_t: bool = False, with_sibling: bool = False, p_seconds: float = 8, q_bytes: int = 5):
    """p, q and r lie idle when `big` asks for two bytes more than there are; each is read once later.

    p: 20 bytes, idle for 9 s. q: 1 s to make, idle for 8 s. r: 5 s to make, 30 bytes, idle for 3 s.
    from_t: q is made from t (3 s), which the program has let go by then. with_sibling: so has it w (4 s), made from t too.
    """
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    t, w = b.storage("t", 1, Role.ACTIVATION), b.storage("w", 1, Role.ACTIVATION)
    p, q, r = (b.storage(n, z, Role.ACTIVATION) for n, z in (("p", 20), ("q", q_bytes), ("r", 30)))
    big = b.storage("big", 2, Role.ACTIVATION)
    if from_t:
        b.op("make_t", FORWARD, [x], [t], seconds=3)
    if with_sibling:
        b.op("make_w", FORWARD, [t], [w], seconds=4)
    b.op("make_p", FORWARD, [x], [p], seconds=p_seconds)
    b.op("make_q", FORWARD, [t if from_t else x], [q], seconds=1)
    b.op("make_r", FORWARD, [x], [r], seconds=5)
    b.op("wait", FORWARD, [x], [], seconds=3)
    b.op("make_big", FORWARD, [x], [big])
    for storage in (big, p, q, r):
        b.op(f"use_{b.storages[storage].name}", BACKWARD, [storage], [])
    everything = 1 + 20 + q_bytes + 30 + 2
    return b.problem(machine(hbm=everything - 1), cyclic=False)


@pytest.mark.parametrize(
    ("heuristic", "evicted"),
    [
        ("h_local", "make_q"),  # 8/(20·9) = 0.044, 1/(5·8) = 0.025, 5/(30·3) = 0.056
        ("lru", "make_p"),  # made first
        ("msps", "make_r"),  # 8/20 = 0.4, 1/5 = 0.2, 5/30 = 0.17
        ("h_dtr", "make_q"),  # nothing is evicted yet: as h_local
        ("h_eq", "make_q"),
    ],
)
def test_whom_each_heuristic_evicts(heuristic, evicted):
    problem = three_storages()
    schedule = plan(problem, "dtr", heuristic=heuristic)
    assert recomputed(problem, schedule) == [evicted]
    name = evicted.removeprefix("make_")
    lines = list(schedule_lines(problem.graph, schedule))
    assert lines.index(f"free {name} hbm") + 1 == lines.index("compute make_big")
    assert lines.index(f"recompute {evicted}") + 1 == lines.index(f"compute use_{name}")


def test_h_dtr_counts_what_the_program_has_let_go_and_would_have_to_be_made_again():
    problem = three_storages(from_t=True)
    # q now costs 1 + 3 of t: 4/(5·8) = 0.1, more than p's 0.044; alone it is still the cheapest.
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_dtr")) == ["make_p"]
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_eq")) == ["make_p"]
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_local")) == ["make_t", "make_q"]
    assert recomputed(problem, plan(problem, "dtr", heuristic="msps")) == ["make_r"]  # q 4/5, p 8/20, r 5/30


def test_h_eq_counts_its_whole_group():
    problem = three_storages(from_t=True, with_sibling=True, p_seconds=12, q_bytes=10)
    # p 12/(20·9) = 0.067, r 5/(30·3) = 0.056; q is made from t: (1 + 3)/(10·8) = 0.05. Its group has w as well: (1 + 3 + 4)/80 = 0.1.
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_dtr")) == ["make_t", "make_q"]
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_eq")) == ["make_r"]


def test_what_an_op_waits_for_is_worth_the_op():
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    r, s, p1, p2 = (b.storage(n, 10, Role.ACTIVATION) for n in ("r", "s", "p1", "p2"))
    big, t = b.storage("big", 25, Role.ACTIVATION), b.storage("t", 20, Role.ACTIVATION)
    b.op("make_r", FORWARD, [x], [r], seconds=1)
    b.op("make_s", FORWARD, [x], [s], seconds=5)
    b.op("make_p1", FORWARD, [x], [p1], seconds=0.1, workspace_bytes=10)
    b.op("make_p2", FORWARD, [r], [p2], seconds=0.1)
    b.op("wait", FORWARD, [x], [], seconds=10)
    b.op("make_big", FORWARD, [x], [big])  # p1 and p2 go
    b.op("use_big", FORWARD, [big], [])
    b.op("make_t", FORWARD, [x], [t], replayable=False)
    z = b.storage("z", 0, Role.ACTIVATION)
    b.op("make_z", BACKWARD, [p1, p2], [z], seconds=20)
    b.op("use_all", BACKWARD, [r, s, t], [])
    problem = b.problem(machine(hbm=51), cyclic=False)
    # To run make_p1 again, r or s must go: 1.1 s with p2 against 5 s. But make_z waits for p2, so r is worth 21.1 s.
    assert recomputed(problem, plan(problem, "dtr")) == ["make_p1", "make_p2", "make_s"]
    assert recomputed(problem, plan(problem, "dtr", heuristic="h_local")) == ["make_p1", "make_r", "make_p2", "make_s"]


def test_the_step_takes_longer_by_what_is_recomputed():
    problem = three_storages()
    assert simulate(problem, plan(problem, "dtr")).seconds == 8 + 1 + 5 + 3 + 1 + 4 + 1  # q a second time
    assert simulate(problem, plan(problem, "dtr", heuristic="lru")).seconds == 22 + 8


def test_with_room_for_everything_nothing_is_done():
    problem = chain(6, weight_bytes=3)
    assert plan(problem, "dtr") == keep_all.plan(problem)


def test_the_lowest_score():
    assert lowest(np.array([3.0, 1.0, 2.0])) == 1
    assert lowest(np.array([3.0, 1.0, 1.0])) == 2  # the latest to become evictable
    assert lowest(np.array([np.inf, np.inf])) == 1
    assert lowest(np.array([3.0, 0.0, 0.0])) == 1  # a score of 0 ends the search
    assert lowest(np.array([-1.0, 0.0, -5.0])) == 0


def test_all_outputs_are_made_again_and_those_still_here_twice():
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    y, z, big = b.storage("y", 10, Role.ACTIVATION), b.storage("z", 3, Role.ACTIVATION), b.storage("big", 6, Role.ACTIVATION)
    b.op("pair", FORWARD, [x], [y, z])
    b.op("make_big", FORWARD, [x], [big])
    b.op("use_big", BACKWARD, [big], [])
    b.op("use_both", BACKWARD, [z, y], [])
    problem = b.problem(machine(hbm=17), cyclic=False)
    schedule = plan(problem, "dtr")
    # y goes for big. Running pair again takes 13 bytes for a moment, beside x and the z that is here: 17.
    assert recomputed(problem, schedule) == ["pair"]
    assert peak_bytes(problem, schedule)["hbm"] == 17
    with pytest.raises(InfeasibleBudget, match=r"below 17 B"):
        plan(problem.with_budget(16), "dtr")


def test_what_an_update_would_spoil_is_brought_back_before_it():
    b = GraphBuilder()
    x, w = b.storage("x", 1, Role.INPUT), b.storage("w", 1, Role.PARAM)
    a, c = b.storage("a", 20, Role.ACTIVATION), b.storage("c", 20, Role.ACTIVATION)
    b.op("make_a", FORWARD, [x, w], [a])
    b.op("make_c", FORWARD, [x], [c])
    b.op("use_c", BACKWARD, [c], [])
    b.op("step", UPDATE, [x], [], mutates=(w,))
    b.op("use_a", UPDATE, [a], [])
    problem = b.problem(machine(hbm=41))
    assert list(schedule_lines(problem.graph, plan(problem, "dtr"))) == [
        "compute make_a", "free a hbm", "compute make_c", "compute use_c", "free c hbm",
        "recompute make_a", "compute step", "free x hbm", "compute use_a", "free a hbm",
    ]  # fmt: skip


def test_gradients_wait_for_their_update():
    b = GraphBuilder()
    x, w = b.storage("x", 1, Role.INPUT), b.storage("w", 1, Role.PARAM)
    g, a, c = b.storage("g", 20, Role.GRAD), b.storage("a", 10, Role.ACTIVATION), b.storage("c", 10, Role.ACTIVATION)
    b.op("make_g", BACKWARD, [x, w], [g])
    b.op("make_a", BACKWARD, [x], [a], seconds=5)
    b.op("make_c", BACKWARD, [x], [c])
    b.op("use_c", BACKWARD, [c], [])
    b.op("use_a", BACKWARD, [a], [])
    b.op("step", UPDATE, [g], [], mutates=(w,))
    problem = b.problem(machine(hbm=41))
    assert recomputed(problem, plan(problem, "dtr")) == ["make_a"]  # though g is twice as large, older and cheaper
    assert recomputed(problem, plan(problem, "dtr", evict_gradients=True)) == ["make_g"]


def test_an_op_in_place_runs_again_on_what_it_took_over():
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    a, r, c = (b.storage(n, 10, Role.ACTIVATION) for n in ("a", "r", "c"))
    b.op("conv", FORWARD, [x], [a])
    b.op("relu_", FORWARD, [a], [r], in_place=((a, r),))
    b.op("make_c", FORWARD, [x], [c])
    b.op("use_c", BACKWARD, [c], [])
    b.op("use_r", BACKWARD, [r], [])
    problem = b.problem(machine(hbm=20))
    schedule = plan(problem, "dtr")
    assert recomputed(problem, schedule) == ["conv", "relu_"]
    assert peak_bytes(problem, schedule)["hbm"] == 11  # never two of the three at once


def test_what_cannot_be_made_again_is_not_evicted():
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    drop, a, c = (b.storage(n, 10, Role.ACTIVATION) for n in ("drop", "a", "c"))
    b.op("dropout", FORWARD, [x], [drop], seconds=0.001, replayable=False)
    b.op("make_a", FORWARD, [drop], [a], seconds=100)
    b.op("make_c", FORWARD, [x], [c])
    b.op("use_c", BACKWARD, [c], [])
    b.op("use_a", BACKWARD, [a, drop], [])
    problem = b.problem(machine(hbm=30), cyclic=False)
    assert recomputed(problem, plan(problem, "dtr", recompute_limit=2)) == ["make_a"]  # dropout's output is far cheaper and stays


def test_the_output_of_an_op_that_cannot_run_again_is_given_back_once_nothing_is_gained_by_keeping_it():
    b = GraphBuilder()
    x = b.storage("x", 1, Role.INPUT)
    drop, a, c = (b.storage(n, 10, Role.ACTIVATION) for n in ("drop", "a", "c"))
    b.op("dropout", FORWARD, [x], [drop], replayable=False)
    b.op("relu", FORWARD, [drop], [a])
    b.op("make_c", FORWARD, [x], [c])
    b.op("use", BACKWARD, [a, c], [])
    problem = b.problem(machine(hbm=21), cyclic=False)
    # drop could stay so that a can be evicted, and takes as much: it goes, and a stays.
    schedule = dtr.plan(problem, released_after={0: 3, 1: 1, 2: 3, 3: 3})
    assert recomputed(problem, schedule) == []
    assert peak_bytes(problem, schedule)["hbm"] == 21


def test_nothing_to_evict_is_said():
    problem = chain(4, activation_bytes=10)
    with pytest.raises(InfeasibleBudget, match=r"fwd1 needs 10 B beside the 20 B of what .* the budget is 25 B"):
        dtr.plan(problem.with_budget(25))
    with pytest.raises(InfeasibleBudget, match=r"budget 25 B is below 40 B, the smallest dtr can do"):  # batch, two gradients and an activation
        plan(problem.with_budget(25), "dtr")


def test_too_much_recomputation_is_refused():
    problem = three_storages()
    with pytest.raises(RecomputeLimit, match=r"within 57 B recomputation takes more than 0.3 times the step's own 22"):
        dtr.plan(problem, heuristic="lru", recompute_limit=0.3)  # 8 of 22 s
    dtr.plan(problem, heuristic="lru", recompute_limit=0.4)


def test_an_unknown_heuristic_names_the_nearest():
    with pytest.raises(UnknownName, match=r"unknown heuristic 'h_dtrr'; did you mean 'h_dtr'\?"):
        plan(chain(4), "dtr", heuristic="h_dtrr")


class _WalksEverywhere(dtr._Scored):
    """h_dtr as it is defined: every neighbourhood walked anew for every choice."""

    def ticks(self, pool):
        return np.array([self._all_around(storage) for storage in pool.tolist()])

    def _all_around(self, start):
        total = int(self.replay.ticks[start])
        for edges in (self.replay.made_from, self.replay.made_into):
            seen, todo = {start}, [start]
            while todo:
                for storage in edges[todo.pop()]:
                    if storage not in seen and self.replay.gone[storage]:
                        seen.add(storage)
                        todo.append(storage)
                        total += int(self.replay.ticks[storage])
        return total


@pytest.mark.parametrize("seed", range(6))
def test_bounds_choose_as_full_walks_do(seed, monkeypatch):
    problem = residual_net(random.Random(seed), layers=25)
    whole = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    for share in (0.8, 0.65, 0.5):
        tight = problem.with_budget(int(whole * share))
        quick = outcome(tight)
        monkeypatch.setitem(dtr.HEURISTICS, "h_dtr", _WalksEverywhere)
        assert outcome(tight) == quick
        monkeypatch.undo()


def outcome(problem):
    try:
        schedule = dtr.plan(problem, recompute_limit=10)
    except InfeasibleBudget as error:
        return str(error)
    check_schedule(problem, schedule)
    return schedule


def residual_net(draw: random.Random, layers: int):
    b = GraphBuilder()
    acts = [b.storage("x", 4, Role.INPUT)]
    made = []
    for i in range(layers):
        inputs = sorted({acts[-1], draw.choice(acts[-4:])})
        acts.append(b.storage(f"a{i}", draw.choice((20, 40, 80)), Role.ACTIVATION))
        b.op(f"f{i}", FORWARD, inputs, [acts[-1]], seconds=draw.choice((0.0, 0.5, 1.0, 3.0)))
        made.append(inputs)
    grads = {acts[-1]: b.storage("d", 20, Role.ACTIVATION)}
    b.op("loss", BACKWARD, [acts[-1]], [grads[acts[-1]]])
    for i in reversed(range(layers)):
        for source in made[i]:
            part = b.storage(f"d{i}_{source}", b.storages[source].nbytes, Role.ACTIVATION)
            b.op(f"b{i}_{source}", BACKWARD, [grads[acts[i + 1]], source], [part], seconds=draw.choice((0.5, 2.0)))
            if source in grads:
                total = b.storage(f"s{i}_{source}", b.storages[source].nbytes, Role.ACTIVATION)
                b.op(f"add{i}_{source}", BACKWARD, [grads[source], part], [total], seconds=0.25)
                part = total
            grads[source] = part
    return b.problem(machine(), cyclic=False)
