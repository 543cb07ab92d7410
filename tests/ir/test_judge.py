"""Each rule of the judge, by a schedule that breaks it."""

from __future__ import annotations

import dataclasses

import pytest
from problems import BACKWARD, FORWARD, UPDATE, GraphBuilder, awkward, chain, machine, masters, skip

from tierwise.errors import InvalidGraph, InvalidSchedule, OverCapacity
from tierwise.ir import Compute, Copy, Free, Link, Machine, Op, Processor, Role, Schedule, Storage, Tier, check_graph, check_schedule, peak_bytes
from tierwise.policies import keep_all, zero_offload

# chain(2): storages 0 batch, 1 a0, 2 a1, 3 d1, 4 d0; ops 0 fwd0, 1 fwd1, 2 loss, 3 bwd1, 4 bwd0
BATCH, A0, A1, D1, D0 = range(5)
LEGAL = (
    Compute(0), Compute(1), Compute(2), Free(A1, "hbm"), Compute(3), Free(A0, "hbm"), Free(D1, "hbm"),
    Compute(4), Free(BATCH, "hbm"), Free(D0, "hbm"),
)  # fmt: skip


def judge(steps, *, problem=None, home=None, addresses=None) -> None:
    check_schedule(problem or chain(2), Schedule(tuple(steps), home or {BATCH: ("hbm",)}, addresses or {}))


def refused(steps, match: str, **more) -> InvalidSchedule:
    with pytest.raises(InvalidSchedule, match=match) as caught:
        judge(steps, **more)
    return caught.value


def test_a_legal_schedule_passes():
    judge(LEGAL)


def test_read_before_write():
    error = refused([Compute(1), *LEGAL], r"fwd1 reads a0 \(10 B\) before it is written")
    assert error.step == 0


def test_read_after_free():
    error = refused([Compute(0), Compute(1), Free(A0, "hbm"), *LEGAL[2:5], *LEGAL[6:]], r"bwd1 reads a0 \(10 B\) after it was freed")
    assert error.step == 5


def test_copy_of_something_not_there():
    refused([Copy(A0, "hbm", "dram"), *LEGAL], "copy of a0 .* from hbm, where it is not")


def test_copy_to_where_it_is():
    steps = [Compute(0), Copy(A0, "hbm", "dram"), Copy(A0, "dram", "hbm"), *LEGAL[1:]]
    refused(steps, "copy of a0 .* to hbm, where it already is")


def test_free_of_something_not_there():
    refused([Free(A0, "hbm"), *LEGAL], "free of a0 .* in hbm, where it is not")


def test_recomputation_needs_its_inputs():
    steps = [Compute(0), Compute(1), Free(A0, "hbm"), Free(BATCH, "hbm"), *LEGAL[2:4], Compute(0)]
    refused(steps, "fwd0 reads batch .* after it was freed")


def test_recomputation_after_the_update_overwrote_the_weight():
    # w0 is overwritten by step0; running fwd0 again would use the new weight.
    problem = chain(2, weight_bytes=5)
    legal = keep_all.plan(problem)
    batch_freed = legal.steps.index(Free(0, "hbm"))
    late = [*legal.steps[:batch_freed], *legal.steps[batch_freed + 1 :], Compute(0), Free(3, "hbm"), Free(0, "hbm")]
    refused(late, r"fwd0 needs w0 \(5 B\) as it was after write 0, but in hbm it is as after write 1: it was overwritten since",
            problem=problem, home=legal.home)  # fmt: skip


def test_update_before_the_last_reader_of_the_weight():
    problem = chain(2, weight_bytes=5)
    legal = keep_all.plan(problem)
    ops = {op.name: op.id for op in problem.graph.ops}
    steps = list(legal.steps)
    bwd0, step1 = steps.index(Compute(ops["bwd0"])), steps.index(Compute(ops["step1"]))
    steps.insert(bwd0, steps.pop(step1))
    check_schedule(problem, dataclasses.replace(legal, steps=tuple(steps)))  # bwd0 does not read w1: the order is free here
    steps = list(legal.steps)
    steps.insert(steps.index(Compute(ops["bwd1"])) + 1, Compute(ops["bwd1"]))
    check_schedule(problem, dataclasses.replace(legal, steps=tuple(steps)))  # a second bwd1 makes its outputs twice, which is allowed


def test_an_op_that_mutates_runs_once():
    problem = chain(1, weight_bytes=5)
    legal = keep_all.plan(problem)
    steps = list(legal.steps)
    update = Compute(len(problem.graph.ops) - 1)
    steps.insert(steps.index(update), update)
    refused(steps, "step0 runs a second time, but it overwrites w0", problem=problem, home=legal.home)


