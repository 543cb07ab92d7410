"""Runs of chain(4) with numbers worked by hand: four forward ops, the loss, four backward ops, a second each; ten bytes a storage.

chen at 50 bytes keeps the batch, a1 and a3 and runs fwd2 and fwd0 again: 11 seconds. vdnn at 50 copies the batch, a0 and a1 out and in: 9 seconds.
"""

from __future__ import annotations

from dataclasses import replace

from problems import GraphBuilder, chain

from tierwise.ir import Comparison, Compute, Copy, Curve, Free, Graph, Outcome, Phase, Region, RegionCall, Role, Row, Run, Schedule, Span, Timeline
from tierwise.policies import plan
from tierwise.simulate import simulate


def planned(policy: str, budget: int = 50) -> Run:
    problem = chain(4).with_budget(budget)
    schedule = plan(problem, policy)
    timeline = simulate(problem, schedule)
    rows = (
        Row("keep_all", Outcome.DOES_NOT_FIT, peak_bytes=60, seconds=9.0, least_bytes=60),
        Row(policy, Outcome.FITS, peak_bytes=timeline.peak_bytes["hbm"], seconds=timeline.seconds),
    )
    return Run("chain", problem, schedule, timeline, policy=policy, comparisons=(Comparison(budget, 9.0, 9.0, 60, rows),))


def measured(run: Run, *, slower: float = 1.1, more_bytes: int = 1) -> Run:
    """The run with a measurement: everything takes longer, and every role holds a byte more."""
    was = run.predicted
    assert was is not None
    timeline = Timeline(
        seconds=was.seconds * slower,
        peak_bytes={tier: nbytes + more_bytes for tier, nbytes in was.peak_bytes.items()},
        spans=tuple(Span(span.step, span.lane, span.start * slower, span.end * slower) for span in was.spans),
        memory={
            tier: {
                role: Curve(tuple(t * slower for t in curve.seconds), tuple(b + more_bytes for b in curve.nbytes)) for role, curve in roles.items()
            }
            for tier, roles in was.memory.items()
        },
        measured=True,
    )
    losses = (3.0, 2.0, 1.5)
    return replace(run, measured=timeline, losses=losses, untouched_losses=losses, words=("Chosen by hand.",), reserved_bytes=64, unaccounted_bytes=7)


def layered() -> Run:
    """A run of two layers, each a linear and a relu; activations of 10 bytes, weights of 4 with 8 of state in dram. y0 runs again, y1 is copied."""
    b = GraphBuilder()
    x = b.storage("x", 10, Role.INPUT)
    made = []
    for layer in range(2):
        w = b.storage(f"layers.{layer}.linear.weight", 4, Role.PARAM)
        b.storage(f"layers.{layer}.linear.weight.exp_avg", 8, Role.OPTIMIZER_STATE)
        y = b.storage(f"y{layer}", 10, Role.ACTIVATION)
        b.op(f"layers.{layer}.linear.mm", Phase.FORWARD, [x, w], [y], region=layer, seconds=2.0)
        x = b.storage(f"z{layer}", 10, Role.ACTIVATION)
        b.op(f"layers.{layer}.relu", Phase.FORWARD, [y], [x], region=layer)
        made += [y]
    b.op("loss", Phase.BACKWARD, [x, *made], [])
    problem = b.problem()
    graph = Graph(
        problem.graph.ops, problem.graph.storages, (Region(0, "layer", "layers.0"),), (RegionCall(0, 0, "layers.0"), RegionCall(1, 0, "layers.1"))
    )
    problem = type(problem)(graph, problem.machine, problem.costs)
    steps = [Compute(op.id) for op in graph.ops[:-1]]
    steps += [Copy(made[1], "hbm", "dram"), Free(made[1], "hbm"), Copy(made[1], "dram", "hbm")]
    steps += [Compute(0), Compute(len(graph.ops) - 1)]
    home = {s.id: ("dram",) if s.role is Role.OPTIMIZER_STATE else ("hbm",) for s in graph.storages if s.lasting or s.role is Role.INPUT}
    timeline = Timeline(
        6.0, {"hbm": 60}, tuple(Span(i, "gpu", float(i), i + 1.0) for i in range(4)), {"hbm": {"activation": Curve((0.0, 3.0), (20, 60))}}, False
    )
    return Run("layered", problem, Schedule(tuple(steps), home), timeline)
