from problems import BACKWARD, FORWARD, GraphBuilder, chain
from reading import recomputed
from transformer import kept_for_backward, transformer

from tierwise.ir import Role
from tierwise.policies import plan


def test_cheap_ops_are_computed_again_from_what_is_kept_anyway():
    # gelu's input is kept for its own backward: a1 comes back from a0 for nothing. a3 is read at once.
    problem = chain(4, kinds=("matmul", "gelu"))
    assert recomputed(problem, plan(problem, "echo")) == ["fwd1"]


def attention(steps: int = 3, *, query: int = 2, keys: int = 40):
    """Bahdanau's attention: at each step the keys, the same for all, plus a query of that step, through tanh, into a product."""
    b = GraphBuilder()
    x = b.storage("x", 5, Role.INPUT)
    k = b.storage("k", keys, Role.ACTIVATION)
    b.op("keys", FORWARD, [x], [k], kind="matmul")
    made = []
    for t in range(steps):
        q, s, e, c = (b.storage(f"{n}{t}", z, Role.ACTIVATION) for n, z in (("q", query), ("s", keys), ("e", keys), ("c", 1)))
        b.op(f"query{t}", FORWARD, [x], [q], kind="matmul")
        b.op(f"sum{t}", FORWARD, [k, q], [s], kind="add")
        b.op(f"tanh{t}", FORWARD, [s], [e], kind="tanh", in_place=((s, e),))
        b.op(f"score{t}", FORWARD, [e], [c], kind="matmul")
        made.append((e, c))
    d = b.storage("d", 1, Role.ACTIVATION)
    b.op("loss", BACKWARD, [c for _, c in made], [d], kind="loss")
    for t, (e, _) in reversed(list(enumerate(made))):
        g = b.storage(f"de{t}", keys, Role.ACTIVATION)
        b.op(f"score{t}'", BACKWARD, [d, e], [g], kind="matmul_backward")
        b.op(f"tanh{t}'", BACKWARD, [g, e], [b.storage(f"ds{t}", keys, Role.ACTIVATION)], kind="tanh_backward")
    return b.problem()


def test_what_pays_only_together_is_dropped_together():
    # One e of 40 would need the keys (40) and a query (2) to be kept; three of them need the keys once.
    problem = attention(steps=3)
    schedule = plan(problem, "echo")
    assert recomputed(problem, schedule) == ["sum2", "tanh2", "sum1", "tanh1", "sum0", "tanh0"]
    assert kept_for_backward(problem, schedule) == 40 + 3 * 2
    assert recomputed(attention(steps=1), plan(attention(steps=1), "echo")) == []


def test_nothing_is_dropped_for_what_is_as_large():
    assert recomputed(attention(steps=3, query=30), plan(attention(steps=3, query=30), "echo")) == []  # 3·40 against 40 + 3·30


def test_products_are_never_computed_again():
    problem = transformer(layers=2, r=8)
    schedule = plan(problem, "echo")
    assert not {"qkv", "scores", "context", "proj", "up", "down"} & {name.partition(".")[0] for name in recomputed(problem, schedule)}
    # Dropped: both norms, gelu, and the softmax, its dropout and mask (5r) for the scores (2r) they are made from. The masks of the other
    # dropouts are smaller than what goes into them.
    assert kept_for_backward(problem, schedule) == 2 * (34 + 5 * 8 - 2 - 2 - 8 - 3 * 8)


def test_a_state_handed_on_from_product_to_product_stays():
    # c1 = c0 + tanh(w·c0), c2 = c1 + tanh(w·c1): a sum is as large as the sum before it and what was added, and reaches no further back.
    b = GraphBuilder()
    state = b.storage("c0", 10, Role.INPUT)
    states, gates = [state], []
    for t in range(3):
        p, g, c = (b.storage(f"{n}{t}", 10, Role.ACTIVATION) for n in ("p", "g", "c"))
        b.op(f"product{t}", FORWARD, [state], [p], kind="matmul")
        b.op(f"tanh{t}", FORWARD, [p], [g], kind="tanh")
        b.op(f"sum{t}", FORWARD, [state, g], [c], kind="add")
        gates.append(g)
        states.append(c)
        state = c
    d = b.storage("d3", 10, Role.ACTIVATION)
    b.op("loss", BACKWARD, [state], [d], kind="loss")
    for t in reversed(range(3)):
        e, f = (b.storage(f"{n}{t}", 10, Role.ACTIVATION) for n in ("e", "f"))
        b.op(f"tanh{t}'", BACKWARD, [d, gates[t]], [e], kind="tanh_backward")
        b.op(f"product{t}'", BACKWARD, [e, states[t]], [f], kind="matmul_backward")
        d = f
    problem = b.problem()
    assert recomputed(problem, plan(problem, "echo")) == []
