"""The builder of schedules: what it writes for each choice, worked by hand."""

from __future__ import annotations

import pytest
from problems import BACKWARD, FORWARD, ODD_PROBLEMS, GraphBuilder, awkward, chain

from tierwise.errors import InvalidSchedule
from tierwise.ir import Role, check_schedule, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies._gaps import Drop, Gap, Swap, build, can_recompute, device_bytes, gap_seconds, gaps


def named(problem, name: str) -> int:
    return next(s.id for s in problem.graph.storages if s.name == name)


def op_named(problem, name: str) -> int:
    return next(op.id for op in problem.graph.ops if op.name == name)


def lines(problem, schedule, *, since: str = "") -> list[str]:
    """The schedule in words, from one line on."""
    check_schedule(problem, schedule)
    found = list(schedule_lines(problem.graph, schedule))
    return found[found.index(since) :] if since else found


def recomputed(problem, schedule) -> list[str]:
    return [line.removeprefix("recompute ") for line in lines(problem, schedule) if line.startswith("recompute")]


def diamond():
    """x -> fx -> a; a -> fb -> b -> fc -> c; a -> fd -> d; (c, d) -> fe -> e. Backward reads only e: no one but the forward ops needs the rest."""
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    made = {name: b.storage(name, 10, Role.ACTIVATION) for name in "abcde"}
    b.op("fx", FORWARD, [x], [made["a"]])
    b.op("fb", FORWARD, [made["a"]], [made["b"]])
    b.op("fc", FORWARD, [made["b"]], [made["c"]])
    b.op("fd", FORWARD, [made["a"]], [made["d"]])
    b.op("fe", FORWARD, [made["c"], made["d"]], [made["e"]])
    loss, grad = b.storage("loss", 1, Role.ACTIVATION), b.storage("grad", 10, Role.ACTIVATION)
    b.op("loss", BACKWARD, [x], [loss])
    b.op("back", BACKWARD, [loss, made["e"], x], [grad])
    return b.problem()


def test_gaps_are_the_idle_times_between_two_uses():
    problem = chain(2, weight_bytes=4)
    names = {(problem.graph.storages[g.storage].name, g.start, g.end, g.wraps) for g in gaps(problem)}
    # fwd0 fwd1 loss bwd1 bwd0 step0 step1 are 0 to 6; a1 goes from fwd1 to loss with no op between.
    assert names == {
        ("batch", 0, 4, False), ("a0", 1, 3, False), ("w0", 0, 4, False), ("w1", 1, 3, False), ("w1", 3, 6, False), ("g1", 3, 6, False),
        ("w0", 5, 7, True), ("w1", 6, 8, True),
    }  # fmt: skip
    assert gap_seconds(problem, Gap(0, 10, 0, 4)) == 3
    assert gap_seconds(problem, Gap(0, 4, 5, 7, wraps=True)) == 1


def test_a_dropped_run_is_made_again_at_once_and_kept():
    problem = chain(4)
    drops = [Drop(named(problem, "a1"), 3), Drop(named(problem, "a2"), 4)]
    assert lines(problem, build(problem, drops=drops), since="free a3 hbm") == [
        "free a3 hbm", "recompute fwd1", "recompute fwd2", "compute bwd3", "free a2 hbm", "free d3 hbm",
        "compute bwd2", "free a1 hbm", "free d2 hbm", "compute bwd1", "free a0 hbm", "free d1 hbm", "compute bwd0", "free batch hbm", "free d0 hbm",
    ]  # fmt: skip


def test_memory_centric_makes_each_again_when_it_is_read():
    problem = chain(4)
    drops = [Drop(named(problem, "a1"), 3), Drop(named(problem, "a2"), 4)]
    assert lines(problem, build(problem, drops=drops, keep_recomputed=False), since="free a3 hbm")[:8] == [
        "free a3 hbm", "recompute fwd1", "recompute fwd2", "free a1 hbm", "compute bwd3", "free a2 hbm", "free d3 hbm", "recompute fwd1",
    ]  # fmt: skip


