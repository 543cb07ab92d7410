import pytest
from problems import BACKWARD, FORWARD, GraphBuilder, chain
from reading import recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import BadInput
from tierwise.ir import Role
from tierwise.policies import plan


def test_marked_blocks_keep_what_goes_in():
    problem = transformer(layers=3)
    assert kept_for_backward(problem, plan(problem, "oneflow")) == 3 * 2
    two = plan(problem, "oneflow", blocks=2)
    assert kept_for_backward(problem, two) == 2 * 2 + 34 + 5 * 4
    assert {name.partition(".")[2] for name in recomputed(problem, two)} == {"0", "1"}
    assert recomputed(problem, plan(problem, "oneflow", blocks=0)) == []


def test_a_clone_starts_when_backward_is_there():
    problem = transformer(layers=2)
    again = recomputed(problem, plan(problem, "oneflow"))
    assert again[: len(again) // 2] == [name for name in again if name.endswith(".1")]  # all of layer 1, then all of layer 0


def test_batch_norm_is_not_cloned():
    # conv -> norm -> relu in place, twice: the norms' bytes, now relu's, stay, and only convolutions are computed again.
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    made, at = [], x
    for i in range(2):
        c, n, r = (b.storage(f"{name}{i}", 10, Role.ACTIVATION) for name in ("c", "n", "r"))
        b.op(f"conv{i}", FORWARD, [at], [c], kind="conv2d")
        b.op(f"norm{i}", FORWARD, [c], [n], kind="batch_norm")
        b.op(f"relu{i}", FORWARD, [n], [r], kind="relu", in_place=((n, r),))
        made.append((at, c, r))
        at = r
    d = b.storage("d", 10, Role.ACTIVATION)
    b.op("loss", BACKWARD, [at], [d], kind="loss")
    for i in (1, 0):
        before, c, r = made[i]
        e, f, g = (b.storage(f"{name}{i}", 10, Role.ACTIVATION) for name in ("e", "f", "g"))
        b.op(f"relu{i}'", BACKWARD, [d, r], [e], kind="relu_backward")
        b.op(f"norm{i}'", BACKWARD, [e, c], [f], kind="batch_norm_backward")
        b.op(f"conv{i}'", BACKWARD, [f, before], [g], kind="conv2d_backward")
        d = g
    problem = b.problem()
    assert recomputed(problem, plan(problem, "oneflow")) == ["conv1", "conv0"]


def test_blocks_are_counted_from_nothing():
    with pytest.raises(BadInput, match="blocks is -1; give 0 or more"):
        plan(chain(2), "oneflow", blocks=-1)
