"""Parameters that live elsewhere, or are being updated, look to everybody as if they were there."""

from __future__ import annotations

import io
import json
import time
from types import SimpleNamespace

import pytest
import torch
from execute.states.test_placements import MIXED
from execute.states.training import REGIONS, Net, adamw, batch, everywhere, loss_of, net, placed, plain_loop, reference
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierwise.errors import BadFile, BadInput
from tierwise.execute.device import Direction
from tierwise.execute.lanes import Signal
from tierwise.execute.null_device import NullDevice
from tierwise.execute.states import moving as moving_module
from tierwise.execute.states.guards import is_guarded
from tierwise.execute.states.moving import Moving
from tierwise.execute.states.placement import Placement
from tierwise.execute.states.safetensors import Checkpoint

CPU = Placement("host", "cpu", gradients="host")
HOST = Placement("host", "cpu", "host", "host")
DISK = Placement("nvme", "streamed", "nvme", "host")
AFTER_STEP = everywhere(Placement("host", "cpu", gradients="host"))


@pytest.mark.parametrize("placements", [AFTER_STEP, everywhere(HOST), everywhere(DISK), MIXED], ids=["pending", "host", "disk", "mixed"])
def test_whoever_reads_a_parameter_gets_the_updated_one(placements, tmp_path):
    """An average over time, a norm logger, and a copy: three that read parameters by themselves, in every step."""
    model = net()
    optimizer = adamw(model)
    average = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    kept = []
    with placed(model, optimizer, placements, directory=tmp_path, masters="fp32", delay=0.005):
        for step in range(4):
            plain_loop(model, optimizer, step)
            for name, parameter in model.named_parameters():
                average[name] += parameter  # no .data, no_grad by `average` needing none
                average[name] = average[name].detach()
            kept.append(float(sum(p.detach().float().norm() for p in model.parameters())))
    expected = [reference(steps).parameters for steps in range(1, 5)]
    assert kept == [float(sum(p.float().norm() for p in found.values())) for found in expected]
    for name in average:
        total = torch.zeros_like(average[name])
        for found in expected:
            total += found[name]
        assert torch.equal(average[name], total)


def test_reading_the_shape_of_a_parameter_brings_nothing(tmp_path):
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(HOST), masters="fp32") as states:
        weight = model.layers[0].up.weight
        assert is_guarded(weight) and type(weight).__name__ == "Parameter" and isinstance(weight, nn.Parameter)
        assert weight.shape == (32, 16) and weight.dtype == torch.bfloat16 and weight.numel() == 512 and weight.requires_grad and weight.grad is None
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net().parameters())
        assert weight in {weight: 1} and not any(residence.is_here for residence in states.residency.residences.values())
        assert weight.sum() != 0 and not is_guarded(weight)  # this did
    assert not any(is_guarded(p) for p in model.parameters())


def test_shapes_can_be_looked_at_without_guards_and_regions_be_asked_to_be_there():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(HOST), masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        with states.unguarded():
            assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(is_guarded(p) for p in model.parameters())
        with states.present("layers.1", "head"):
            assert not is_guarded(model.head.weight) and is_guarded(model.embedding.weight)
        assert is_guarded(model.head.weight)
        assert plain_loop(model, optimizer, 1) == reference(2).losses[1]


def test_what_is_written_to_a_parameter_is_trained_on_from_there(tmp_path):
    def write(model):
        with torch.no_grad():
            model.layers[1].up.weight[3] = 0.5
            model.head.bias.fill_(0.25)
            model.embedding.weight.mul_(2)

    expected = None
    for placements in ({}, MIXED, everywhere(HOST), everywhere(DISK)):
        model = net()
        optimizer = adamw(model)
        with placed(model, optimizer, placements, directory=tmp_path, masters="fp32"):
            for step in range(4):
                if step == 2:
                    write(model)
                plain_loop(model, optimizer, step)
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        expected = expected or found
        for name in found:
            assert torch.equal(found[name], expected[name]), (name, placements)


@pytest.mark.parametrize("placements", [MIXED, everywhere(HOST), everywhere(DISK)], ids=["mixed", "host", "disk"])
def test_state_dict_needs_no_device_memory_and_saves_no_more_than_the_parameters(placements, tmp_path):
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, placements, directory=tmp_path, masters="fp32") as states:
        for step in range(3):
            plain_loop(model, optimizer, step)
        before = states.device.memory().allocated_bytes
        states.device.reset_peak()
        saved = model.state_dict()
        assert states.device.memory().peak_allocated_bytes == before
        file = io.BytesIO()
        torch.save(saved, file)
        copy = {name: value.clone() for name, value in saved.items()}
    expected = reference(3).parameters
    assert list(copy) == list(expected) and all(torch.equal(copy[name], expected[name]) for name in expected)
    plain = io.BytesIO()
    torch.save(expected, plain)
    assert file.tell() < plain.tell() + 4096
    fresh = net()
    fresh.load_state_dict(copy)


