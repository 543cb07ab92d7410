"""Ordinary code works on gradients that are not there: clipping, scaling, zeroing, accumulating, reading; each has the bits it has on the device."""

from __future__ import annotations

import weakref

import pytest
import torch
from execute.states.training import REGIONS, adamw, everywhere, loss_of, net, placed, plain_loop, reference
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tierwise.errors import BadInput, CopyFault
from tierwise.execute.lanes import Signal
from tierwise.execute.states.gradients import Gradient, Traffic
from tierwise.execute.states.placement import Placement

AWAY = everywhere(Placement("host", "cpu", gradients="host"))
STREAMED = everywhere(Placement("host", "streamed", gradients="host"))
WAITING = everywhere(Placement("host", "streamed", gradients="device"))
PLACEMENTS = pytest.mark.parametrize("placements", [AWAY, STREAMED, WAITING], ids=["cpu", "streamed", "waiting on the device"])


def trained(loop, placements=None, **options):
    """Parameters after six steps, on homes or, without placements, by hand."""
    if placements is None:
        return reference(6, loop=loop).parameters
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, placements, masters="fp32", **options):
        for step in range(6):
            loop(model, optimizer, step)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(loop, placements):
    expected, found = trained(loop), trained(loop, placements)
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def backward(model, step):
    loss = loss_of(model, step)
    loss.backward()
    return loss.item()


@PLACEMENTS
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_norm_with_torchs_own_function(placements, foreach):
    norms = {}

    def loop(model, optimizer, step):
        backward(model, step)
        norms.setdefault(step, []).append(clip_grad_norm_(model.parameters(), 0.3, foreach=foreach))
        optimizer.step()
        optimizer.zero_grad()

    assert_same(loop, placements)
    assert all(torch.equal(*pair) for pair in norms.values())


@PLACEMENTS
def test_clipping_by_value_and_several_factors(placements):
    def loop(model, optimizer, step):
        backward(model, step)
        clip_grad_value_(model.parameters(), 0.01)
        for parameter in model.parameters():
            parameter.grad.mul_(0.7)
        clip_grad_norm_(model.parameters(), 0.05)
        clip_grad_norm_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()

    assert_same(loop, placements)


@PLACEMENTS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_and_both_ways_to_zero(placements, set_to_none):
    def loop(model, optimizer, step):
        for part in range(3):
            backward(model, 3 * step + part)
        optimizer.step()
        for parameter in model.parameters():
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    assert_same(loop, placements)


@PLACEMENTS
def test_gradients_that_are_never_zeroed_go_on_adding_up(placements):
    def loop(model, optimizer, step):
        backward(model, step)
        optimizer.step()

    assert_same(loop, placements)


@PLACEMENTS
def test_reading_and_writing_gradients_in_ways_nobody_thought_of(placements):
    def loop(model, optimizer, step):
        backward(model, step)
        weight = model.layers[0].up.weight
        assert weight.grad.abs().max() > 0 and weight.grad.shape == weight.shape and weight.grad.device == weight.device
        weight.grad.view(-1)[::2] *= 0.5  # through a view
        weight.grad[0] = 0
        weight.grad.data.add_(0.01)
        model.head.weight.grad = model.head.weight.grad * 2  # an ordinary tensor takes its place
        model.head.bias.grad.copy_(torch.ones(24))
        optimizer.step()
        optimizer.zero_grad()

    assert_same(loop, placements)


@pytest.mark.parametrize("gradients", ["device", "host"])
def test_what_happens_to_gradients_between_step_and_forward_does_not_reach_the_update(gradients):
    def loop(model, optimizer, step):
        backward(model, step)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()  # the update may still be reading them
            parameter.grad = None

    assert_same(loop, everywhere(Placement("host", "streamed", gradients=gradients)))
    assert_same(loop, everywhere(Placement("host", "cpu", gradients=gradients)))


@PLACEMENTS
def test_a_grad_scaler(placements):
    scales = []

    def loop(model, optimizer, step, scaler=None):
        scaler = loop.scaler
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 2:
            model.layers[1].down.weight.grad.mul_(float("inf"))  # skipped, and the scale is halved
        scaler.unscale_(_torchs(optimizer))
        clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(_torchs(optimizer), *(() if optimizer is _torchs(optimizer) else (optimizer,)))
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()

    class Scaler(torch.amp.GradScaler):
        def step(self, optimizer, by_hand=None):
            if by_hand is None:
                return super().step(optimizer)
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            self._per_optimizer_states[id(optimizer)]["stage"] = torch.amp.grad_scaler.OptState.STEPPED
            return None if sum(value.item() for value in found.values()) else by_hand.step()

    def scaled(*args):
        loop.scaler = Scaler("cpu", init_scale=1024.0)
        return trained(loop, *args)

    expected, found = scaled(), scaled(placements)
    assert scales[:6] == scales[6:] and scales[2] == 512.0
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def _torchs(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def test_norms_are_taken_before_gradients_leave_once_somebody_asked_for_them():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, AWAY, masters="fp32") as states:
        for step in range(3):
            loss_of(model, step).backward()
            fetched = count_arrivals(states)
            clip_grad_norm_(model.parameters(), 0.3)
            assert (fetched() > 0) == (step == 0)  # the first time they come back for it
            optimizer.step()
            optimizer.zero_grad()


