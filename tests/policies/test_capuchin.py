from problems import chain, machine

from tierwise.ir import Compute, Copy
from tierwise.policies import plan
from tierwise.simulate import simulate


def sent(problem, schedule) -> list[str]:
    return [problem.graph.storages[s.storage].name for s in schedule.steps if isinstance(s, Copy) and s.src == "hbm"]


def recomputed(problem, schedule) -> list[str]:
    ops = [s.op for s in schedule.steps if isinstance(s, Compute)]
    return [problem.graph.ops[op].name for place, op in enumerate(ops) if op in ops[:place]]


def test_nothing_is_done_when_everything_fits():
    problem = chain(6).with_budget(80)
    schedule = plan(problem, "capuchin")
    assert not sent(problem, schedule)
    assert not recomputed(problem, schedule)


def test_the_longest_idle_goes_first_and_no_more_than_needed():
    # Everything takes 80; ten too many at the loss and at bwd5. The batch lies idle longest: it goes under fwd1 and is back for bwd0.
    problem = chain(6).with_budget(70)
    schedule = plan(problem, "capuchin")
    assert sent(problem, schedule) == ["batch"]
    assert simulate(problem, schedule).seconds == 13


def test_a_swap_that_hides_beats_a_recomputation():
    problem = chain(8).with_budget(60)
    schedule = plan(problem, "capuchin")
    assert not recomputed(problem, schedule)
    assert simulate(problem, schedule).seconds == 17


def test_what_the_link_cannot_hide_is_computed_again():
    # A hundred seconds for ten bytes each way, and one second to compute them again.
    problem = chain(6, on=machine(rate=0.1)).with_budget(60)
    schedule = plan(problem, "capuchin")
    assert not sent(problem, schedule)
    assert len(recomputed(problem, schedule)) >= 2
    assert simulate(problem, schedule).seconds == 13 + len(recomputed(problem, schedule))


def test_both_ways_mix():
    # Ten bytes take four seconds: the link hides two of the oldest, and one activation is computed again. Recomputing all three would take 28.
    problem = chain(12, on=machine(rate=2.5)).with_budget(110)
    schedule = plan(problem, "capuchin")
    assert len(sent(problem, schedule)) == 2
    assert len(recomputed(problem, schedule)) == 1
    assert simulate(problem, schedule).seconds == 26


def test_cheaper_ops_are_computed_again_first():
    # relu costs a tenth of a conv: with a hopeless link, what relus made is dropped, not what convs made.
    import dataclasses

    problem = chain(8, kinds=("conv2d", "relu"), on=machine(rate=0.01)).with_budget(70)
    seconds = {(op.id, "gpu"): 0.1 if op.kind == "relu" else 1.0 for op in problem.graph.ops}
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, op_seconds=seconds))
    again = recomputed(problem, plan(problem, "capuchin"))
    kinds = {op.name: op.kind for op in problem.graph.ops}
    assert again
    assert {kinds[name] for name in again} == {"relu"}