def test_a_function_decides_what_stays():
    problem = chain(5)
    a1, a2, a3 = (named(problem, name) for name in ("a1", "a2", "a3"))
    asked = []

    def keeps(storage: int, reader: int, next_use: int) -> bool:
        asked.append((storage, reader, next_use))
        return storage == a2

    schedule = build(problem, drops=[Drop(a1, 3), Drop(a2, 4), Drop(a3, 5)], keep_recomputed=keeps)
    assert asked == [(a1, 6, 8), (a2, 6, 7)]  # bwd4 is 6 and needs a3
    assert recomputed(problem, schedule) == ["fwd1", "fwd2", "fwd3", "fwd1"]


def test_a_drop_may_come_later_than_the_last_use():
    problem = chain(4)
    drops = [Drop(named(problem, "a1"), 4), Drop(named(problem, "a2"), 4)]
    assert recomputed(problem, build(problem, drops=drops, keep_recomputed=False)) == ["fwd1", "fwd2", "fwd1"]


def test_a_diamond_is_computed_once():
    """The two ways from a to e have different lengths; a is made again once, and everything on the way leaves."""
    problem = diamond()
    schedule = build(problem, drops=[Drop(named(problem, "e"), op_named(problem, "loss"))])
    assert lines(problem, schedule, since="compute loss") == [
        "compute loss", "recompute fx", "recompute fb", "recompute fc", "free b hbm", "recompute fd", "free a hbm", "recompute fe",
        "free c hbm", "free d hbm", "compute back", "free x hbm", "free e hbm", "free loss hbm", "free grad hbm",
    ]  # fmt: skip


def test_stacked_diamonds_stay_linear():
    """Twenty of them, each with two ways of two ops: a builder that makes shared inputs once per way would write a million steps."""
    b = GraphBuilder()
    x = first = b.storage("x", 1, Role.INPUT)
    for i in range(20):
        left, right, left2, right2, out = (b.storage(f"{n}{i}", 1, Role.ACTIVATION) for n in ("l", "r", "ll", "rr", "o"))
        b.op(f"l{i}", FORWARD, [x], [left])
        b.op(f"r{i}", FORWARD, [x], [right])
        b.op(f"ll{i}", FORWARD, [left], [left2])
        b.op(f"rr{i}", FORWARD, [right], [right2])
        b.op(f"o{i}", FORWARD, [left2, right2], [out])
        x = out
    y, z = b.storage("y", 1, Role.ACTIVATION), b.storage("z", 1, Role.ACTIVATION)
    b.op("other", BACKWARD, [first], [y])
    b.op("last", BACKWARD, [x, y], [z])
    problem = b.problem()
    assert len(recomputed(problem, build(problem, drops=[Drop(x, 100)]))) == 100


def test_the_other_outputs_of_an_op_that_runs_again_leave_unless_wanted():
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    a, mask, spare = (b.storage(n, 10, Role.ACTIVATION) for n in ("a", "mask", "spare"))
    loss, da, dx = (b.storage(n, 10, Role.ACTIVATION) for n in ("loss", "da", "dx"))
    b.op("f", FORWARD, [x], [a, mask, spare])
    b.op("loss", BACKWARD, [x], [loss])
    b.op("g", BACKWARD, [a, loss], [da])
    b.op("h", BACKWARD, [mask, da, x], [dx])
    problem = b.problem()
    both = [Drop(a, 1), Drop(mask, 1)]
    kept = lines(problem, build(problem, drops=both), since="recompute f")
    assert kept[:5] == ["recompute f", "free spare hbm", "compute g", "free a hbm", "free loss hbm"]  # mask waits for h
    lean = lines(problem, build(problem, drops=both, keep_recomputed=False), since="recompute f")
    assert lean[:8] == ["recompute f", "free mask hbm", "free spare hbm", "compute g", "free a hbm", "free loss hbm", "recompute f", "free a hbm"]
    # mask is still there when f runs again for a: the second copy is scratch, and nothing is freed twice.
    only_a = lines(problem, build(problem, drops=[Drop(a, 1)]), since="recompute f")
    assert only_a[:4] == ["recompute f", "free spare hbm", "compute g", "free a hbm"]


def test_an_in_place_op_runs_again_from_a_fresh_input():
    problem = awkward()
    r = named(problem, "r")
    schedule = build(problem, drops=[Drop(r, op_named(problem, "out"))])  # conv makes a again, relu_ turns it into r
    assert recomputed(problem, schedule) == ["conv", "relu_"]
    assert "free a hbm" not in lines(problem, schedule)


