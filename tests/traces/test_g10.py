from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.reproductions import g10 as reproduction
from benchmarks.reproductions._g10_executor import execute, with_books
from tierwise.errors import BadFile
from tierwise.ir import Phase, Role, check_graph, check_schedule
from tierwise.ir.text import graph_lines
from tierwise.policies._moves import Move
from tierwise.simulate import simulate
from tierwise.traces import g10, load_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces" / "g10"  # not part of the repository


def kernel(place, kind, time_ms, inputs, outputs, *, workspace=0, visit=None):
    """A kernel of the form; the order of a visit is that of the ids unless given."""
    touched = visit or sorted({*inputs, *outputs})
    return {
        "id": place,
        "type": kind,
        "node": place,
        "time_ms": time_ms,
        "inputs": inputs,
        "outputs": outputs,
        "visit": touched,
        "workspace_bytes": workspace,
    }


def tensor(place, nbytes, kind, *, lasting=False):
    return {"id": place, "bytes": nbytes, "is_global": lasting, "kind": kind}


def small() -> dict:
    """Ids leave gaps. 10: weight, 11: running mean, 20: input, 30 and 31: activations, 32: never read, 40 to 42: gradients.

    Forward reads an input nobody wrote and works on 30 in place; backward reads 30 and 31 again; the update is in the midst of it.
    """
    return {
        "source": "made up", "model": "small", "batch": 1, "loss_kernel": 3,
        "machine": {"gpu_bytes": 1000, "pcie_bytes_per_second": 30.0, "ssd_read_bytes_per_second": 10.0, "ssd_write_bytes_per_second": 5.0,
                    "host_bytes": 500, "page_bytes": 4, "ssd_latency_us": 20, "system_latency_us": 45, "alloc_us_per_byte": 0.5},
        "tensors": [tensor(10, 40, "weight", lasting=True), tensor(11, 4, "norm_running_mean", lasting=True), tensor(20, 8, "input"),
                    tensor(30, 100, "activation"), tensor(31, 100, "activation"), tensor(32, 16, "norm_saved"),
                    tensor(40, 100, "grad_activation"), tensor(41, 40, "grad_weight"), tensor(42, 4, "grad_activation")],
        "kernels": [
            kernel(0, "Conv2d_Forward", 1000.0, [20, 10], [30], workspace=50),
            kernel(1, "BatchNorm2d_Forward", 500.0, [30, 11], [31, 32, 11], visit=[32, 31, 30, 11]),
            kernel(2, "ReLU_Forward", 500.0, [30], [30]),
            kernel(3, "makeLoss", 1000.0, [31], [40]),
            kernel(4, "Conv2d_Backward_Weight", 1000.0, [40, 30], [41]),
            kernel(5, "Conv2d_Apply_Grad", 500.0, [41], [10]),
            kernel(6, "Conv2d_Backward_Input", 1000.0, [40, 31], [42]),
        ],
        "published": {"ideal_s": 5.5, "flashneuron_s": None, "g10_gds_ssd_s": 99.0},
        "published_sensitivity": {"by_ssd_GiB_per_s_at_pcie_32_GiB_per_s": {"6.4": {"flashneuron_s": 7.0}}},
        "planning_line_bytes": {"g10_gds_ssd": 1050},
        "plans": {"flashneuron": [[2, 31, "ssd"]], "g10_gds_ssd": [[2, 31, "host"], [3, 31, "gpu"]]},
    }  # fmt: skip


@pytest.fixture
def trace(tmp_path) -> g10.G10Trace:
    return g10.load(saved(tmp_path, small()))


def saved(folder: Path, document: object) -> Path:
    path = folder / "small-1.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_tensors_are_born_where_they_are_first_touched_and_then_changed_in_place(trace):
    check_graph(trace.problem.graph)
    assert list(graph_lines(trace.problem.graph)) == [
        "0 forward Conv2d_Forward.0: weight.10 -> input.20, activation.30",
        "1 forward BatchNorm2d_Forward.1: activation.30, norm_running_mean.11 -> activation.31, norm_saved.32, norm_running_mean.11!",
        "2 forward ReLU_Forward.2: activation.30 -> activation.30!",
        "3 backward makeLoss.3: activation.31 -> grad_activation.40",
        "4 backward Conv2d_Backward_Weight.4: grad_activation.40, activation.30 -> grad_weight.41",
        "5 update Conv2d_Apply_Grad.5: grad_weight.41 -> weight.10",
        "6 backward Conv2d_Backward_Input.6: grad_activation.40, activation.31 -> grad_activation.42",
    ]
    roles = {s.name: (s.role, s.lasting) for s in trace.problem.graph.storages}
    assert roles["weight.10"] == (Role.PARAM, True)
    assert roles["norm_running_mean.11"] == (Role.BUFFER, True)
    assert roles["grad_weight.41"] == (Role.GRAD, False)
    assert roles["input.20"] == roles["grad_activation.40"] == (Role.ACTIVATION, False)
    assert [op.kind for op in trace.problem.graph.ops] == [
        "conv2d",
        "batchnorm2d",
        "relu",
        "makeloss",
        "conv2d_backward",
        "update",
        "conv2d_backward",
    ]
    assert trace.problem.graph.ops[0].workspace_bytes == 50
    assert [op.phase for op in trace.problem.graph.ops].index(Phase.BACKWARD) == trace.loss_op == 3


