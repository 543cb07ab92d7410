import pytest
from problems import awkward, chain, machine
from reading import copied, copied_before

from tierwise.errors import BadInput, InfeasibleBudget
from tierwise.ir import peak_bytes
from tierwise.policies import plan
from tierwise.simulate import simulate


def test_every_map_passes_through_two_buffers():
    # Saved in order: batch, a0 .. a4 (a5 goes straight into the loss). The last two, a3 and a4, are still in their buffers when backward
    # begins; bwd5 takes a4 and the next op a3.
    problem = chain(6)
    schedule = plan(problem, "layrub", mode="inter")
    assert copied(problem, schedule) == ["batch", "a0", "a1", "a2"]
    assert copied_before(problem, schedule, "dram") == {"a2": "bwd4", "a1": "bwd3", "a0": "bwd2", "batch": "bwd1"}


def test_a_buffer_is_reused_when_its_map_is_out():
    # Ten bytes take a second, as a layer does: everything hides.
    problem = chain(6)
    assert simulate(problem, plan(problem, "layrub", mode="inter")).seconds == 13
    # At three seconds a copy: batch is out at 3, when fwd2 wants its buffer at 2, and each of a0, a1 and a2 is out three seconds after the one
    # before it, at 6, 9 and 12: fwd5 waits until then. On the way back bwd3, bwd2, bwd1 and bwd0 wait for three seconds a copy, the first of
    # which begins with bwd4.
    slow = chain(6, on=machine(rate=10 / 3))
    assert simulate(slow, plan(slow, "layrub", mode="inter")).seconds == pytest.approx((12 + 1 + 2) + 4 * 3 + 1)


def test_hybrid_keeps_what_no_layer_reads_as_its_input():
    names = {mode: set(copied(awkward(), plan(awkward(), "layrub", mode=mode, buffers=1))) for mode in ("hybrid", "inter")}
    assert names["inter"] - names["hybrid"] == {"mask", "mean"}  # read by their own layer's backward only


def test_auto_takes_the_first_rung_that_fits():
    problem = chain(8)
    needs = {mode: peak_bytes(problem, plan(problem, "layrub", mode=mode))["hbm"] for mode in ("intra", "hybrid", "inter")}
    assert needs["intra"] > needs["inter"]
    assert not copied(problem, plan(problem.with_budget(needs["intra"]), "layrub"))
    assert copied(problem, plan(problem.with_budget(needs["intra"] - 1), "layrub"))
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(needs["inter"] - 1), "layrub")
    assert caught.value.least_bytes == needs["inter"]


def test_memory_does_not_grow_with_depth():
    needs = [peak_bytes(chain(length), plan(chain(length), "layrub", mode="inter"))["hbm"] for length in (8, 64)]
    assert needs[0] == needs[1]


def test_unknown_words():
    with pytest.raises(BadInput, match="mode is 'all'; layrub knows intra, hybrid, inter and auto"):
        plan(chain(2), "layrub", mode="all")
    with pytest.raises(BadInput, match="buffers is 0; give at least 1"):
        plan(chain(2), "layrub", buffers=0)