def test_a_swapped_source_is_fetched_on_demand():
    """bwd3 needs a2, made from a1, which is away until bwd2."""
    problem = chain(4)
    a1, a2 = named(problem, "a1"), named(problem, "a2")
    swap = Swap(a1, "dram", out_at=3, free_at=3, in_at=6)
    kept = lines(problem, build(problem, [swap], [Drop(a2, 4)]), since="free a3 hbm")
    assert kept[:6] == ["free a3 hbm", "copy a1 dram -> hbm", "recompute fwd2", "free a1 dram", "compute bwd3", "free a2 hbm"]
    lean = lines(problem, build(problem, [swap], [Drop(a2, 4)], keep_recomputed=False), since="free a3 hbm")
    assert lean[:9] == [
        "free a3 hbm", "copy a1 dram -> hbm", "recompute fwd2", "free a1 hbm", "compute bwd3", "free a2 hbm", "free d3 hbm",
        "copy a1 dram -> hbm", "free a1 dram",
    ]  # fmt: skip


def test_a_storage_whose_copy_is_under_way_is_not_disturbed():
    """a is copied out before idle and freed only before uses_a; in between fc runs again from it, and its copy in dram stays."""
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    a, c, y, z = (b.storage(n, 10, Role.ACTIVATION) for n in ("a", "c", "y", "z"))
    b.op("fa", FORWARD, [x], [a])
    b.op("fc", FORWARD, [a], [c])
    b.op("idle", FORWARD, [x], [y])
    b.op("uses_c", BACKWARD, [c, y], [])
    b.op("uses_a", BACKWARD, [a], [z])
    problem = b.problem()
    schedule = build(problem, [Swap(a, "dram", out_at=2, free_at=4, in_at=4)], [Drop(c, 2)])
    assert lines(problem, schedule, since="copy a hbm -> dram") == [
        "copy a hbm -> dram", "compute idle", "free x hbm", "recompute fc", "compute uses_c", "free c hbm", "free y hbm", "free a hbm",
        "copy a dram -> hbm", "free a dram", "compute uses_a", "free a hbm", "free z hbm",
    ]  # fmt: skip


def test_an_input_outlives_its_last_use_when_something_is_made_from_it_again():
    b = GraphBuilder()
    x, a, y, z = (b.storage(n, 10, Role.INPUT if n == "x" else Role.ACTIVATION) for n in ("x", "a", "y", "z"))
    b.op("f", FORWARD, [x], [a])
    b.op("idle", FORWARD, [a], [y])
    b.op("idle2", FORWARD, [y], [])
    b.op("back", BACKWARD, [a, y], [z])
    b.op("more", BACKWARD, [z], [])
    problem = b.problem()
    assert lines(problem, build(problem, drops=[Drop(a, 2)]))[3:] == [
        "compute idle2", "recompute f", "compute back", "free x hbm", "free a hbm", "free y hbm", "compute more", "free z hbm",
    ]  # fmt: skip
    assert lines(problem, build(problem))[1] == "free x hbm"


def test_a_function_is_asked_once_even_if_the_steps_are_written_twice():
    """a and c are dropped and made from x, which outlives its last use: known only at the end of a first run, in which keeps has had its say."""
    b = GraphBuilder()
    x, a, c, y = (b.storage(n, 10, Role.INPUT if n == "x" else Role.ACTIVATION) for n in ("x", "a", "c", "y"))
    b.op("fa", FORWARD, [x], [a])
    b.op("fc", FORWARD, [a], [c])
    b.op("idle", FORWARD, [c], [y])
    b.op("idle2", FORWARD, [y], [])
    b.op("uses_c", BACKWARD, [c], [])
    b.op("uses_a", BACKWARD, [a], [])
    problem = b.problem()
    asked = []

    def keeps(storage: int, reader: int, next_use: int) -> bool:
        asked.append(storage)
        return len(asked) == 1

    schedule = build(problem, drops=[Drop(a, 2), Drop(c, 3)], keep_recomputed=keeps)
    assert asked == [a]
    assert recomputed(problem, schedule) == ["fa", "fc"]


