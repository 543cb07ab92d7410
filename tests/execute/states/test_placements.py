"""Wherever parameters, gradients and state live and wherever updates run: losses and parameters have the bits of the same arithmetic at home."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from execute.states.training import REGIONS, Result, adamw, clipped_loop, everywhere, loss_of, net, placed, plain_loop, reference

from tierwise.errors import BadInput, UnknownName
from tierwise.execute.device import Direction
from tierwise.execute.null_device import NullDevice
from tierwise.execute.states.ledger import Ledger
from tierwise.ir.placement import ON_DEVICE, TIERS, UPDATES, Placement


def legal() -> list[Placement]:
    found = []
    for state, update, parameters, gradients in itertools.product(TIERS, UPDATES, TIERS, TIERS[:2]):
        try:
            found.append(Placement(state, update, parameters, gradients))
        except BadInput:
            continue
    return found


MIXED = {
    "embedding": Placement("host", "cpu", gradients="host"),
    "layers.0": Placement("nvme", "streamed", "host", "host"),
    "layers.1": ON_DEVICE,
    "layers.2": Placement("host", "streamed"),
    "head": Placement("nvme", "cpu", "nvme", "host"),
}

_references: dict[tuple, Result] = {}


def expected(steps: int, **options) -> Result:
    key = (steps, *sorted((name, str(value)) for name, value in options.items()))
    if key not in _references:
        _references[key] = reference(steps, **options)
    return _references[key]


def check(result: Result, placements, steps: int, tmp_path, *, loop=plain_loop, make=adamw, dtype=torch.bfloat16, schedule=None, **options) -> None:
    model = net(dtype)
    optimizer = make(model)
    with placed(model, optimizer, placements, directory=tmp_path, **options):
        scheduler = schedule(optimizer) if schedule else None
        losses = []
        for step in range(steps):
            losses.append(loop(model, optimizer, step))
            if scheduler:
                scheduler.step()
    assert losses == result.losses
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, result.parameters[name]), name


def test_there_are_27_ways_to_place_a_region():
    assert len(legal()) == 27  # 3 with state on the device; 2 homes × 2 places × 3 homes of parameters × 2 of gradients


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("placement", legal(), ids=lambda p: f"{p.state}-{p.update}-{p.parameters}-{p.gradients}")
def test_every_placement_trains_to_the_same_bits(placement, update, tmp_path):
    if update == "backward" and placement.parameters == "nvme":
        pytest.skip("parameters come and go alike with both; the mixed placement below has it")
    check(expected(2), everywhere(placement), 2, tmp_path, update=update, masters="fp32", delay=0.0002)


@pytest.mark.parametrize("update", ["after", "backward"])
def test_a_part_stays_where_the_rest_of_its_region_leaves(update, tmp_path):
    away = Placement("host", "cpu", "host", "host")
    placements = {"layers.0": away, "layers.0.up": ON_DEVICE, "layers.1": ON_DEVICE, "layers.1.down": away}
    check(expected(5), placements, 5, tmp_path, update=update, masters="fp32", regions=REGIONS)


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_kinds_at_once_under_random_delays_for_20_steps(seed, update, tmp_path):
    check(expected(20), MIXED, 20, tmp_path, update=update, masters="fp32", delay=0.002, seed=seed)


def test_clipping_accumulation_and_a_scheduler(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=30)  # changes lr and betas in every step

    options = {"loop": clipped_loop, "schedule": schedule}
    check(reference(20, **options), MIXED, 20, tmp_path, masters="fp32", **options)


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_masters_the_bits_are_torchs_own(dtype, update, tmp_path):
    check(expected(6, masters=None, dtype=dtype), MIXED, 6, tmp_path, dtype=dtype, update=update)


def test_masters_of_fp32_parameters_are_the_parameters(tmp_path):
    check(reference(6, dtype=torch.float32), MIXED, 6, tmp_path, dtype=torch.float32, masters="fp32")


OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, maximize=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("masters", [None, "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers(name, masters, tmp_path):
    check(reference(5, masters=masters, make=OPTIMIZERS[name]), MIXED, 5, tmp_path, make=OPTIMIZERS[name], masters=masters)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
def test_torchs_variants_of_adamw(options, tmp_path):
    def make(model):
        return adamw(model, **options)

    check(reference(5, masters=None, make=make, dtype=torch.float32), MIXED, 5, tmp_path, make=make, dtype=torch.float32)


def test_an_optimizer_without_a_formula_runs_where_its_state_is(tmp_path):
    def make(model):
        return torch.optim.Adafactor(model.parameters(), lr=1e-2)

    placements = {"embedding": Placement("host", "cpu", gradients="host"), "layers.0": Placement("host", "cpu", "host"), "head": ON_DEVICE}
    check(reference(5, masters=None, make=make, dtype=torch.float32), placements, 5, tmp_path, make=make, dtype=torch.float32)
    model = net()
    with (
        pytest.raises(BadInput, match="Adafactor runs on whole parameters where their state is"),
        placed(model, make(model), MIXED, directory=tmp_path),
    ):
        pass
    with pytest.raises(BadInput, match="knows Adam, AdamW and SGD, not Adafactor"), placed(model, make(model), {}, masters="fp32"):
        pass


def test_op_by_op_has_the_bits_of_the_compiled_pass(tmp_path):
    check(expected(5), MIXED, 5, tmp_path, masters="fp32", compiled=False)


def test_placements_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(BadInput, match="state on 'device' cannot be updated on 'cpu'"):
        Placement("device", "cpu")
    with pytest.raises(BadInput, match="takes its gradients there"):
        Placement(gradients="host")
    with pytest.raises(UnknownName, match="did you mean 'host'"):
        Placement("hots", "cpu")
    model = net()
    with pytest.raises(UnknownName, match=r"unknown submodule 'layers.7'"), placed(model, adamw(model), {"layers.7": ON_DEVICE}):
        pass
    with pytest.raises(BadInput, match="lives on disk and no disk store was given"), placed(model, adamw(model), {"head": Placement("nvme", "cpu")}):
        pass


@pytest.mark.parametrize("update", ["after", "backward"])
def test_what_updates_write_is_not_taken_for_somebody_else_s_writing(update, tmp_path, monkeypatch):
    """Masters follow parameters that the user wrote to, which reads all of them: not in a step where nobody did."""
    monkeypatch.setattr(Ledger, "refresh", lambda *_: pytest.fail("masters were compared with their parameters"))
    check(expected(3), MIXED, 3, tmp_path, update=update, masters="fp32")


def test_state_that_passes_lets_others_have_the_link_every_second_chunk(monkeypatch):
    turns = []
    monkeypatch.setattr(NullDevice, "let_others", lambda device, direction: turns.append(direction))
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(Placement("host", "streamed")), masters="fp32", delay=0.0) as states:
        loss_of(model, 0).backward()
        optimizer.step()
        states.flush()
        chunks = [len(list(home.unit.chunks())) for home in states.stored]
    assert max(chunks) > 2
    assert turns == [Direction.IN] * sum(-(-count // 2) for count in chunks)


@pytest.mark.parametrize("allowed", [1, 2])
def test_only_so_many_chunks_are_under_way_through_the_device(allowed, monkeypatch):
    """While none can leave, no more of them come than are allowed, although there are three buffers."""
    monkeypatch.setattr("tierwise.execute.states.updates.CHUNKS_AHEAD", allowed)
    may_leave, came = threading.Event(), []

    def before_copy(direction, nbytes):
        if direction is Direction.OUT:
            may_leave.wait()
        else:
            came.append(nbytes)

    model = net()
    optimizer = adamw(model)
    may_leave.set()
    with placed(model, optimizer, everywhere(Placement("host", "streamed")), masters="fp32", delay=0.0, before_copy=before_copy) as states:
        loss_of(model, 0).backward()
        may_leave.clear()
        came.clear()
        optimizer.step()
        while len(came) < allowed:
            time.sleep(0.001)
        time.sleep(0.05)
        came_first = len(came)
        may_leave.set()
        assert came_first == allowed
        states.flush()
        assert len(came) == sum(len(list(home.unit.chunks())) for home in states.stored) > 3


@pytest.mark.parametrize("few", [1, 2, 3])
def test_backward_waits_for_updates_until_gradients_of_so_many_regions_are_left(few):
    """Elements are 408 in the head, 1088 in each of three layers, 384 in the embedding; gradients come in that order, the last layer's first.
    One layer's at most are left: the embedding's alone, since it comes last; two layers': the first layer's with it; three layers': the second's."""
    model = net()
    with placed(model, adamw(model), everywhere(Placement("host", "streamed")), masters="fp32", update="backward") as states:
        states.plan_with(64 << 20, few)
        loss_of(model, 0).backward()
        assert sum(home.pending is not None for home in states.stored) == few