def test_one_cold_step_on_the_files_machine(trace):
    assert not trace.problem.cyclic
    assert trace.problem.device_seconds == (1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 1.0)
    rates = {(link.src, link.dst): dict(link.lanes) for link in trace.problem.machine.links}
    assert rates == {
        ("hbm", "nvme"): {"disk write": 5.0}, ("nvme", "hbm"): {"disk read": 10.0},
        ("hbm", "dram"): {"host write": 25.0}, ("dram", "hbm"): {"host read": 20.0},
    }  # fmt: skip
    assert (trace.problem.budget_bytes, trace.problem.machine.capacity("dram")) == (1000, 500)


def test_the_other_facts_speak_of_storages(trace):
    assert trace.name == "small-1"
    assert trace.published == {"ideal": 5.5, "flashneuron": None, "g10_gds_ssd": 99.0}
    assert trace.visit[1] == (5, 4, 3, 1)
    assert trace.plans["g10_gds_ssd"] == (g10.Move(2, 4, "dram"), g10.Move(3, 4, "hbm"))
    assert trace.planning_line_bytes == {"g10_gds_ssd": 1050}
    assert (trace.page_bytes, trace.alloc_seconds_per_byte) == (4, 0.5e-6)
    assert (trace.disk_latency_seconds, trace.host_latency_seconds) == pytest.approx((65e-6, 45e-6))


def test_another_machine_for_a_sweep(trace):
    faster = trace.on(bus_bytes_per_second=100.0, disk_bytes_per_second=40.0, host_bytes=0)
    assert faster.machine.link("hbm", "nvme").bytes_per_second == faster.machine.link("nvme", "hbm").bytes_per_second == 40.0
    assert faster.machine.link("dram", "hbm").bytes_per_second == 60.0
    assert faster.machine.capacity("dram") == 0
    assert trace.on().machine.link("dram", "hbm").bytes_per_second == 20.0
    assert ("hbm", "dram") not in trace.on(bus_bytes_per_second=40.0, disk_bytes_per_second=40.0).machine.link_between


def test_without_updates_globals_are_only_read(trace):
    ops = trace.without_updates().graph.ops
    assert (ops[1].reads, ops[1].mutates) == ((3, 1), ())
    assert (ops[5].reads, ops[5].writes) == ((7, 0), ())
    assert ops[2].mutates == (3,)


def test_load_trace_knows_the_form(tmp_path):
    assert isinstance(load_trace(saved(tmp_path, small())), g10.G10Trace)


def test_what_a_file_may_leave_out(tmp_path):
    bare = small()
    for key in ("source", "model", "batch", "published_sensitivity", "planning_line_bytes", "plans"):
        del bare[key]
    for each in bare["kernels"]:
        del each["visit"], each["node"], each["workspace_bytes"]
    trace = g10.load(saved(tmp_path, bare))
    assert trace.plans == {}
    assert trace.visit[1] == (1, 3, 4, 5)
    assert reproduction.rows([saved(tmp_path, bare)])