def test_what_cannot_be_made_again_cannot_be_dropped():
    problem = awkward()
    with pytest.raises(InvalidSchedule, match="dropout' needs mask"):
        build(problem, drops=[Drop(named(problem, "mask"), 4)])


def test_a_joined_fetch_gives_its_source_back_behind_the_op_even_if_that_op_overwrites_it():
    problem = chain(2, weight_bytes=4)
    w1 = named(problem, "w1")
    swap = Swap(w1, "dram", out_at=4, free_at=4, in_at=6, join=True)  # between bwd1 and step1
    found = lines(problem, build(problem, [swap]), since="copy w1 dram -> hbm")
    assert found == ["copy w1 dram -> hbm", "compute step1", "free w1 dram join", "free g1 hbm"]


def test_weights_at_home_elsewhere_come_for_each_use_and_go_back_changed():
    problem = chain(2, weight_bytes=4)
    w1 = named(problem, "w1")
    swaps = [Swap(w1, "dram", 2, 2, 3), Swap(w1, "dram", 4, 4, 6), Swap(w1, "dram", out_at=7, free_at=7, in_at=1, wraps=True)]
    schedule = build(problem, swaps)
    assert schedule.home[w1] == ("dram",)
    assert [line for line in lines(problem, schedule) if " w1 " in line] == [
        "copy w1 dram -> hbm", "free w1 hbm", "copy w1 dram -> hbm", "free w1 hbm", "copy w1 dram -> hbm", "copy w1 hbm -> dram", "free w1 hbm",
    ]  # fmt: skip
    assert peak_bytes(problem, schedule)["dram"] == 4


def test_bytes_on_the_device_op_by_op():
    problem = chain(2)  # fwd0 fwd1 loss bwd1 bwd0, ten bytes each
    assert device_bytes(problem, build(problem)) == [20, 30, 40, 40, 20]
    swap = Swap(named(problem, "batch"), "dram", out_at=1, free_at=1, in_at=4)
    # The batch is away for fwd1, loss and bwd1; a0 leaves and is made again for bwd1, from the batch, which must come back for that.
    assert device_bytes(problem, build(problem, [swap])) == [20, 20, 30, 30, 20]
    assert device_bytes(problem, build(problem, [swap], [Drop(named(problem, "a0"), 2)], keep_recomputed=False)) == [20, 20, 20, 30, 20]


@pytest.mark.parametrize("which", ODD_PROBLEMS)
def test_the_most_bytes_of_any_op_are_the_judges_peak(which):
    problem = ODD_PROBLEMS[which]()
    found = [gap for gap in gaps(problem) if not gap.wraps]
    swaps = [Swap(gap.storage, "dram", gap.start + 1, gap.start + 1, gap.end) for gap in found[::2]]
    before_update = [gap for gap in found[1::2] if problem.graph.ops[gap.end].phase != "update"]
    drops = [Drop(gap.storage, gap.start + 1) for gap in before_update if can_recompute(problem, gap.storage)]
    for schedule in (build(problem), build(problem, swaps), build(problem, drops=drops), build(problem, swaps, drops, keep_recomputed=False)):
        assert max(device_bytes(problem, schedule)) == peak_bytes(problem, schedule)["hbm"]


def test_what_is_kept_outlives_its_last_use_instead_of_running_again():
    # f1 makes b from a, and only b is read in backward: to make b again takes a, which the program has let go by then.
    b = GraphBuilder()
    x, a, mid, d, e = (b.storage(n, 10, r) for n, r in (("x", Role.INPUT), ("a", Role.ACTIVATION), ("b", Role.ACTIVATION), ("d", Role.ACTIVATION),
                                                       ("e", Role.ACTIVATION)))  # fmt: skip
    b.op("f0", FORWARD, [x], [a])
    b.op("f1", FORWARD, [a], [mid])
    b.op("loss", BACKWARD, [x], [d])
    b.op("b1", BACKWARD, [d, mid], [e])
    problem = b.problem()
    assert recomputed(problem, build(problem, drops=[Drop(mid, 2)])) == ["f0", "f1"]
    assert recomputed(problem, build(problem, drops=[Drop(mid, 2)], kept=(a,))) == ["f1"]