def test_a_state_dict_is_loaded_into_homes(tmp_path):
    torch.manual_seed(5)
    other = Net().to(torch.bfloat16)
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32"):
        plain_loop(model, optimizer, 0)
        model.load_state_dict(other.state_dict())
        assert loss_of(model, 1).item() == loss_of(other, 1).item()
        plain_loop(model, optimizer, 1)
        saved = model.state_dict()
        assert not torch.equal(saved["head.weight"], other.head.weight)  # masters followed: the step went on from what was loaded
        difference = (saved["head.weight"].float() - other.head.weight.float()).abs().max()
        assert difference < 0.1


def test_a_model_larger_than_the_device_trains_within_its_window():
    """Ten regions; the device has room for three of them."""

    def deep():
        torch.manual_seed(0)
        return Net(layers=8).to(torch.bfloat16)

    placements = dict.fromkeys(("embedding", *(f"layers.{layer}" for layer in range(8)), "head"), HOST)
    expected = deep()
    optimizer = adamw(expected)
    with placed(expected, optimizer, {}, masters="fp32"):
        losses = [plain_loop(expected, optimizer, step) for step in range(3)]
    model = deep()
    whole = sum(p.numel() for p in model.parameters()) * 2
    optimizer = adamw(model)
    with placed(model, optimizer, placements, masters="fp32", capacity=12 << 10) as states:
        needs = states.needs()
        assert needs.device_bytes == 0 and needs.parameter_host_bytes >= whole > 18_000 and needs.window_bytes < 12 << 10
        assert [plain_loop(model, optimizer, step) for step in range(3)] == losses
        assert 0 < states.device.memory().peak_allocated_bytes <= needs.window_bytes
        saved = model.state_dict()
        assert all(torch.equal(saved[name], p) for name, p in expected.named_parameters())
        assert not any(residence.is_here for residence in states.residency.residences.values())


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_so_many_regions_ahead_parameters_are_on_their_way(ahead):
    model = net()
    optimizer = adamw(model)
    started: dict[str, list[str]] = {}
    with placed(model, optimizer, everywhere(HOST), masters="fp32") as states:
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
        states.residency.ahead = ahead
        start, before = states.residency._start, states.residency.before_forward

        def before_forward(path):
            states.residency._start = lambda other: (started.setdefault(path, []).append(other), start(other))
            before(path)

        states.residency.before_forward = before_forward
        losses.append(plain_loop(model, optimizer, 2))
        order = states.residency.order
    assert losses == reference(3).losses
    forward = {path: started.get(path, [])[:ahead] for path in order}
    assert all(forward[path] == order[place + 1 : place + 1 + ahead] for place, path in enumerate(order[:-ahead]))


def test_parameters_that_are_not_made_yet_hold_nobody_up():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(HOST), masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        states.flush()
        first, *_, last = states.residency.residences.values()
        updates = {first: Signal(), last: Signal()}
        for residence, update in updates.items():
            residence._settling = lambda update=update: update
            residence.leave()
            residence.start()
        updates[last].fire()
        deadline = time.monotonic() + 10
        while not last._coming[0].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        came = [residence._coming[0].done() for residence in updates]
        updates[first].fire()  # or nothing would ever end
        assert came == [False, True]
        assert plain_loop(model, optimizer, 1) == reference(2).losses[1]


