from __future__ import annotations

from problems import GraphBuilder
from report.example_runs import layered, planned

from tierwise.ir import Compute, Phase, Role, Schedule
from tierwise.report.fates import Fate, Module, fates, module_tree, op_path, recomputations

KEPT, COPIED, RECOMPUTED = Fate.KEPT, Fate.COPIED, Fate.RECOMPUTED


def by_name(run):
    return {run.problem.graph.storages[storage].name: fate for storage, fate in fates(run.problem, run.schedule).items()}


def test_chen_recomputes_every_second_activation():
    run = planned("chen")
    assert by_name(run) == {"batch": KEPT, "a0": RECOMPUTED, "a1": KEPT, "a2": RECOMPUTED, "a3": KEPT}
    assert [run.problem.graph.ops[step.op].name for _, step in recomputations(run.schedule)] == ["fwd2", "fwd0"]


def test_vdnn_copies_what_is_idle_longest():
    assert by_name(planned("vdnn")) == {"batch": COPIED, "a0": COPIED, "a1": COPIED, "a2": KEPT, "a3": KEPT}


def test_the_tree_sums_by_module():
    run = layered()
    tree = module_tree(run.problem, run.schedule)
    assert (tree.kept_bytes, tree.copied_bytes, tree.recomputed_bytes) == (10, 10, 10)  # z1; y1; y0
    assert (tree.recomputed_ops, tree.recomputed_seconds) == (1, 2.0)
    assert (tree.lasting_device_bytes, tree.lasting_elsewhere_bytes) == (8, 16)
    (layers,) = tree.children
    assert [child.name for child in layers.children] == ["0", "1"]
    assert [child.name for child in layers.children[0].children] == ["linear"]
    assert layers.children[1].children[0] == Module("linear", copied_bytes=10, lasting_device_bytes=4, lasting_elsewhere_bytes=8)


def test_alike_means_the_same_bytes_all_the_way_down():
    b = GraphBuilder()
    for layer, nbytes in enumerate((4, 4, 4, 6)):
        b.storage(f"blocks.{layer}.up.weight", nbytes, Role.PARAM)
    x = b.storage("x", 1, Role.INPUT)
    b.op("f", Phase.FORWARD, [x, 0, 1, 2, 3], [])
    home = {storage.id: ("hbm",) for storage in b.storages}
    blocks = module_tree(b.problem(), Schedule((Compute(0),), home)).children[0]
    assert [(child.name, child.alike, child.lasting_device_bytes) for child in blocks.children] == [("0 … 2", 3, 12), ("3", 1, 6)]
    assert blocks.children[0].children == (Module("up", lasting_device_bytes=12),)


def test_where_an_op_belongs():
    b = GraphBuilder()
    for name in ("blocks.3.mlp.up.mm.2", "blocks.3.mlp.up.mm.backward.mm.2", "release blocks.3.mlp.act", "embed", "fwd7"):
        b.op(name, Phase.FORWARD, [], [])
    graph = b.problem().graph
    assert [op_path(graph, op) for op in graph.ops] == [("blocks", "3", "mlp", "up"), ("blocks", "3", "mlp", "up"), ("blocks", "3", "mlp"), (), ()]