def test_an_op_that_cannot_be_replayed_runs_once():
    problem = awkward()
    legal = keep_all.plan(problem)
    dropout = next(op.id for op in problem.graph.ops if op.name == "dropout")
    steps = list(legal.steps)
    steps.insert(steps.index(Compute(dropout)), Compute(dropout))
    refused(steps, "dropout runs a second time, but it cannot be replayed", problem=problem, home=legal.home)


def test_in_place_takes_the_bytes_over():
    problem = awkward()
    legal = keep_all.plan(problem)
    a = next(s.id for s in problem.graph.storages if s.name == "a")
    assert Free(a, "hbm") not in legal.steps  # relu_ took its bytes
    relu = next(op.id for op in problem.graph.ops if op.name == "relu_")
    steps = list(legal.steps)
    steps.insert(steps.index(Compute(relu)) + 1, Copy(a, "hbm", "dram"))
    refused(steps, "copy of a .* from hbm, where it is not", problem=problem, home=legal.home)


def test_processor_on_a_tier_it_cannot_reach():
    problem = chain(1, weight_bytes=5, cpu_update_seconds=1)
    legal = keep_all.plan(problem)
    steps = [dataclasses.replace(s, on="cpu") if isinstance(s, Compute) and s.op == 3 else s for s in legal.steps]
    refused(steps, r"step0 runs on cpu and reads g0 \(5 B\), which is in hbm, not in dram", problem=problem, home=legal.home)


def test_op_without_a_cost_there_cannot_run_there():
    refused([Compute(0, "cpu"), *LEGAL], "fwd0 has no cost on cpu")


def test_unknown_names():
    refused([Compute(99), *LEGAL], "there is no op 99; the graph has 5")
    refused([Compute(0, "tpu"), *LEGAL], "fwd0 runs on 'tpu'; the machine has gpu, cpu")
    refused([Copy(77, "hbm", "dram"), *LEGAL], "there is no storage 77")
    refused([Copy(BATCH, "hbm", "moon"), *LEGAL], "no link from 'hbm' to 'moon'")
    refused(LEGAL, "the home of batch .* is 'moon'", home={BATCH: ("moon",)})
    refused(LEGAL, "batch .* has no home", home={7: ("hbm",)})
    refused([Compute(0, iteration=-2), *LEGAL], "iteration -2")


def test_every_op_runs():
    refused(LEGAL[:7] + LEGAL[8:], "bwd0 is never computed")


def test_lasting_storages_come_home():
    problem = chain(1, weight_bytes=5)
    legal = keep_all.plan(problem)
    w0 = 1
    refused([*legal.steps, Free(w0, "hbm")], r"w0 \(5 B\) is not home in hbm at the end", problem=problem, home=legal.home)
    refused([*legal.steps, Copy(w0, "hbm", "dram")], "w0 .* is still in dram at the end, away from home", problem=problem, home=legal.home)
    both = {**legal.home, w0: ("hbm", "dram")}
    refused(legal.steps, "w0 .* is home in dram at the end, but out of date", problem=problem, home=both)
    judge([*legal.steps, Copy(w0, "hbm", "dram")], problem=problem, home=both)  # onto the old version there


def test_nothing_piles_up_over_the_steps():
    refused(LEGAL[:-1], r"d0 \(10 B\) of an earlier step is still in hbm: every step would leave more behind")


def test_what_the_next_period_picks_up_may_stay():
    judge([Free(D0, "hbm", iteration=-1), *LEGAL[:-1]])


def test_a_cold_step_has_no_step_before():
    cold = dataclasses.replace(chain(2), cyclic=False)
    refused([Free(D0, "hbm", iteration=-1), *LEGAL[:-1]], "no step before it", problem=cold)
    judge(LEGAL[:-1], problem=cold)


def test_capacity_in_list_order():
    # At the loss: batch, a0, a1 and d1, ten bytes each; again at bwd1: batch, a0, d1 and d0.
    tight = chain(2, on=machine(hbm=40))
    judge(LEGAL, problem=tight)
    with pytest.raises(OverCapacity, match="hbm needs 40 B and has 39 B; it first overflows at step 2, loss") as caught:
        judge(LEGAL, problem=chain(2, on=machine(hbm=39)))
    assert (caught.value.tier, caught.value.needed_bytes) == ("hbm", 40)