def test_what_passes_through_the_device_leaves_it_parameters_first():
    """Two bytes an element, and then twelve of state, chunk after chunk."""
    model = net()
    optimizer = adamw(model)
    sizes: list[int] = []
    placements = everywhere(Placement("host", "streamed", "host"))
    with placed(model, optimizer, placements, masters="fp32", before_copy=lambda way, size: sizes.append(size) if way is Direction.OUT else None):
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
        left = tuple(sizes)
    assert losses == reference(2).losses
    assert len(left) > 4 and [6 * made for made in left[::2]][: len(left) // 2] == [*left[1::2]]


def test_what_comes_ahead_does_not_come_where_there_is_no_room():
    model = net()
    optimizer = adamw(model)
    unit = max(2 * sum(-(-p.numel() // 256) * 256 for p in model.get_submodule(path).parameters()) for path in REGIONS)
    with placed(model, optimizer, everywhere(HOST), masters="fp32", capacity=2 * unit):
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
    assert losses == reference(2).losses


@pytest.mark.parametrize("placements", [everywhere(HOST), everywhere(DISK), MIXED], ids=["host", "disk", "mixed"])
def test_evaluation_in_between(placements, tmp_path):
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, placements, directory=tmp_path, masters="fp32"):
        losses = []
        for step in range(4):
            losses.append(plain_loop(model, optimizer, step))
            with torch.no_grad():
                model.eval()
                model(batch(9)[0])
                model.layers[1](torch.zeros(1, 2, 16, dtype=torch.bfloat16))  # one region by itself
                model.train()
            loss_of(model, 7)  # a pass whose backward never comes
    assert losses == reference(4).losses


@pytest.mark.parametrize("update", ["after", "backward"])
def test_whoever_runs_regions_can_say_when_instead_of_hooks(update, tmp_path):
    """As a runtime does that gives modules a forward of its own: no hooks on any module."""
    model = net()
    optimizer = adamw(model)

    def told(path, module, forward):
        def run(x):
            states.before_region_forward(path)
            with torch.autograd.graph.saved_tensors_hooks(states.pack, states.unpack):
                out = forward(x)
            states.watch(path, x, out)
            states.after_region_forward(path)
            return out

        return run

    with placed(model, optimizer, everywhere(HOST) | {"layers.1": DISK}, directory=tmp_path, masters="fp32", update=update, drive=False) as states:
        for path in REGIONS:
            module = model.get_submodule(path)
            module.forward = told(path, module, module.forward)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        losses = []
        for step in range(3):
            states.before_pass()
            loss = loss_of(model, step)
            states.after_pass()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert not any(residence.is_here for residence in states.residency.residences.values())
    assert losses == reference(3).losses


class Checkpointed(Net):
    reentrant = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_regions(reentrant, update, tmp_path):
    results = []
    for placements in ({}, everywhere(HOST), MIXED):
        model = net()
        model.__class__ = type("C", (Checkpointed,), {"reentrant": reentrant})
        optimizer = adamw(model)
        runs: list[int] = []
        model.layers[0].register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        with placed(model, optimizer, placements, directory=tmp_path, masters="fp32", update=update):
            results.append([plain_loop(model, optimizer, step) for step in range(3)])
        assert len(runs) == 6, "what it saved was let go, and it ran again in each backward"
    assert results[0] == results[1] == results[2]


class Tangled(nn.Module):
    """A tied head, a region that is called twice, a frozen region, a parameter of no region, one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.first, self.second, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.second(torch.tanh(self.frozen(self.first(x)))) * self.scale
        return self.head(self.frozen(torch.tanh(self.first(x))))


@pytest.mark.parametrize("update", ["after", "backward"])
def test_shared_frozen_repeated_and_unused_parameters(update, tmp_path):
    paths = ("embedding", "first", "frozen", "second", "head", "unused", "")
    results = []
    for placement in (Placement(), HOST, DISK):
        torch.manual_seed(0)
        model = Tangled()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with placed(model, optimizer, dict.fromkeys(paths, placement), directory=tmp_path, update=update, delay=0.001) as states:
            results.append([plain_loop(model, optimizer, step) for step in range(4)])
            assert {home.unit.regions for home in states.stored} >= {("embedding", "head"), ("frozen",), ("",)}
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert model.head.weight is model.embedding.weight
    for losses, parameters in (results[2:4], results[4:6]):
        assert losses == results[0]
        assert all(torch.equal(parameters[name], results[1][name]) for name in parameters)


def test_an_exception_in_forward_or_backward_leaves_a_model_that_trains(tmp_path):
    class Fault(Exception):
        pass

    def fail(*_):
        raise Fault

    for placements in (everywhere(HOST), everywhere(DISK), MIXED):
        model = net()
        optimizer = adamw(model)
        with placed(model, optimizer, placements, directory=tmp_path, masters="fp32"):
            losses = [plain_loop(model, optimizer, 0)]
            handle = model.layers[1].up.register_forward_hook(fail)
            with pytest.raises(Fault):
                loss_of(model, 1)
            handle.remove()
            loss = loss_of(model, 1)
            handle = model.layers[1].down.weight.register_hook(fail)
            with pytest.raises(Fault):
                loss.backward()
            handle.remove()
            optimizer.zero_grad()
            losses += [plain_loop(model, optimizer, step) for step in (1, 2)]
        assert losses == reference(3).losses


def test_a_checkpoint_on_disk_is_taken_in_region_by_region(tmp_path):
    source = net()
    state = {name: value.contiguous() for name, value in source.state_dict().items()}
    names = sorted(state)
    save_file({name: state[name] for name in names[:5]}, tmp_path / "model-1.safetensors")
    save_file({name: state[name] for name in names[5:]}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {name: f"model-{1 + (name in names[5:])}.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        model = Net().to(torch.bfloat16)
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32", source=Checkpoint(tmp_path)):
        losses = [plain_loop(model, optimizer, step) for step in range(4)]
    assert losses == reference(4).losses
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(torch.equal(p, reference(4).parameters[name]) for name, p in model.named_parameters())


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    with torch.device("meta"):
        model = Net()
    optimizer = adamw(model)
    with pytest.raises(BadInput, match=r"embedding.weight is on the meta device and no values were given"), placed(model, optimizer, {}):
        pass
    wrong = {name: torch.zeros(1) for name, _ in model.named_parameters()}
    with (
        pytest.raises(BadInput, match=r"has embedding.weight of shape \(1,\) and the model of shape \(24, 16\)"),
        placed(model, optimizer, {}, source=wrong),
    ):
        pass
    with pytest.raises(BadFile, match=r"no .safetensors file"):
        Checkpoint(tmp_path)
    save_file({"a": torch.arange(6.0)}, tmp_path / "a.safetensors")
    assert torch.equal(Checkpoint(tmp_path)["a"], torch.arange(6.0)) and list(Checkpoint(tmp_path / "a.safetensors")) == ["a"]
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-4])
    with pytest.raises(BadFile, match="it was cut short"):
        Checkpoint(tmp_path)["a"]
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadFile, match="is not a safetensors file"):
        Checkpoint(tmp_path)


def test_parameters_that_were_replaced_are_named():
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(HOST), masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        states.flush()
        model.embedding.weight.data = torch.zeros(24, 16, dtype=torch.bfloat16)  # as model.to() would
        for residence in states.residency.residences.values():
            residence.leave()
        with pytest.raises(BadInput, match=r"embedding bfloat16 were replaced by others.*call tierwise.release\(model\) before"):
            loss_of(model, 1)
    assert model.embedding.weight.sum() == 0


@pytest.mark.parametrize("place", [HOST, DISK])
def test_parameters_for_which_the_device_has_no_room_are_given_back_in_host_memory(place, tmp_path, caplog):
    """Somebody else has all that was free: what was trained is not lost. One module was there already, since somebody wrote to it."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(place), directory=tmp_path, masters="fp32") as states:
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
        with torch.no_grad():
            model.head.bias.add_(0)
        states.flush()
        free = states.device.capacity_bytes - states.device.memory().allocated_bytes
        others = states.device.empty(free)
        states.close()
        del others
    expected = reference(2)
    assert losses == expected.losses
    assert all(torch.equal(parameter, expected.parameters[name]) for name, parameter in model.named_parameters())
    assert all(optimizer.state[parameter]["exp_avg"].any() for parameter in model.parameters())
    assert "no room for the parameters of embedding bfloat16 and 3 more modules: they are given back in host memory" in caplog.text


def test_state_for_which_the_device_has_no_room_is_given_back_in_host_memory(monkeypatch, caplog):
    """A model smaller than the device whose state was larger: what was trained is not lost when it is given back."""
    model = nn.Linear(4, 4, bias=False)
    moving, copied = Moving(model, NullDevice(1 << 20), {}), moving_module._copied

    def full_once(state, place):
        monkeypatch.setattr(moving_module, "_copied", copied)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(moving_module, "_copied", full_once)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 4)}
    back = moving.state_back(SimpleNamespace(parameter=model.weight, name="weight"), state)
    assert torch.equal(back["exp_avg"], state["exp_avg"]) and back["exp_avg"] is not state["exp_avg"] and back["step"] is state["step"]
    assert "no room for the optimizer's state of weight: it is given back in host memory" in caplog.text


@pytest.mark.parametrize(("pool_is_ours", "zero"), [(True, [False, True]), (False, [False, False])])
def test_what_is_given_back_in_host_memory_is_not_there_twice(pool_is_ours, zero):
    """A module's pages are zero once its state was given back: the system has them again. What somebody still has of them, such as a state_dict of
    the first module's, is as it was, and so is all of a pool that others use."""
    model = net(torch.float32)
    optimizer = adamw(model)
    chunk = 4096  # elements: chunks of several pages
    options = {"masters": "fp32", "stream_chunk_elements": chunk, "cpu_chunk_elements": chunk, "pool_is_ours": pool_is_ours}
    with placed(model, optimizer, {"layers.0": CPU, "layers.1": CPU}, **options) as states:
        plain_loop(model, optimizer, 0)
        kept = optimizer.state_dict()["state"]
        held = next(value["exp_avg"] for value in kept.values() if value["exp_avg"].numel() == 512)
        before, blocks = held.clone(), [block.bytes for home in states.stored if home.chunks is not None for block in home.chunks.blocks]
        del kept
        states.close()
    assert torch.equal(held, before) and held.any()
    assert [not nbytes[4096:-4096].any() for nbytes in blocks] == zero
