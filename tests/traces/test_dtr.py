from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from tierwise.errors import BadFile, InfeasibleBudget, RecomputeLimit
from tierwise.ir import Phase, Role, check_graph, check_schedule, peak_bytes
from tierwise.ir.text import graph_lines, schedule_lines
from tierwise.policies import dtr as policy
from tierwise.policies import keep_all
from tierwise.simulate import simulate
from tierwise.traces import dtr, load_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces" / "dtr"  # not part of the repository


def op(place, name, time_ns, inputs, outputs, *, aliases=(), mutates=()):
    return {"id": place, "name": name, "time_ns": time_ns, "inputs": inputs, "outputs": outputs, "aliases": aliases, "mutates": mutates}


def storage(place, nbytes, born, released_after=None, *, constant=False):
    return {"id": place, "bytes": nbytes, "is_constant": constant, "born": born, "released_after": released_after}


def small() -> dict:
    """x -> f0 -> a, v views a, f1(v) -> b, f2(b) -> c, g(c, v) -> d. The program holds d; b goes after f2, a and c after g.

    Tensors 0 to 5 are x, a, v, b, c and d; storages 0 to 4 are x, a, b, c and d. The peak is at f2: x, a, b and c.
    """
    return {
        "ops": [
            op(0, "f0", 5, [0], [1]),
            op(1, "view", 1, [1], [2], aliases=[[2, 1]]),
            op(2, "f1", 3, [2], [3]),
            op(3, "f2", 2, [3], [4]),
            op(4, "g", 4, [4, 2], [5]) | {"phase": "backward"},
        ],
        "storages": [storage(0, 4, 0, constant=True), storage(1, 10, 0, 4), storage(2, 10, 2, 3), storage(3, 10, 3, 4), storage(4, 2, 4)],
        "tensor_storage": [0, 1, 1, 2, 3, 4],
        "held_at_end": [0, 5],
        "backward_start_op": 4,
        "peak_bytes": 34,
        "published": {"simulated_slowdown": {"lru": {"0.9": 1.4}}, "prototype": {"same_workload": False}},
        "model": "small",
    }


def saved(folder: Path, document, name: str = "small.json") -> Path:
    path = folder / name
    data = json.dumps(document).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def replay(trace, budget_bytes: int, heuristic: str = "h_dtr", **more):
    """The schedule within the budget, legal, and its nanoseconds."""
    problem = trace.problem.with_budget(budget_bytes)
    schedule = policy.plan(problem, heuristic=heuristic, **trace.options, **more)
    check_schedule(problem, schedule)
    return list(schedule_lines(problem.graph, schedule)), round(simulate(problem, schedule).seconds * 1e9, 6)


# -- the form ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small.json", "small.json.gz"])
def test_a_trace_becomes_one_cold_step(tmp_path, name):
    trace = load_trace(saved(tmp_path, small(), name))
    problem = trace.problem
    assert list(graph_lines(problem.graph)) == [
        "0 forward constants0:  -> constant0",
        "1 forward f00: constant0 -> f00",
        "2 forward view1: f00 -> view1",
        "3 forward f12: view1, f00 -> f12",  # who reads a view reads the bytes it shows
        "4 forward f23: f12 -> f23",
        "5 backward g4: f23, view1, f00 -> g4",
    ]
    assert [(s.nbytes, s.lasting) for s in problem.graph.storages] == [(4, True), (10, False), (10, False), (10, False), (2, True), (0, False)]
    assert problem.graph.storages[0].role is Role.BUFFER and problem.graph.storages[4].role is Role.GRAD
    assert not problem.cyclic and problem.budget_bytes == trace.peak_bytes == 34
    assert problem.device_seconds == (0, 5e-9, 1e-9, 3e-9, 2e-9, 4e-9)
    assert trace.options == {
        "views": {5: 1},
        "inputs": {1: (0,), 2: (1,), 3: (5,), 4: (2,), 5: (3, 5)},
        "released_after": {1: 5, 2: 4, 3: 5},
        "held": (0, 4),
        "evict_gradients": True,
    }
    assert trace.name == "small" and trace.published == {"lru": {"0.9": 1.4}}


def test_everything_kept_needs_the_peak_of_the_file(tmp_path):
    trace = dtr.load(saved(tmp_path, small()))
    schedule = keep_all.plan(trace.problem)
    assert peak_bytes(trace.problem, schedule)["hbm"] == 34
    assert round(simulate(trace.problem, schedule).seconds * 1e9) == 15


# -- the replay -------------------------------------------------------------------------------------------------------------------------


def test_eviction_undoes_views_and_each_view_runs_again(tmp_path):
    trace = dtr.load(saved(tmp_path, small()))
    lines, nanoseconds = replay(trace, 30)
    assert lines == [
        "compute constants0", "compute f00", "compute view1", "compute f12",
        "free f00 hbm", "free view1 hbm", "compute f23",  # b is locked: a is all there is
        "free f12 hbm", "recompute f00", "recompute view1", "compute g4", "free f00 hbm", "free view1 hbm", "free f23 hbm",
    ]  # fmt: skip
    assert nanoseconds == 15 + 5 + 1