def test_a_free_after_a_copy_counts_at_its_place_in_the_list():
    # Fetching a0 back before the loss holds it together with batch, a1 and d1.
    steps = [
        Compute(0),
        Compute(1),
        Copy(A0, "hbm", "dram"),
        Free(A0, "hbm"),
        Compute(2),
        Free(A1, "hbm"),
        Copy(A0, "dram", "hbm"),
        Free(A0, "dram"),
        *LEGAL[4:],
    ]
    assert peak_bytes(chain(2), Schedule(tuple(steps), {BATCH: ("hbm",)})) == {"hbm": 40, "dram": 10, "nvme": 0}


def test_workspace_counts_while_its_op_runs():
    problem = chain(2)
    ops = tuple(dataclasses.replace(op, workspace_bytes=25) if op.name == "fwd0" else op for op in problem.graph.ops)
    problem = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph, ops=ops))
    assert peak_bytes(problem, Schedule(LEGAL, {BATCH: ("hbm",)}))["hbm"] == 45  # batch, a0 and 25


def test_a_second_copy_of_a_recomputed_output_is_scratch():
    steps = [*LEGAL[:2], Compute(1), *LEGAL[2:]]  # batch, a0, a1 and a1 again
    assert peak_bytes(chain(2), Schedule(tuple(steps), {BATCH: ("hbm",)}))["hbm"] == 40
    steps = [*LEGAL[:3], Compute(1), *LEGAL[3:]]  # batch, a0, a1, d1 and a1 again
    assert peak_bytes(chain(2), Schedule(tuple(steps), {BATCH: ("hbm",)}))["hbm"] == 50


def test_staging_is_held_all_step():
    toy = machine()
    links = tuple(dataclasses.replace(link, staging_tier="dram", staging_bytes=7) if "nvme" in (link.src, link.dst) else link for link in toy.links)
    problem = chain(2, on=dataclasses.replace(toy, links=links))
    away = [Compute(0), Compute(1), Copy(A0, "hbm", "nvme"), Free(A0, "hbm"), Compute(2), Copy(A0, "nvme", "hbm"), Free(A0, "nvme"), *LEGAL[3:]]
    home = {BATCH: ("hbm",)}
    assert peak_bytes(problem, Schedule(LEGAL, home))["dram"] == 0
    assert peak_bytes(problem, Schedule(tuple(away), home))["dram"] == 14  # one buffer for each of the two links it uses


def test_a_tier_within_another_counts_in_both():
    on = Machine(
        "toy",
        (Tier("hbm", 1000), Tier("dram", 1000), Tier("pinned", 5, within="dram")),
        (Link("hbm", "pinned", {"out": 10}), Link("pinned", "hbm", {"in": 10})),
        (Processor("gpu", "hbm"), Processor("cpu", "dram")),
    )
    steps = [Compute(0), Copy(A0, "hbm", "pinned"), Free(A0, "pinned"), *LEGAL[1:]]
    assert peak_bytes(chain(2, on=on), Schedule(tuple(steps), {BATCH: ("hbm",)}))["dram"] == 10
    with pytest.raises(OverCapacity, match="pinned needs 10 B and has 5 B"):
        judge(steps, problem=chain(2, on=on))


def test_the_cpu_reaches_tiers_within_its_own():
    on = Machine(
        "toy",
        (Tier("hbm", 1000), Tier("dram", 1000), Tier("pinned", 1000, within="dram")),
        (Link("hbm", "pinned", {"out": 10}), Link("pinned", "hbm", {"in": 10}), Link("dram", "hbm", {"in": 10})),
        (Processor("gpu", "hbm"), Processor("cpu", "dram")),
    )
    problem = chain(2, weight_bytes=5, cpu_update_seconds=1, on=on)
    schedule = zero_offload.plan(problem, tier="pinned")
    check_schedule(problem, schedule)


def test_addresses():
    home, cold = {BATCH: ("hbm",)}, dataclasses.replace(chain(2, on=machine(hbm=40)), cyclic=False)
    good = {(-1, BATCH): 0, (0, A0): 10, (1, A1): 20, (2, D1): 30, (4, D0): 20}
    judge(LEGAL, problem=cold, home=home, addresses=good)
    refused(LEGAL, r"a1 \(10 B\) has no address", problem=cold, addresses={k: v for k, v in good.items() if k != (1, A1)})
    refused(LEGAL, "a0 .* at addresses 5 to 15 overlaps the live range 0 to 10", problem=cold, addresses=good | {(0, A0): 5})
    refused(LEGAL, "d0 .* at address 35 ends at 45, outside hbm", problem=cold, addresses=good | {(4, D0): 35})


