from problems import chain, machine, masters

from tierwise.ir import Compute, Copy
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate


def test_states_live_in_host_memory_and_never_move():
    problem = chain(3, weight_bytes=5, state_bytes=10, cpu_update_seconds=1)
    schedule = plan(problem, "zero_offload")
    names = {s.id: s.name for s in problem.graph.storages}
    assert {names[s]: home for s, home in schedule.home.items()} == {
        "batch": ("hbm",), "w0": ("hbm", "dram"), "w1": ("hbm", "dram"), "w2": ("hbm", "dram"), "s0": ("dram",), "s1": ("dram",), "s2": ("dram",),
    }  # fmt: skip
    moved = [(names[s.storage], s.src, s.dst) for s in schedule.steps if isinstance(s, Copy)]
    assert moved == [(f"w{i}", "dram", "hbm") for i in (0, 1, 2)] + [(f"g{i}", "hbm", "dram") for i in (2, 1, 0)]


def test_with_masters_the_parameter_is_written_by_the_cpu_and_sent_up():
    problem = masters()
    lines = list(schedule_lines(problem.graph, plan(problem, "zero_offload")))
    assert lines[:4] == ["compute step0 on cpu @-1", "free g0 dram @-1", "copy w0 dram -> hbm @-1", "free w0 dram @-1"]


def test_traffic_is_one_gradient_out_and_one_parameter_in():
    problem = chain(4, weight_bytes=5, state_bytes=10, cpu_update_seconds=0.1)
    busy = simulate(problem, plan(problem, "zero_offload")).busy_seconds()
    assert busy["out"] == busy["in"] == 4 * 5 / 10


def test_updates_during_backward_hide_all_but_the_first_layers_round_trip():
    # The updates of layers 3 to 1 fit under backward; g0 comes last: out 0.5, update 0.5, back 0.5, then the next forward may start.
    problem = chain(4, weight_bytes=5, cpu_update_seconds=0.5)
    assert simulate(problem, plan(problem, "zero_offload", update="backward")).seconds == 9 + 1.5


def test_updates_after_backward_lie_under_the_next_forward():
    # g0 is there 0.5 after backward; from then on updates take 2 s each, and each forward op waits for its own weight, half a second later.
    problem = chain(4, weight_bytes=5, cpu_update_seconds=2)
    timeline = simulate(problem, plan(problem, "zero_offload"))
    assert [(s.start, s.end) for s in timeline.spans if s.lane == "cpu"] == [(0.5, 2.5), (2.5, 4.5), (4.5, 6.5), (6.5, 8.5)]
    assert [s.start for s in timeline.spans if s.lane == "gpu"][:5] == [3, 5, 7, 9, 10]
    assert timeline.seconds == 15


def test_updates_the_cpu_cannot_run_stay_on_the_device():
    problem = chain(2, weight_bytes=5)
    schedule = plan(problem, "zero_offload")
    assert {s.on for s in schedule.steps if isinstance(s, Compute)} == {"gpu"}


def test_a_cold_step_updates_at_its_end():
    problem = chain(2, weight_bytes=5, cpu_update_seconds=1, cyclic=False)
    schedule = plan(problem, "zero_offload")
    assert all(step.iteration == 0 for step in schedule.steps)
    assert schedule.steps[-1] == Copy(2, "dram", "hbm")  # w1


def test_memory_on_the_device_is_what_forward_and_backward_need():
    big = machine(hbm=100_000, rate=1000.0)
    problem = chain(4, weight_bytes=100, state_bytes=200, cpu_update_seconds=1, on=big)
    kept = simulate(problem, plan(problem, "keep_all")).peak_bytes["hbm"]
    offloaded = simulate(problem, plan(problem, "zero_offload")).peak_bytes["hbm"]
    assert kept == 4 * 100 + 4 * 200 + 4 * 100 + 20  # weights, states, gradients, batch and d0
    assert offloaded == 4 * 100 + 2 * 100 + 50  # weights, g3 on its way out while bwd2 makes g2, batch, a0, a1, d2 and d1