def test_at_the_peak_nothing_is_evicted(tmp_path):
    assert replay(dtr.load(saved(tmp_path, small())), 34)[1] == 15


def test_below_what_one_op_touches_there_is_nothing_left_to_evict(tmp_path):
    trace = dtr.load(saved(tmp_path, small()))
    assert replay(trace, 26)[1] == 21  # g: x, a, c and d
    with pytest.raises(InfeasibleBudget) as caught:
        replay(trace, 25)
    assert not isinstance(caught.value, RecomputeLimit)


def test_more_recomputation_than_allowed(tmp_path):
    trace = dtr.load(saved(tmp_path, small()))
    with pytest.raises(RecomputeLimit):
        replay(trace, 30, recompute_limit=0.39)  # 6 of 15 ns is 0.4
    assert replay(trace, 30, recompute_limit=0.4)[1] == 21


def test_what_the_program_holds_is_brought_back_at_the_end(tmp_path):
    document = small()
    document["held_at_end"] = [5, 2]  # d, and the view of a
    document["storages"][1]["released_after"] = None
    trace = dtr.load(saved(tmp_path, document))
    assert trace.problem.graph.storages[1].lasting and trace.problem.graph.storages[5].lasting
    document["ops"].append(op(5, "wide", 1, [5], [6]))
    document["tensor_storage"].append(5)
    document["storages"].append(storage(5, 20, 5, 5))
    trace = dtr.load(saved(tmp_path, document))
    lines, _ = replay(trace, 30)
    assert lines[-6:] == ["free f00 hbm", "free view1 hbm", "compute wide5", "free wide5 hbm", "recompute f00", "recompute view1"]


def test_a_constant_is_charged_where_it_appears(tmp_path):
    document = small()
    document["storages"].append(storage(5, 6, 3, -1, constant=True))  # before f2, and never freed, though the program lets it go at once
    document["tensor_storage"].append(5)
    trace = dtr.load(saved(tmp_path, document))
    assert [o.name for o in trace.problem.graph.ops][4:6] == ["constants3", "f23"]
    assert trace.released_after == {1: 6, 2: 5, 3: 6}
    assert replay(trace, 40)[1] == 15
    lines, nanoseconds = replay(trace, 33)
    assert nanoseconds == 21 and lines.index("free f00 hbm") > lines.index("compute constants3")  # it is f2 that has no room: 4 + 6 + 3 · 10
    with pytest.raises(InfeasibleBudget):
        replay(trace, 31)


def test_an_op_that_mutates_writes_a_new_storage(tmp_path):
    document = small()
    document["ops"][2] = op(2, "add_", 3, [2], [3], mutates=[[2, 3]])
    assert replay(dtr.load(saved(tmp_path, document)), 30)[1] == 21


# -- odd but legal ----------------------------------------------------------------------------------------------------------------------


def odd() -> dict:
    """Several outputs, two of them views of one storage, a view of a constant and of a view, an op without outputs, repeated inputs, nothing
    at all in a storage, and one that is never let go."""
    return {
        "ops": [
            op(0, "t", 1, [0], [1], aliases=[[1, 0]]),
            op(1, "pair", 4, [1, 0, 1], [2, 3]),
            op(2, "split", 2, [2], [4, 5], aliases=[[4, 1], [5, 1]]),
            op(3, "view", 1, [4], [6], aliases=[[6, 1]]),
            op(4, "look", 3, [5, 5, 3], []),
            op(5, "sum", 3, [6, 4, 6], [7]),
            op(6, "expand", 1, [7, 6], [8], aliases=[[8, 3]]),
        ],
        "storages": [storage(0, 3, 0, constant=True), storage(1, 8, 1, 6), storage(2, 0, 1, 4), storage(3, 5, 5), storage(4, 2, 7, constant=True)],
        "tensor_storage": [0, 0, 1, 2, 1, 1, 1, 3, 3, 4],
        "held_at_end": [8],
        "peak_bytes": 16,
    }


@pytest.mark.parametrize("heuristic", sorted(policy.HEURISTICS))
def test_odd_traces(tmp_path, heuristic):
    trace = dtr.load(saved(tmp_path, odd(), "odd.json"))
    check_graph(trace.problem.graph)
    assert trace.name == "odd" and trace.published == {}
    assert trace.problem.graph.ops[2].reads == (5, 0) and trace.inputs[2] == (5, 0, 5)
    assert trace.problem.graph.ops[-1].name == "constants7"
    assert all(o.phase is Phase.FORWARD for o in trace.problem.graph.ops)
    for budget in (18, 16):
        assert replay(trace, budget, heuristic)[1] == 15
    with pytest.raises(InfeasibleBudget):
        replay(trace, 15, heuristic)  # sum: the constant, what it views and its output


