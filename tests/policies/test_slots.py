import pytest
from problems import FORWARD, UPDATE, GraphBuilder, awkward, chain, machine, shared_weight

from tierwise.ir import Copy, Role, check_schedule, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies._slots import Slots, precedences, swap_in_slots
from tierwise.simulate import simulate


def one_class(problem, count: int, size: int = 10) -> Slots:
    return Slots(
        [size if s.nbytes else 0 for s in problem.graph.storages], [size if op.workspace_bytes else 0 for op in problem.graph.ops], {size: count}
    )


def walked(problem, slots: Slots, order=None):
    schedule = swap_in_slots(problem, order or range(len(problem.graph.ops)), slots, tier="dram")
    assert schedule is not None
    check_schedule(problem, schedule)
    return schedule


def test_who_is_needed_last_leaves_behind_its_own_last_use():
    # Four slots. The loss finds none free; of the batch, a0 and a1 the batch is needed last, and it is idle since fwd0. It comes back into the first
    # slot that is free again, behind bwd2.
    problem = chain(3)
    assert list(schedule_lines(problem.graph, walked(problem, one_class(problem, 4)))) == [
        "compute fwd0", "copy batch hbm -> dram", "free batch hbm", "compute fwd1", "compute fwd2", "compute loss", "free a2 hbm",
        "compute bwd2", "free a1 hbm", "free d2 hbm", "copy batch dram -> hbm", "compute bwd1", "free a0 hbm", "free d1 hbm",
        "compute bwd0", "free batch hbm", "free batch dram", "free d0 hbm",
    ]  # fmt: skip
    assert simulate(problem, walked(problem, one_class(problem, 4))).seconds == 7


@pytest.mark.parametrize("count, copies", [(5, 0), (4, 2), (3, 4)])
def test_the_fewer_slots_the_more_copies(count, copies):
    problem = chain(3)
    schedule = walked(problem, one_class(problem, count))
    assert sum(isinstance(step, Copy) for step in schedule.steps) == copies
    assert peak_bytes(problem, schedule)["hbm"] <= 10 * count


def test_an_op_without_enough_slots():
    problem = chain(3)  # a backward op needs three
    assert swap_in_slots(problem, range(7), one_class(problem, 2), tier="dram") is None


def test_classes_do_not_help_each_other():
    b = GraphBuilder()
    small, large, tail = b.storage("small", 5, Role.ACTIVATION), b.storage("large", 20, Role.ACTIVATION), b.storage("tail", 5, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [small])
    b.op("f1", FORWARD, [], [large])
    b.op("f2", FORWARD, [], [tail])
    b.op("f3", FORWARD, [small, large, tail], [])
    problem = b.problem(cyclic=False)
    schedule = swap_in_slots(problem, range(4), Slots([5, 20, 5], [0] * 4, {5: 1, 20: 2}), tier="dram")
    assert schedule is None  # f3 needs two small slots; the free large one is no use
    shared = swap_in_slots(problem, range(4), Slots([20, 20, 20], [0] * 4, {20: 3}), tier="dram")
    assert shared is not None and not any(isinstance(step, Copy) for step in shared.steps)


def weights_in_turn(count: int, on=None):
    """`count` weights of 10, each read by one op; none is ever written."""
    b = GraphBuilder()
    weights = [b.storage(f"w{i}", 10, Role.PARAM) for i in range(count)]
    for i, weight in enumerate(weights):
        b.op(f"f{i}", FORWARD, [weight], [])
    return b.problem(on or machine())


def test_what_was_there_at_the_end_is_there_at_the_start_of_the_next():
    # Three weights, two slots. When w2 needs one, w1 is needed last, counted on into the next step: w0 and w2 are there at the end, and at home. Then
    # w1 takes the slot of w0, needed last by now, and gives it back; it was never changed and needs no copy out.
    problem = weights_in_turn(3)
    schedule = walked(problem, one_class(problem, 2))
    assert [schedule.home[w] for w in range(3)] == [("hbm",), ("dram",), ("hbm",)]
    assert list(schedule_lines(problem.graph, schedule)) == [
        "compute f0", "copy w0 hbm -> dram", "free w0 hbm", "copy w1 dram -> hbm",
        "compute f1", "free w1 hbm", "copy w0 dram -> hbm", "compute f2", "free w0 dram",
    ]  # fmt: skip


def test_a_weight_that_is_up_to_date_at_home_leaves_without_a_copy():
    problem = weights_in_turn(4)
    schedule = walked(problem, one_class(problem, 1))
    lines = list(schedule_lines(problem.graph, schedule))
    assert "copy w1 dram -> hbm" in lines and "copy w1 hbm -> dram" not in lines


def test_order_is_that_of_the_caller():
    problem = chain(2, weight_bytes=10)
    program = [op.name for op in problem.graph.ops]
    assert program == ["fwd0", "fwd1", "loss", "bwd1", "bwd0", "step0", "step1"]
    early = [program.index(name) for name in ("fwd0", "fwd1", "loss", "bwd1", "step1", "bwd0", "step0")]
    schedule = walked(problem, one_class(problem, 20), early)
    assert [line for line in schedule_lines(problem.graph, schedule) if line.startswith("compute")][4] == "compute step1"


def test_what_must_come_before():
    graph = shared_weight().graph
    names = [op.name for op in graph.ops]
    before = {names[op]: [names[each] for each in needed] for op, needed in enumerate(precedences(graph))}
    assert before["b1"] == ["f0", "loss"]  # a0 and d1
    assert before["add"] == ["b1", "b0"]  # what it adds, and what it adds to
    assert before["step"] == ["f0", "f1", "b1", "add"]  # whoever reads the weight, and its gradient
    graph = awkward().graph
    names = [op.name for op in graph.ops]
    before = {names[op]: [names[each] for each in needed] for op, needed in enumerate(precedences(graph))}
    assert before["relu_"] == ["conv"]
    assert before["norm"] == ["relu_"]


def test_who_takes_over_bytes_comes_after_whoever_reads_them():
    b = GraphBuilder()
    a, seen, r = b.storage("a", 10, Role.ACTIVATION), b.storage("seen", 1, Role.ACTIVATION), b.storage("r", 10, Role.ACTIVATION)
    w = b.storage("w", 1, Role.PARAM)
    b.op("make", FORWARD, [], [a])
    b.op("look", FORWARD, [a], [seen])
    b.op("relu_", FORWARD, [a], [r], in_place=((a, r),))
    b.op("step", UPDATE, [seen], [], mutates=(w,))
    assert precedences(b.problem().graph) == [[], [0], [0, 1], [1]]
