from dataclasses import replace

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget, UnknownName
from tierwise.ir import Codec, Compute, Copy, Free, Role, Schedule, Variant, check_schedule, peak_bytes
from tierwise.ir.schedule import WORKSPACE
from tierwise.policies import keep_all, plan
from tierwise.policies._gaps import Swap, build
from tierwise.policies._heap import SizeClassHeap, TwoEndedHeap, quarter_powers
from tierwise.policies._placement import ALLOCATORS, place, place_offline, placed, stays, used_bytes


def steps_of(*stays_of: tuple[str, int, int, int], ops: int):
    """Storages as (name, bytes, made by op, read last by op), and nothing else."""
    b = GraphBuilder()
    ids = {name: b.storage(name, nbytes, Role.ACTIVATION) for name, nbytes, _, _ in stays_of}
    for op in range(ops):
        reads = [ids[name] for name, _, _, last in stays_of if last == op]
        b.op(f"f{op}", FORWARD, reads, [ids[name] for name, _, first, _ in stays_of if first == op])
    return b.problem(machine(hbm=1000), cyclic=False)


HOLES = (("a", 10, 0, 1), ("b", 10, 0, 4), ("c", 5, 2, 4), ("d", 10, 3, 4))
# a and b lie at 0 and 10. When a is gone, c takes the hole at 0 and d, too large for what is left of it, goes above b: 30 for 25 used.


def offsets(problem, found) -> dict[str, int]:
    return {problem.graph.storages[storage].name: offset for (_, storage), offset in found.addresses.items()}


def test_one_by_one_a_small_piece_spoils_a_hole():
    problem = steps_of(*HOLES, ops=5)
    found = place(problem, keep_all.plan(problem), "first-fit")
    assert offsets(problem, found) == {"a": 0, "b": 10, "c": 0, "d": 20}
    assert (found.height_bytes, found.used_bytes) == (30, 25)
    assert found.fragmentation == pytest.approx(1 / 6)


def test_all_known_the_largest_come_first():
    problem = steps_of(*HOLES, ops=5)
    found = place_offline(problem, keep_all.plan(problem))
    assert offsets(problem, found) == {"b": 0, "a": 10, "d": 10, "c": 20}
    assert (found.height_bytes, found.fragmentation) == (25, 0.0)


def test_best_fit_takes_the_smallest_hole_that_serves():
    # When a (20) and c (10) are gone, e (10) fits into both holes; first fit takes a's, and f (20) then has to go above b, c and d.
    problem = steps_of(("a", 20, 0, 1), ("b", 5, 0, 4), ("c", 10, 0, 1), ("d", 5, 0, 4), ("e", 10, 2, 4), ("f", 20, 3, 4), ops=5)
    schedule = keep_all.plan(problem)
    assert offsets(problem, place(problem, schedule, "best-fit")) == {"a": 0, "b": 20, "c": 25, "d": 35, "e": 25, "f": 0}
    assert place(problem, schedule, "best-fit").height_bytes == 40
    assert place(problem, schedule, "first-fit").height_bytes == 60


def test_what_is_copied_out_comes_from_the_high_end():
    problem = chain(4, cyclic=False)
    schedule = build(problem, [Swap(1, "dram", 2, 2, 7)])
    found = place(problem, schedule, "two-ended")
    at = {problem.graph.storages[storage].name: offset for (step, storage), offset in found.addresses.items() if step < 8}
    assert at["batch"] == 0 and at["a1"] == 10
    assert at["a0"] == found.height_bytes - 10


def test_size_classes_are_not_shared():
    slots = SizeClassHeap(100, quarter_powers)
    assert [slots.take(16), slots.take(17), slots.take(20)] == [0, 16, 36]  # 17 and 20 are of the class of 20
    slots.give_back(0, 16)
    assert slots.take(20) == 56
    assert slots.take(15) == 0  # of the class of 16, and the first slot is free
    assert slots.take(14) == 76
    slots.give_back(16, 17)
    assert slots.take(18) == 16
    assert slots.take(40) is None


@pytest.mark.parametrize(
    "nbytes, rounded", [(1, 1), (7, 7), (8, 8), (9, 10), (11, 12), (17, 20), (33, 40), (1 << 20, 1 << 20), ((1 << 20) + 1, 5 << 18)]
)
def test_quarter_powers(nbytes, rounded):
    assert quarter_powers(nbytes) == rounded