def test_an_op_needs_what_it_makes_views_of_even_if_it_does_not_say_so(tmp_path):
    document = small()
    document["ops"][1]["inputs"] = []
    assert replay(dtr.load(saved(tmp_path, document)), 30)[1] == 21


def test_views_of_what_the_same_op_makes(tmp_path):
    document = small()
    document["ops"][0] = op(0, "f0", 5, [0], [1, 6], aliases=[[6, 1]])
    document["tensor_storage"].append(1)
    document["ops"][4] = op(4, "g", 4, [4, 2, 6], [5])
    trace = dtr.load(saved(tmp_path, document))
    assert trace.problem.graph.ops[1].reads == (0,) and len(trace.problem.graph.ops[1].writes) == 2
    assert replay(trace, 30)[1] == 21


# -- not a trace ------------------------------------------------------------------------------------------------------------------------


def _without(key):
    return lambda d: d.pop(key)


def _set(*keys, to):
    def change(document):
        *path, last = keys
        for key in path:
            document = document[key]
        document[last] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("tensor_storage"), "not a DTR trace: 'tensor_storage' missing"),
        (_set("ops", 0, "time_ns", to=-1), "time_ns is -1; it must be a number of at least 0"),
        (_set("ops", 0, "time_ns", to="5"), "time_ns is '5'"),
        (_set("ops", 2, "id", to=7), "op 7 stands at place 2"),
        (_set("ops", 3, "inputs", to=[9]), "tensor is 9; there are only 6"),
        (_set("ops", 3, "inputs", to=[5]), "op 3 reads g4 before it is there"),
        (_set("ops", 4, "inputs", to=[5, 2]), "op 4 reads g4 before it is there"),
        (_set("ops", 3, "inputs", to=4), "not iterable"),
        (_set("ops", 3, "outputs", to=[3]), "no op makes tensor 4"),
        (_set("ops", 4, "outputs", to=[5, 3]), "op 4 makes tensor 3, which an op has made before"),
        (_set("ops", 1, "aliases", to=[[2, 3]]), "tensor 2 views storage 3 and lies in storage 1"),
        (_set("ops", 0, "aliases", to=[[1, 1]]), "op 0 views storage 1, which nothing has made"),
        (_set("storages", 1, "bytes", to=-4), "bytes of storage 1 is -4"),
        (_set("storages", 1, "bytes", to=1.5), "bytes of storage 1 is 1.5"),
        (_set("storages", 1, "released_after", to=5), "released_after is 5; there are only 5"),
        (_set("storages", 1, to={"bytes": 3}), "'is_constant' is missing"),
        (_set("storages", 0, "born", to=3), "op 0 reads constant0 before it is there"),
        (_set("tensor_storage", 2, to=17), "storage of a tensor is 17; there are only 5"),
        (_set("held_at_end", to=[77]), "tensor is 77"),
        (_set("ops", to=None), "NoneType"),
        (_set("ops", 1, to=3), "int"),
        (_set("ops", 1, "phase", to="sideways"), "'sideways' is not a valid Phase"),
        (_set("peak_bytes", to=None), "peak_bytes is None"),
        (_set("published", to=[]), "list"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, change, message):
    document = small()
    change(document)
    with pytest.raises(BadFile) as caught:
        dtr.load(saved(tmp_path, document))
    assert message in str(caught.value) and "small.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [dtr.load, load_trace])
def test_files_that_are_no_traces(tmp_path, load):
    with pytest.raises(BadFile, match="No such file"):
        load(tmp_path / "nowhere.json")
    whole = gzip.compress(json.dumps(small()).encode())
    flipped = whole[:60] + b"\0\0\0\0" + whole[64:]
    broken = {"cut.json.gz": whole[:100], "flipped.json.gz": flipped, "text.json": b"hello", "list.json": b"[]", "bytes.json": b"\xff\xfe\x00"}
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadFile, match=name):
            load(tmp_path / name)
    (tmp_path / "other.json").write_text('{"layers": 3}')
    with pytest.raises(BadFile, match="DTR trace"):
        load(tmp_path / "other.json")


# -- the published ones -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(
    ("name", "heuristic", "share"),
    [("resnet32", "h_dtr", "0.2"), ("resnet32", "h_eq", "0.2"), ("resnet32", "msps", "0.3"), ("resnet32", "h_local", "0.5"),
     ("resnet32", "lru", "0.5"), ("transformer", "h_dtr", "0.3"), ("transformer", "msps", "0.6")],
)  # fmt: skip
def test_published_slowdowns(name, heuristic, share):
    trace = load_trace(PUBLISHED / f"{name}.json.gz")
    try:
        _, nanoseconds = replay(trace, math.floor(float(share) * trace.peak_bytes), heuristic)
    except RecomputeLimit:
        assert trace.published[heuristic][share] == ">2"
    else:
        assert round(nanoseconds / 1e9 / sum(trace.problem.device_seconds), 4) == trace.published[heuristic][share]
