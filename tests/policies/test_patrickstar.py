from __future__ import annotations

import pytest
from problems import chain, machine

from tierwise.errors import BadInput
from tierwise.ir import Copy, peak_bytes
from tierwise.ir.text import schedule_lines
from tierwise.policies import plan
from tierwise.policies.patrickstar import _Planner
from tierwise.simulate import simulate


def net(length: int = 4, hbm: int = 10_000, **more):
    """Weights of 20 bytes, state of 40, activations of 2."""
    return chain(length, activation_bytes=2, weight_bytes=20, state_bytes=40, cpu_update_seconds=1, on=machine(hbm=hbm), **more)


def fetched(problem, **options) -> list[str]:
    steps = plan(problem, "patrickstar", **options).steps
    return [problem.graph.storages[s.storage].name for s in steps if isinstance(s, Copy) and s.dst == "hbm"]


def test_with_room_for_everything_state_lives_on_the_device():
    problem = net()
    schedule = plan(problem, "patrickstar", chunk_bytes=20)
    assert not any(isinstance(s, Copy) for s in schedule.steps)
    assert set(schedule.home.values()) == {("hbm",)}


def test_chunks_in_order_of_use():
    chunks = _Planner(net(), 40, 0, "dram", "cpu", 1.0).chunks
    names = {s.id: s.name for s in net().graph.storages}
    assert [[names[s] for s in chunk.parameters] for chunk in chunks] == [["w0", "w1"], ["w2", "w3"]]
    assert [(chunk.nbytes, chunk.state_bytes, chunk.uses) for chunk in chunks] == [(40, 80, (0, 1, 7, 8)), (40, 80, (2, 3, 5, 6))]


def test_the_chunk_needed_last_goes():
    # 80 of 100 bytes are used. In forward three weights fit beside the activations: w3 drives out w0. In backward a gradient takes the place of w1.
    problem = net(hbm=100)
    assert fetched(problem, chunk_bytes=20) == ["w0", "w1", "w2", "w3", "w1", "w0"]


def test_what_leaves_is_not_written_and_gradients_are():
    problem = net(hbm=80)
    out = [s for s in plan(problem, "patrickstar", chunk_bytes=20).steps if isinstance(s, Copy) and s.src == "hbm"]
    assert [problem.graph.storages[s.storage].name for s in out] == ["g3", "g2", "g1", "g0"]


def test_a_chunk_moves_whole():
    problem = net(hbm=90)
    lines = [
        line
        for line in schedule_lines(problem.graph, plan(problem, "patrickstar", chunk_bytes=40))
        if line.startswith(("copy w", "free w", "compute f"))
    ]
    assert lines[:8] == ["copy w0 dram -> hbm", "copy w1 dram -> hbm", "compute fwd0", "compute fwd1", "free w0 hbm", "free w1 hbm",
                         "copy w2 dram -> hbm", "copy w3 dram -> hbm"]  # fmt: skip


def test_prefetch_hides_fetches():
    problem = net(6, hbm=140)
    slow, ahead = (simulate(problem, plan(problem, "patrickstar", chunk_bytes=20, prefetch=n)).seconds for n in (0, 2))
    assert ahead < slow


def test_chunks_shrink_where_they_do_not_fit():
    problem = net(hbm=55)
    schedule = plan(problem, "patrickstar")  # one chunk would be all four weights
    assert peak_bytes(problem, schedule)["hbm"] <= 55


def test_options_that_make_no_sense():
    with pytest.raises(BadInput, match="chunk_bytes is 0 and prefetch 0"):
        plan(net(), "patrickstar", chunk_bytes=0)