def test_best_fit_of_a_heap():
    heap = TwoEndedHeap(100)
    taken = [heap.take_low(n) for n in (20, 10, 10, 10)]
    heap.give_back(taken[0], 20)
    heap.give_back(taken[2], 10)
    assert heap.take_best(9) == 30
    assert heap.take_best(15) == 0
    assert heap.take_best(60) is None
    assert heap.take_best(0) == 0


def test_a_storage_that_takes_over_bytes_keeps_their_address():
    b = GraphBuilder()
    x, y, z = (b.storage(name, 10, Role.ACTIVATION) for name in "xyz")
    b.op("f0", FORWARD, [], [x])
    b.op("relu_", FORWARD, [x], [y], in_place=((x, y),))
    b.op("f2", FORWARD, [y], [z])
    problem = b.problem(cyclic=False)
    schedule = keep_all.plan(problem)
    assert [(stay.storage, stay.start, stay.end) for stay in stays(problem, schedule)] == [(x, 0, 3), (z, 2, 4)]
    assert place_offline(problem, schedule).height_bytes == 20


def test_a_weight_that_leaves_and_returns_is_where_it_was():
    problem = chain(3, weight_bytes=5, on=machine(hbm=1000))
    weight = next(s.id for s in problem.graph.storages if s.name == "w1")
    schedule = build(problem, [Swap(weight, "dram", 2, 2, 5)])
    for allocator in ALLOCATORS:
        with_addresses, _ = placed(problem, schedule, allocator)
        check_schedule(problem, with_addresses)  # the judge plays it twice


def test_what_cannot_be_placed_is_refused():
    problem = chain(2, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    with pytest.raises(BadInput, match="reach into the next step"):
        place(problem, plan(problem, "zero_offload"))
    with pytest.raises(UnknownName):
        place(problem, plan(problem, "keep_all"), "buddy")
    with pytest.raises(UnknownName):
        place_offline(problem, plan(problem, "keep_all"), fit="worst")


@pytest.mark.parametrize("allocator", ALLOCATORS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(problem=training_steps(), share=st.sampled_from((1.0, 0.7)), policy=st.sampled_from(("g10", "dtr", "chen", "swapadvisor")))
def test_the_judge_agrees_with_every_placement(allocator, problem, share, policy):
    whole = peak_bytes(problem, keep_all.plan(problem))["hbm"]
    try:
        schedule: Schedule = plan(problem.with_budget(int(whole * share)), policy)
    except InfeasibleBudget:
        schedule = keep_all.plan(problem)
    with_addresses, found = placed(problem, schedule, allocator)
    roomy = problem.with_budget(max(found.height_bytes, whole))
    check_schedule(roomy, with_addresses)
    assert found.used_bytes == used_bytes(stays(problem, schedule)) <= found.height_bytes
    assert peak_bytes(roomy, schedule)["hbm"] <= found.height_bytes


def test_encoded_bytes_and_the_workspace_of_variants_have_places_too():
    # a0 is encoded in 4 of its 10 bytes, which outlive the plain ones; fwd1 runs by a variant with 7 bytes of workspace.
    problem = chain(3, cyclic=False)
    codec = Codec("half", {1: 4}, {"gpu": 10.0}, {"gpu": 10.0})
    problem = replace(problem, costs=replace(problem.costs, codecs=(codec,), variants=(Variant(1, "scratch", {"gpu": 1.0}, workspace_bytes=7),)))
    steps = (
        Compute(0), Compute(1, variant="scratch"), Copy(1, "hbm", "hbm", dst_form="half"), Free(1, "hbm"), Compute(2), Compute(3), Compute(4),
        Copy(1, "hbm", "hbm", src_form="half"), Compute(5), Compute(6),
    )  # fmt: skip
    schedule = Schedule(steps, {0: ("hbm",)})
    found = [(stay.storage, stay.nbytes, stay.start, stay.end) for stay in stays(problem, schedule)]
    assert (WORKSPACE, 7, 1, 2) in found
    assert [stay for stay in found if stay[0] == 1] == [(1, 10, 0, 3), (1, 4, 2, 11), (1, 10, 7, 11)]
    for allocator in ALLOCATORS:
        check_schedule(problem, placed(problem, schedule, allocator)[0])
