"""The user's optimizer is still the user's optimizer: its class, its groups, its schedulers, its hooks, its state in its own layout."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from execute.states.test_placements import MIXED
from execute.states.training import REGIONS, adamw, everywhere, loss_of, net, placed, plain_loop, reference

from tierwise.errors import BadInput
from tierwise.execute.states.placement import Placement

CPU = everywhere(Placement("host", "cpu", gradients="host"))
STREAMED = everywhere(Placement("nvme", "streamed", "host"))


def run(model, optimizer, steps):
    return [plain_loop(model, optimizer, step) for step in steps]


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_it_is_the_same_object_of_the_same_class(tmp_path):
    model = net()
    optimizer = adamw(model)
    before = dict(optimizer.__dict__)
    groups = optimizer.param_groups
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32"):
        assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups is groups
        with pytest.raises(BadInput, match=r"a parameter group cannot be added"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        run(model, optimizer, range(2))
    assert {name for name in optimizer.__dict__ if name != "_opt_called"} == set(before)
    assert all(p in optimizer.state for p in model.parameters())


@pytest.mark.parametrize("first", ["scheduler", "fit"])
def test_a_scheduler_made_before_or_after(first, tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model = net()
    optimizer = adamw(model)
    scheduler = schedule(optimizer) if first == "scheduler" else None
    losses = []
    with warnings.catch_warnings(), placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32"):
        warnings.simplefilter("error", UserWarning)  # of a step that the scheduler has not seen
        scheduler = scheduler or schedule(optimizer)
        for step in range(5):
            losses.append(plain_loop(model, optimizer, step))
            scheduler.step()
    assert losses == reference(5, schedule=schedule).losses


def test_hooks_and_closures(tmp_path):
    model = net()
    optimizer = adamw(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with placed(model, optimizer, CPU, masters="fp32"):

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == reference(1).losses[0]
    assert calls == ["before", "after"]


def test_settings_are_read_in_step_and_not_later():
    """With updates under way, the next lines of a loop change the learning rate."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, CPU, masters="fp32", delay=0.005):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = 100.0, (0.0, 0.0)
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = 1e-2, (0.9, 0.999)
    same(weights(model), reference(3).parameters)


@pytest.mark.parametrize("placements", [CPU, STREAMED, MIXED], ids=["cpu", "streamed", "mixed"])
def test_without_masters_the_state_is_torchs_to_the_bit(placements, tmp_path):
    plain = net(torch.float32)
    torchs = adamw(plain)
    run(plain, torchs, range(3))
    model = net(torch.float32)
    optimizer = adamw(model)
    with placed(model, optimizer, placements, directory=tmp_path):
        run(model, optimizer, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
    expected = torchs.state_dict()
    assert saved["param_groups"] == expected["param_groups"] and saved["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert list(saved["state"][index]) == list(state)
        for key, value in state.items():
            assert torch.equal(saved["state"][index][key], value) and saved["state"][index][key].dtype == value.dtype
    torchs.load_state_dict(saved)  # loads without us
    assert run(plain, torchs, range(3, 5)) == reference(5, masters=None, dtype=torch.float32).losses[3:]


@pytest.mark.parametrize("masters", [None, "fp32"])
def test_saved_in_one_placement_and_resumed_in_another(masters, tmp_path):
    expected = reference(8, masters=masters)
    kept = None
    losses = []
    for turn, placements in enumerate((MIXED, CPU, {}, STREAMED)):
        model = net()
        optimizer = adamw(model)
        with placed(model, optimizer, placements, directory=tmp_path, masters=masters):
            if kept is not None:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            losses += run(model, optimizer, range(2 * turn, 2 * turn + 2))
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert losses == expected.losses
    same(weights(model), expected.parameters)
    if masters:
        assert {"step", "exp_avg", "exp_avg_sq", "master"} == set(kept[1]["state"][0]) and kept[1]["state"][0]["master"].dtype == torch.float32
        plain = adamw(net())
        plain.load_state_dict(kept[1])  # the key more is no harm


def test_a_loop_that_began_without_us_and_goes_on_without_us():
    expected = reference(6, masters=None, dtype=torch.float32)
    model = net(torch.float32)
    optimizer = adamw(model)
    losses = run(model, optimizer, range(2))
    with placed(model, optimizer, CPU):
        losses += run(model, optimizer, range(2, 4))
    losses += run(model, optimizer, range(4, 6))
    assert losses == expected.losses
    same(weights(model), expected.parameters)


def test_momentum_is_saved_and_resumed(tmp_path):
    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.2)

    expected = reference(4, masters=None, dtype=torch.float32, make=make)
    model = net(torch.float32)
    optimizer = make(model)
    losses = run(model, optimizer, range(1))
    with placed(model, optimizer, CPU):
        losses += run(model, optimizer, range(1, 2))
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert list(kept[1]["state"][0]) == ["momentum_buffer"]
    model = net(torch.float32)
    optimizer = make(model)
    with placed(model, optimizer, STREAMED, directory=tmp_path):
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        losses += run(model, optimizer, range(2, 4))
    assert losses == expected.losses


def test_a_state_of_another_optimizer_is_refused():
    model = net()
    optimizer = adamw(model)
    other = torch.optim.AdamW(net().parameters())
    with placed(model, optimizer, CPU, masters="fp32"):
        with pytest.raises(ValueError, match="has 1 parameter groups and the optimizer has 2"):
            optimizer.load_state_dict(other.state_dict())
        assert run(model, optimizer, range(1)) == reference(1).losses


def test_settings_that_cannot_be_placed_are_refused():
    model = net()
    for options, message in (({"capturable": True}, "capturable=True"), ({"differentiable": True, "foreach": False}, "differentiable=True")):
        with pytest.raises(BadInput, match=message), placed(model, adamw(model, **options), CPU):
            pass
    with pytest.raises(BadInput, match="no formula for amsgrad"), placed(model, adamw(model, amsgrad=True), CPU, masters="fp32"):
        pass
    with pytest.raises(BadInput, match="masters is 'fp16'"), placed(model, adamw(model), CPU, masters="fp16"):
        pass
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    with pytest.raises(BadInput, match=r"has a gradient; call optimizer.zero_grad\(\)"), placed(model, optimizer, CPU):
        pass
    optimizer.zero_grad()
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(BadInput, match="the optimizer has 1 parameters that are not the model's"), placed(model, stranger, CPU):
        pass
    assert set(REGIONS) == set(CPU)
