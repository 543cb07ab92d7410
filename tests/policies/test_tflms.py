import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain, machine

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import Copy, Role, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.simulate import simulate

# In a chain of four, fwd0 to fwd3 are levels 0 to 3, the loss is 4 and bwd3 to bwd0 are 5 to 8. Of what backward reads, a0 waits from level 0
# to 7, a1 from 1 to 6 and a2 from 2 to 5; the batch is an input, which no op makes.


def copies(problem, schedule, src: str = "hbm") -> list[str]:
    return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.src == src]


def lines(problem, **options) -> list[str]:
    return list(schedule_lines(problem.graph, plan(problem, "tflms", **options)))


@pytest.mark.parametrize("threshold, gone", [(2, ["a0", "a1", "a2"]), (3, ["a0", "a1"]), (4, ["a0", "a1"]), (5, ["a0"]), (7, [])])
def test_edges_longer_than_the_threshold_are_swapped(threshold, gone):
    problem = chain(4)
    assert copies(problem, plan(problem, "tflms", threshold=threshold, ahead=1, groupby=0)) == gone


def test_text_of_a_whole_plan():
    # a0 is for bwd1 at level 7: its trigger is more than one level above, bwd3 at level 5. The copy out is counted on one op late.
    assert lines(chain(4), threshold=5, ahead=1, groupby=0) == [
        "compute fwd0", "compute fwd1", "copy a0 hbm -> dram", "compute fwd2", "free a0 hbm", "compute fwd3", "compute loss", "free a3 hbm",
        "compute bwd3", "free a2 hbm", "free d3 hbm", "copy a0 dram -> hbm", "free a0 dram", "compute bwd2", "free a1 hbm", "free d2 hbm",
        "compute bwd1", "free a0 hbm", "free d1 hbm", "compute bwd0", "free batch hbm", "free d0 hbm",
    ]  # fmt: skip


def test_ahead_moves_the_trigger_up_and_gives_up_where_there_is_none():
    for ahead, before in ((1, "bwd2"), (2, "bwd3"), (3, "loss"), (99, "bwd1")):
        found = lines(chain(4), threshold=5, ahead=ahead, groupby=0)
        assert found.index("copy a0 dram -> hbm") == found.index(f"compute {before}") - 2


def test_sync_waits_for_copies_out_and_fetches_on_demand():
    found = lines(chain(4), threshold=5, ahead=1, groupby=0, sync=3)
    assert found[2:5] == ["copy a0 hbm -> dram", "free a0 hbm join", "compute fwd2"]
    assert found.index("copy a0 dram -> hbm") == found.index("compute bwd1") - 2
    assert "free a0 dram" in found  # nobody but bwd1 waits for the way back


def two_late_readers():
    """`a` is made at level 0 and read at levels 3 and 7."""
    b = GraphBuilder()
    a = b.storage("a", 10, Role.ACTIVATION)
    before = b.storage("t0", 1, Role.ACTIVATION)
    b.op("f0", FORWARD, [], [a, before])
    for i in range(1, 8):
        made = b.storage(f"t{i}", 1, Role.ACTIVATION)
        b.op(f"f{i}", BACKWARD if i > 2 else FORWARD, [before, *([a] if i in (3, 7) else [])], [made])
        before = made
    return b.problem()


def test_readers_within_groupby_levels_share_one_fetch():
    problem = two_late_readers()
    assert len(copies(problem, plan(problem, "tflms", threshold=2, ahead=1, groupby=3), "dram")) == 2
    assert len(copies(problem, plan(problem, "tflms", threshold=2, ahead=1, groupby=4), "dram")) == 1


def test_tuning_takes_the_largest_threshold_that_passes():
    # Keeping all takes 60. With a ratio of 1 and 59 to be had, a0 alone goes; then the largest lead that fits.
    problem = chain(4, on=machine(hbm=59))
    schedule = plan(problem, "tflms", memory_ratio=1.0)
    assert copies(problem, schedule) == ["a0"]
    assert peak_bytes(problem, schedule)["hbm"] <= 59


def test_a_tenth_of_the_free_memory_is_left_alone():
    problem = chain(4, on=machine(hbm=66))  # 0.9 of 66 is 59
    assert copies(problem, plan(problem, "tflms")) == ["a0"]
    assert copies(problem.with_budget(67), plan(problem.with_budget(67), "tflms")) == []


def test_the_least_budget_counts_the_ratio():
    problem = chain(4, on=machine(hbm=20))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem, "tflms")
    # Everything out and back on demand: the batch, which stays, two gradients and one activation at bwd3. 0.9 of 45 is 40.
    assert caught.value.least_bytes == 45


@pytest.mark.parametrize("options", [{"sync": 4}, {"threshold": 0}, {"ahead": 0}, {"memory_ratio": 0.0}, {"version": 1}])
def test_settings_that_make_no_sense(options):
    with pytest.raises(BadInput):
        plan(chain(2), "tflms", **options)


# -- version 3 --------------------------------------------------------------------------------------------------------------------------


def test_version_3_sends_out_early_what_it_had_to_reclaim_the_step_before():
    # In four slots the batch, a0 and a1 are reclaimed when fwd3, fwd4 and the loss find no room. From then on each leaves behind its last use.
    problem = chain(5, on=machine(hbm=40))
    found = lines(problem, version=3)
    for name, op in (("batch", "fwd1"), ("a0", "fwd2"), ("a1", "fwd3")):
        assert found.index(f"copy {name} hbm -> dram") < found.index(f"compute {op}")
    assert found.index("copy a1 dram -> hbm") == found.index("compute bwd2") - 2  # on demand
    assert simulate(problem, plan(problem, "tflms", version=3)).seconds == 11 + 3  # only the ways back are waited for


def test_version_3_takes_the_first_that_is_large_enough():
    b = GraphBuilder()
    small, large, other = (b.storage(name, size, Role.ACTIVATION) for name, size in (("small", 5), ("large", 20), ("other", 20)))
    b.op("f0", FORWARD, [], [small])
    b.op("f1", FORWARD, [], [large])
    b.op("f2", FORWARD, [], [other])
    b.op("f3", FORWARD, [other], [], workspace_bytes=25)
    b.op("f4", FORWARD, [small, large], [])
    problem = b.problem(machine(hbm=50), cyclic=False)
    assert copies(problem, plan(problem, "tflms", version=3)) == ["large"]  # 20 bytes are missing, and small is idle longest


def test_version_3_in_a_loop_and_below_its_least():
    problem = chain(4, weight_bytes=5, state_bytes=20)
    tight = problem.with_budget(int(0.6 * peak_bytes(problem, plan(problem, "keep_all"))["hbm"]))
    assert peak_bytes(tight, plan(tight, "tflms", version=3))["hbm"] <= tight.budget_bytes
    with pytest.raises(InfeasibleBudget) as caught:
        plan(chain(5, on=machine(hbm=29)), "tflms", version=3)
    assert caught.value.least_bytes == 30