def test_addresses_are_the_same_after_every_step():
    problem = chain(1, weight_bytes=5, on=machine(hbm=100))
    legal = keep_all.plan(problem)
    batch, w0, a0, d0, g0 = range(5)
    addresses = {(-1, batch): 0, (-1, w0): 10, (0, a0): 20, (1, d0): 30, (3, g0): 50}
    moved = (*legal.steps, Copy(w0, "hbm", "dram"), Free(w0, "hbm"), Copy(w0, "dram", "hbm"), Free(w0, "dram"))
    back = len(legal.steps) + 2
    judge(moved, problem=problem, home=legal.home, addresses=addresses | {(back, w0): 10})
    refused(
        moved,
        "w0 .* is at address 70 in hbm at the end, not at 10 where the step begins",
        problem=problem,
        home=legal.home,
        addresses=addresses | {(back, w0): 70},
    )


def test_a_parameter_overwritten_without_being_read():
    problem = masters()
    check_schedule(problem, keep_all.plan(problem))
    check_schedule(problem, zero_offload.plan(problem))


def test_a_stale_copy_cannot_be_copied():
    problem = chain(1, weight_bytes=5)
    legal = keep_all.plan(problem)
    steps = [Copy(1, "hbm", "dram"), *legal.steps, Copy(1, "dram", "nvme")]
    refused(steps, "copy of w0 .* from dram, where it is out of date", problem=problem, home=legal.home)


def storage(identity: int, role: Role = Role.ACTIVATION, *, lasting: bool = False, nbytes: int = 1) -> Storage:
    return Storage(identity, f"s{identity}", nbytes, role, lasting)


@pytest.mark.parametrize(
    ("ops", "storages", "match"),
    [
        ([Op(1, "f", FORWARD, (), ())], [], "op f has id 1 and stands at place 0"),
        ([], [storage(3)], "storage s3 has id 3 and stands at place 0"),
        ([], [storage(0, nbytes=-1)], "has -1 bytes"),
        ([], [storage(0, Role.PARAM)], "is a param and must be lasting"),
        ([], [storage(0, Role.INPUT, lasting=True)], "cannot be lasting"),
        ([Op(0, "f", FORWARD, (4,), ())], [storage(0)], "op f touches storage 4; there are 1"),
        ([Op(0, "f", FORWARD, (0,), ())], [storage(0)], "op f reads s0 before any op writes it"),
        ([Op(0, "f", FORWARD, (), (0,)), Op(1, "g", FORWARD, (), (0,))], [storage(0)], "op g writes s0 again"),
        ([Op(0, "f", FORWARD, (0,), (0,))], [storage(0, Role.PARAM, lasting=True)], "both reads and writes s0"),
        ([Op(0, "f", FORWARD, (), (0,))], [storage(0, Role.INPUT)], "op f writes s0, an input"),
        ([Op(0, "f", FORWARD, (), (), region=2)], [], "region call 2, which does not exist"),
        ([Op(0, "f", FORWARD, (), (), workspace_bytes=-3)], [], "-3 bytes of workspace"),
        ([Op(0, "f", FORWARD, (), (0,), in_place=((1, 0),))], [storage(0), storage(1)], "hands the bytes of storage 1 to 0"),
        (
            [Op(0, "f", FORWARD, (), (0,)), Op(1, "g", FORWARD, (0,), (1,), in_place=((0, 1),)), Op(2, "h", FORWARD, (0,), ())],
            [storage(0), storage(1)],
            "op h touches s0, whose bytes g took over",
        ),
    ],
)  # fmt: skip
def test_graphs_that_break_the_rules(ops, storages, match):
    from tierwise.ir import Graph

    with pytest.raises(InvalidGraph, match=match):
        check_graph(Graph(tuple(ops), tuple(storages)))


def test_versions_order_the_ops():
    b = GraphBuilder()
    w, g, out = b.storage("w", 1, Role.PARAM), b.storage("g", 1, Role.GRAD), b.storage("out", 1, Role.ACTIVATION)
    b.op("grad", BACKWARD, [w], [g])
    b.op("step", UPDATE, [g], [], mutates=(w,))
    b.op("look", UPDATE, [w], [out])
    problem = b.problem()
    look_first = [Compute(0), Compute(2), Compute(1), Free(g, "hbm"), Free(out, "hbm")]
    refused(
        look_first,
        "look needs w .* as it was after write 1, but in hbm it is as after write 0: it has not been written yet",
        problem=problem,
        home={w: ("hbm",)},
    )


def test_skip_connection_is_legal():
    problem = skip()
    check_graph(problem.graph)
    check_schedule(problem, keep_all.plan(problem))