def count_arrivals(states):
    """How many copies to the device are started from now on."""
    copies, original = [], states.device.copy

    def copy(direction, *args, **kwargs):
        if direction.value == "host to device":
            copies.append(direction)
        return original(direction, *args, **kwargs)

    states.device.copy = copy

    def stop():
        states.device.copy = original
        return len(copies)

    return stop


def test_gradients_leave_the_device_as_they_arrive():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, AWAY, masters="fp32"):
        loss_of(model, 0).backward()
        for parameter in model.parameters():
            assert type(parameter.grad) is Gradient and parameter.grad.held.here is None and parameter.grad.untyped_storage().nbytes() == 0
        assert "in host memory" in repr(model.head.weight.grad)
        del parameter
    assert type(model.head.weight.grad) is torch.Tensor  # given back with the model


class Waits:
    """A device that notes what compute waits for, and how many tensors there are when it does."""

    def __init__(self):
        self.found, self.sent = [], []

    def wait(self, event):
        self.found.append((event, sum(tensor() is not None for tensor in self.sent)))


def test_compute_waits_once_for_several_gradients_that_leave():
    """Of 30 bytes each; 100 may be on their way. With the fourth it is 120, so compute waits for the third, and the fourth is left: 30 of the 33 that
    need not be waited for. The seventh makes it 120 again. All four are there until compute waits. Whatever has arrived by itself is let go without
    more ado, and one that failed is told."""
    device, leaving = Waits(), [Signal() for _ in range(9)]
    traffic = Traffic(device, None, None, leaving_bytes=100)

    def hold(event):
        gradient = torch.empty(30, dtype=torch.uint8)
        device.sent.append(weakref.ref(gradient))
        traffic.hold(event, gradient)
        return [(leaving.index(found), there) for found, there in device.found]

    assert [hold(event) for event in leaving[:7]] == [[], [], [], [(2, 4)], [(2, 4)], [(2, 4)], [(2, 4), (5, 4)]]
    leaving[6].fire(CopyFault("a copy failed"))
    assert hold(leaving[7])[2:] == [(6, 2)]
    traffic.release(all=True)
    leaving[8].fire()
    assert hold(leaving[8])[3:] == [(7, 1), (8, 1)]


def test_gradients_that_wait_for_their_update_lie_side_by_side_and_others_are_added_there():
    model = net()
    with placed(model, adamw(model), WAITING, masters="fp32") as states:
        backward(model, 0)
        units = [home.unit for home in states.stored if len(home.unit.slots) > 1]
        assert units
        places = {unit.name: {slot.parameter.grad.untyped_storage().data_ptr() for slot in unit.slots} for unit in units}
        assert all(len(found) == 1 for found in places.values())
        assert all(slot.parameter.grad.storage_offset() == slot.offset for unit in units for slot in unit.slots)
        backward(model, 1)
        assert places == {unit.name: {slot.parameter.grad.untyped_storage().data_ptr() for slot in unit.slots} for unit in units}


def test_an_update_during_backward_uses_its_gradient_up():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, AWAY, masters="fp32", update="backward"):
        loss_of(model, 0).backward()
        with pytest.raises(BadInput, match=r"the gradient of .* was used by its update during backward.*use update='after' to clip"):
            clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(BadInput, match="was used by its update"):
            loss_of(model, 1).backward()  # accumulation
        optimizer.zero_grad()
        assert plain_loop(model, optimizer, 1) > 0


@pytest.mark.parametrize("masters", ["fp32", None])
def test_what_stays_on_the_device_is_updated_region_by_region_during_backward(masters):
    """As soon as backward has come to the block before it, its gradient is gone; what no region has waits until all of that is there. The bits are
    those of the untouched loop, with torch's own update, too."""
    model = net(torch.bfloat16 if masters else torch.float32)
    optimizer = adamw(model)
    spent: dict[str, list[str]] = {}

    def look(module: torch.nn.Module, gradients: object) -> None:
        found = [name for name, p in model.named_parameters() if isinstance(p.grad, Gradient) and p.grad.held.spent]
        spent.setdefault(module.name, found)

    for number, layer in enumerate(model.layers):
        layer.name = f"layers.{number}"
        layer.register_full_backward_pre_hook(look)
    with placed(model, optimizer, {"layers.2": AWAY["layers.2"]}, masters=masters, update="backward", regions=REGIONS[1:-1]):
        losses = [plain_loop(model, optimizer, step) for step in range(5)]
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert [name for name in spent["layers.0"] if not name.startswith("layers.2")] == [n for n in parameters if n.startswith("layers.1")]
    expected = reference(5, masters=masters, dtype=torch.bfloat16 if masters else torch.float32)
    assert losses == expected.losses and all(torch.equal(parameters[name], value) for name, value in expected.parameters.items())


def test_a_gradient_kept_by_the_user_is_not_another_one_later():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, AWAY, masters="fp32"):
        loss_of(model, 0).backward()
        kept = model.head.weight.grad
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(BadInput, match="is gone"):
            kept.sum()


def test_sparse_gradients_are_refused():
    model = net(torch.float32)
    model.embedding.sparse = True
    optimizer = adamw(model)
    with placed(model, optimizer, AWAY), pytest.raises(BadInput, match=r"embedding.weight has a sparse gradient"):
        loss_of(model, 0).backward()