def edited(path: str, value: object) -> dict:
    document = copy.deepcopy(small())
    *way, last = path.split("/")
    place: object = document
    for word in way:
        place = place[int(word)] if isinstance(place, list) else place[word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    "document, said",
    [
        ("{", "not JSON"),
        ([1], "one JSON object"),
        ({"ops": []}, "it has no 'kernels'"),
        (edited("machine/gpu_bytes", None), "'gpu_bytes' is missing"),
        (edited("machine/gpu_bytes", -1), "gpu_bytes is -1"),
        (edited("machine/pcie_bytes_per_second", 0), "pcie_bytes_per_second is 0"),
        (edited("kernels/0/time_ms", "1"), "time_ms is '1'"),
        (edited("kernels/0/inputs", [99]), "tensor 99"),
        (edited("kernels/0/visit", [10, 20]), "it touches [10, 20, 30]"),
        (edited("tensors/0/bytes", 1.5), "bytes is 1.5"),
        (edited("tensors/0/is_global", 1), "is_global of tensor 10"),
        (edited("tensors/1/id", 10), "the same id"),
        (edited("loss_kernel", 7), "loss_kernel is 7"),
        (edited("published", []), "of another form"),
        (edited("plans/flashneuron", [[1, 30]]), "of another form"),
        (edited("plans/flashneuron", [[1, 30, "moon"]]), "'moon' is missing"),
    ],
)
def test_files_that_are_not_traces_are_refused_in_one_sentence(tmp_path, document, said):
    with pytest.raises(BadFile, match=r"small-1\.json") as caught:
        g10.load(saved(tmp_path, document))
    assert said in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(BadFile, match="cannot read"):
        g10.load("nowhere.json")


# -- the artifact's executor -----------------------------------------------------------------------------------------------------------


def executed(trace, *moves: Move) -> list[float]:
    """When each kernel starts."""
    problem = with_books(trace.without_updates())
    schedule = execute(problem, moves, trace.visit)
    check_schedule(problem, schedule)
    starts = {schedule.steps[span.step].op: span.start for span in simulate(problem, schedule).spans if span.lane == "gpu"}
    return [starts[op] for op in sorted(starts)]


IN_CORE = [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.5]


def test_a_tensor_goes_when_its_copy_ends_and_is_fetched_on_demand(tmp_path, trace):
    # 31 to the host at kernel 2 (1.5): 100 bytes take 4 s, so the loss at 2 still has it, and so has kernel 6 at 4.5.
    assert executed(trace, Move(2, 4, "dram")) == IN_CORE
    # In half a second it is gone when the loss is about to start, which waits 10 s for the disk; then it is here to stay.
    faster = g10.load(saved(tmp_path, edited("machine/pcie_bytes_per_second", 205.0)))
    assert executed(faster, Move(2, 4, "dram")) == [0.0, 1.0, 1.5, 12.0, 13.0, 14.0, 14.5]


def test_the_liberties_of_the_artifact(trace):
    # A weight of 40 takes 1.6 s to the host, from 1.0 to 2.6: gone, and at kernel 5 it is back at no cost.
    assert executed(trace, Move(1, 0, "dram")) == IN_CORE
    # 31 fetched at kernel 3, long before its copy out ends: from the host, 5 s; the loss waits until 7, and then all is as before.
    late = executed(trace, Move(2, 4, "dram"), Move(3, 4, "hbm"))
    assert late[:4] == [0.0, 1.0, 1.5, 7.0]
    # At 5.5 the copy out ended and 31 was gone although it had just been fetched: kernel 6 waits for the disk, 10 s from 9.5 on.
    assert late[4:] == [8.0, 9.0, 19.5]


# -- published -------------------------------------------------------------------------------------------------------------------------


def test_rows_of_a_small_trace(tmp_path):
    rows = {row["way"]: row for row in reproduction.rows([saved(tmp_path, small())])}
    assert rows["keep_all"]["seconds"] == 5.5
    assert rows["flashneuron"]["published_seconds"] is None
    assert rows["flashneuron, disk 6.4 GiB/s, bus 32 GiB/s"]["published_seconds"] == 7.0
    assert {
        "g10, disk, own plan, capacity binds the planner",
        "g10, disk, published plan, capacity binds the planner",
        "g10, disk, capacity enforced",
    } <= rows.keys()
    keys = "case way budget_bytes peak_bytes seconds ratio predicted_seconds predicted_peak_bytes published_seconds deviation why"
    assert all(list(row) == keys.split() for row in rows.values())


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
def test_published_seconds_of_bert():
    rows = {row["way"]: row for row in reproduction.rows([PUBLISHED / "BERT_Base-256.json"])}
    for way in (
        "keep_all",
        "flashneuron",
        "g10, disk, published plan, capacity binds the planner",
        "g10, disk and host, published plan, capacity binds the planner",
    ):
        assert abs(rows[way]["deviation"]) < 1e-5, way
    assert abs(rows["flashneuron, ties by id"]["deviation"]) < 0.03
    for tiers in ("disk", "disk and host"):
        assert abs(rows[f"g10, {tiers}, own plan, capacity binds the planner"]["deviation"]) < 0.05
    assert rows["g10, disk and host, capacity enforced"]["peak_bytes"] <= rows["g10, disk and host, capacity enforced"]["budget_bytes"] == 40 << 30
