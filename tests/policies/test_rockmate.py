import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain
from reading import recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import InfeasibleBudget
from tierwise.ir import Role, peak_bytes
from tierwise.policies import plan
from tierwise.policies._chain import chain_of
from tierwise.policies._rotor import Choice, Rotor, Stage
from tierwise.simulate import simulate

# -- the chain --------------------------------------------------------------------------------------------------------------------------


def test_a_step_as_a_chain():
    problem = transformer(layers=3)
    found = chain_of(problem, most=10)
    names = [op.name for op in problem.graph.ops]
    assert [names[s.forward[0]] for s in found.segments] == ["norm1.0", "norm1.1", "norm1.2"]
    assert [names[s.backward[0]] for s in found.segments] == ["drop2'.0", "drop2'.1", "drop2'.2"]
    assert [names[op] for op in found.turn] == ["loss"]
    assert found.head == () and [names[op] for op in found.tail] == ["add1'.0"]  # behind all that reads what forward made
    kinds = {storage.name: found.kinds[storage.id] for storage in problem.graph.storages}
    assert kinds["x"] == ("fixed", -1) and kinds["z.0"] == ("between", 0) and kinds["g.1"] == ("own", 1)
    assert kinds["dx.2"] == ("gradient", 2) and kinds["dz"] == ("gradient", 3)  # the turn is number 3
    assert found.fixed_bytes == 2  # x


def test_long_chains_are_joined():
    assert [len(s.forward) for s in chain_of(chain(10), most=4).segments] == [3, 3, 3, 1]


def test_what_is_taken_over_in_place_belongs_to_one_segment():
    # conv -> a, then a relu in place, which a cut at convolutions leaves with the conv; a conv in place would join the two.
    b = GraphBuilder()
    x, a, c, e, d = (b.storage(n, 10, Role.INPUT if n == "x" else Role.ACTIVATION) for n in "xaced")
    b.op("f0", FORWARD, [x], [a], kind="conv2d")
    b.op("f1", FORWARD, [a], [c], kind="conv2d", in_place=((a, c),))
    b.op("f2", FORWARD, [c], [e], kind="conv2d")
    b.op("loss", BACKWARD, [e], [d], kind="loss")
    b.op("b2", BACKWARD, [d, c], [b.storage("g", 10, Role.ACTIVATION)], kind="conv2d_backward")
    found = chain_of(b.problem(), most=10)
    assert [s.forward for s in found.segments] == [(0, 1), (2,)]


# -- the dynamic program ----------------------------------------------------------------------------------------------------------------


def test_rotor_on_three_equal_segments():
    # Keep all: 1 unit saved and 1 handed on for each of three, and one for the turn. Nothing saved: a second more, in backward.
    keep, drop = Choice(1, 2, 1, 0.0), Choice(0, 2, 2, 1.0)
    stages = [Stage(1.0, (keep, drop), 2, 1, 0, 0) for _ in range(3)] + [Stage(0.0, (Choice(0, 1, 1, 0.0),), 1, 0, 0, 0)]
    rotor = Rotor(stages, 8)
    assert list(rotor.best[3:]) == [7, 5, 5, 4, 3, 3]
    # Four: run to the last with nothing saved (2), do it keeping all (1), then the other two keeping all (2).
    assert list(rotor.steps(4)) == [
        ("forward", 0, -1), ("forward", 1, -1), ("forward", 2, 0), ("turn", 3, 0), ("backward", 2, 0),
        ("forward", 0, 0), ("forward", 1, 0), ("backward", 1, 0), ("backward", 0, 0),
    ]  # fmt: skip
    assert list(rotor.steps(7)) == [
        ("forward", 0, 0), ("forward", 1, 0), ("forward", 2, 0), ("turn", 3, 0), ("backward", 2, 0), ("backward", 1, 0), ("backward", 0, 0)
    ]  # fmt: skip


# -- the policy -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 6])
def test_on_a_chain_of_single_ops_it_is_as_good_as_the_best_plan_there_is(length):
    for budget in range(30, 30 + 10 * length, 10):
        problem = chain(length).with_budget(budget)
        outcome = []
        for name, options in (("rockmate", {}), ("checkmate", {"solver": "exact"})):
            try:
                outcome.append(simulate(problem, plan(problem, name, **options)).seconds)
            except InfeasibleBudget as refusal:
                outcome.append(("at least", refusal.least_bytes))
        assert outcome[0] == outcome[1]


def test_equal_layers_are_solved_once():
    problem = transformer(layers=6).with_budget(200)
    schedule = plan(problem, "rockmate")  # the first layer's backward ends differently: nobody wants the gradient of x
    assert schedule.notes[0].startswith("6 blocks, 2 of them different")
    assert peak_bytes(problem, schedule)["hbm"] <= 200


def test_cheap_work_goes_first():
    # Of all single ops, the dropout of attention gives the most for a quarter of a second: 3r = 12 bytes.
    problem = transformer(layers=4)
    whole = peak_bytes(problem, plan(problem, "keep_all"))["hbm"]
    little = recomputed(problem, plan(problem.with_budget(whole - 12), "rockmate"))
    assert len(little) == 1 and little[0].startswith("drop0")
    more = recomputed(problem, plan(problem.with_budget(160), "rockmate"))
    assert not {"qkv", "proj", "up", "down"} & {name.partition(".")[0] for name in more}


def test_less_memory_never_takes_less_time():
    problem = transformer(layers=5)
    seconds = [simulate(problem, plan(problem.with_budget(budget), "rockmate")).seconds for budget in (300, 220, 160, 110, 80)]
    assert seconds == sorted(seconds)
    assert kept_for_backward(problem, plan(problem.with_budget(80), "rockmate")) < 80


def test_the_least_budget_works():
    problem = transformer(layers=5)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(problem.with_budget(30), "rockmate")
    least = caught.value.least_bytes
    assert peak_bytes(problem, plan(problem.with_budget(least), "rockmate"))["hbm"] == least
