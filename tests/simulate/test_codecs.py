"""The clock on encoded copies and variants, and the bound with them, on schedules small enough to draw on paper."""

from __future__ import annotations

import dataclasses

import pytest
from problems import FORWARD, GraphBuilder, chain, machine, with_codecs, with_engines, with_sign_bits

from tierwise.ir import Compute, Copy, Costs, Free, Problem, Role, Schedule, Variant, check_schedule
from tierwise.policies._gaps import Swap, build
from tierwise.simulate import lower_bound_seconds, simulate

# chain(4): ops fwd0 to fwd3, loss, bwd3 to bwd0, a second each. a0 (10 bytes, 5 encoded) is idle from fwd1, at 2, to bwd1, at 7.
A0 = 1


def spans(problem: Problem, swap: Swap) -> list[tuple[str, float, float]]:
    """What is done with a0, on which lane, from when to when."""
    schedule = build(problem, [swap])
    check_schedule(problem, schedule)
    timeline = simulate(problem, schedule)
    assert simulate(problem.with_budget(timeline.peak_bytes["hbm"]), schedule).seconds <= timeline.seconds  # the clock holds no more than it says
    return [(s.lane, s.start, s.end) for s in timeline.spans if isinstance(schedule.steps[s.step], Copy)]


def test_in_place_it_is_the_devices_work():
    # 10 bytes at 20 a second: half a second before fwd2, and half a second before bwd1 reads it.
    problem = with_codecs(chain(4))
    assert spans(problem, Swap(A0, "hbm", 2, 2, 7, codec="half")) == [("gpu", 2, 2.5), ("gpu", 7.5, 8)]


def test_each_coding_is_a_launch():
    problem = with_codecs(chain(4))
    launching = tuple(dataclasses.replace(p, launch_seconds=0.25) for p in problem.machine.processors)
    problem = dataclasses.replace(problem, machine=dataclasses.replace(problem.machine, processors=launching))
    assert spans(problem, Swap(A0, "hbm", 2, 2, 7, codec="half")) == [("gpu", 2, 2.75), ("gpu", 7.75, 8.5)]


def test_encoded_by_the_device_half_the_bytes_go_over_the_link():
    # Encoded from 2 to 2.5, 5 bytes out until 3; fetched when bwd2 starts at 6.5, decoded when bwd1 reads it.
    problem = with_codecs(chain(4))
    found = spans(problem, Swap(A0, "dram", 2, 2, 6, codec="half"))
    assert found == [("gpu", 2, 2.5), ("out", 2.5, 3), ("in", 6.5, 7), ("gpu", 7.5, 8)]


def test_encoded_by_the_link_the_device_does_nothing():
    problem = with_codecs(chain(4, on=with_engines(machine())))
    # The engine passes 15 plain bytes a second: 10 take two thirds of a second, though 5 bytes need only half a second of the lane.
    (_, out, out_end), (_, back, back_end) = spans(problem, Swap(A0, "dram", 2, 2, 6, codec="half"))
    assert (out, back) == (2, 6)
    assert (out_end, back_end) == pytest.approx((2 + 2 / 3, 6 + 2 / 3))


def test_an_engine_faster_than_the_lane_leaves_the_lane_to_rule():
    on = with_engines(machine())
    fast = tuple(dataclasses.replace(link, codecs=dict.fromkeys(link.codecs, 1000.0)) for link in on.links)
    assert spans(with_codecs(chain(4, on=dataclasses.replace(on, links=fast))), Swap(A0, "dram", 2, 2, 6, codec="half"))[0] == ("out", 2, 2.5)


def test_the_cpu_encodes_in_its_own_memory():
    problem = dataclasses.replace(with_codecs(chain(2)), cyclic=False)
    steps = (Compute(0), Copy(A0, "hbm", "dram"), Copy(A0, "dram", "dram", dst_form="half"), Free(A0, "dram"), *map(Compute, range(1, 5)))
    timeline = simulate(problem, Schedule(steps, {0: ("hbm",)}))
    assert [(s.lane, s.start, s.end) for s in timeline.spans[:4]] == [("gpu", 0, 1), ("out", 1, 2), ("cpu", 2, 3), ("gpu", 1, 2)]
    assert timeline.peak_bytes["dram"] == 15  # plain and encoded while it is encoded


def test_a_join_waits_for_the_encoded_bytes():
    problem = with_codecs(chain(4))
    schedule = build(problem, [Swap(A0, "dram", 2, 2, 6, join=True, codec="half")])
    starts = {problem.graph.ops[schedule.steps[s.step].op].name: s.start for s in simulate(problem, schedule).spans
              if isinstance(schedule.steps[s.step], Compute)}  # fmt: skip
    assert starts["fwd2"] == 3  # encoded until 2.5, sent until 3
    assert starts["bwd1"] == 8.5  # fetched with bwd2 from 7 to 7.5; decoded from 8


def test_encoded_bytes_wait_for_their_address():
    # y is encoded onto the bytes of x, which are on their way out until 5.
    b = GraphBuilder()
    x, y = b.storage("x", 40, Role.ACTIVATION), b.storage("y", 10, Role.ACTIVATION)
    b.op("make", FORWARD, [], [x, y])
    problem = with_codecs(b.problem(cyclic=False))
    steps = (Compute(0), Copy(x, "hbm", "dram"), Free(x, "hbm"), Copy(y, "hbm", "hbm", dst_form="half"))
    addresses = {(0, x): 0, (0, y): 50, (3, y): 30}
    for at, start in ((30, 5), (60, 1)):
        schedule = Schedule(steps, {}, addresses | {(3, y): at})
        check_schedule(problem, schedule)
        assert next(s.start for s in simulate(problem, schedule).spans if s.step == 3) == start


def test_a_variant_takes_its_own_time_and_workspace():
    problem = chain(1, cyclic=False)
    problem = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, variants=(Variant(0, "fft", {"gpu": 0.25}, workspace_bytes=33),)))
    timeline = simulate(problem, build(problem, variants={0: "fft"}))
    assert (timeline.spans[0].start, timeline.spans[0].end) == (0, 0.25)
    assert timeline.memory["hbm"]["workspace"].nbytes[0] == 33


def test_a_variant_waits_for_what_it_reads_and_for_nothing_else():
    # bwd0 by another formula reads a0 and not batch, which therefore dies after fwd0.
    problem = chain(1, cyclic=False)
    variant = Variant(2, "from output", {"gpu": 1.0}, reads=(2, 1))
    problem = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, variants=(variant,)))
    schedule = build(problem, variants={2: "from output"})
    check_schedule(problem, schedule)
    assert schedule.steps.index(Free(0, "hbm")) == 1
    assert schedule.steps.index(Free(1, "hbm")) > schedule.steps.index(Compute(2, variant="from output"))


# -- the bound --------------------------------------------------------------------------------------------------------------------------


def test_the_bound_counts_what_is_needed_in_its_smallest_exact_form():
    # batch and a0 to a9: 110 bytes, of which 40 may stay. Encoded they are 55: 15 have to come back. One byte a second, and nothing cheap to repeat.
    problem = chain(10, on=machine(hbm=40, rate=1.0), seconds=0.1)
    assert lower_bound_seconds(problem) > 2.1 + 0.4
    coded = with_codecs(problem)
    assert lower_bound_seconds(coded) < lower_bound_seconds(problem)
    assert lower_bound_seconds(coded, lossy=True) == pytest.approx(2.1)  # a tenth of everything fits


def test_the_bound_takes_the_fastest_variant_and_what_all_of_them_read():
    problem = chain(2)
    faster = dataclasses.replace(problem, costs=Costs(problem.costs.op_seconds, variants=(Variant(0, "fft", {"gpu": 0.25}),)))
    assert lower_bound_seconds(faster) == 4.25
    tight = chain(4, kinds=("relu",), on=machine(hbm=10, rate=0.1))
    reading_less = tuple(Variant(op.id, "less", {"gpu": 1.0}, reads=op.reads[:1]) for op in tight.graph.ops if op.name.startswith("bwd"))
    freed = dataclasses.replace(tight, costs=Costs(tight.costs.op_seconds, variants=reading_less))
    assert lower_bound_seconds(tight) > lower_bound_seconds(freed) == 9
    assert lower_bound_seconds(with_sign_bits(tight)) <= lower_bound_seconds(tight)
