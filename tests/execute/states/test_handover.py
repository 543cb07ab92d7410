"""From one set of homes to another in the midst of a training: bits, what is not touched, how much is anywhere meanwhile, and what fails."""

from __future__ import annotations

import gc

import pytest
import torch
from execute.states.training import CHUNK, adamw, everywhere, loss_of, net, placed, plain_loop, reference
from execute.test_host_pool import watched_slabs

from tierwise.errors import BadInput, OutOfDeviceMemory, OutOfHostMemory, StorageFull
from tierwise.execute.host_pool import HostPool
from tierwise.execute.null_device import NullDevice
from tierwise.execute.states import updates
from tierwise.execute.states.handover import groups_of
from tierwise.execute.states.homes import DiskChunks, HostChunks
from tierwise.execute.states.ledger import Ledger, stored_of
from tierwise.execute.states.needs import SLACK_BYTES
from tierwise.execute.states.settling import Settling
from tierwise.execute.states.states import States
from tierwise.execute.states.units import Known, units_of
from tierwise.execute.states.updates import Stored
from tierwise.ir.placement import ON_DEVICE, Placement

CPU, STREAMED = Placement("host", "cpu", gradients="host"), Placement("host", "streamed")
AWAY = Placement("host", "cpu", "host", "host")
ON_DISK = Placement("nvme", "cpu", "nvme", "host")
MIXED = {"embedding": CPU, "layers.0": STREAMED, "layers.1": ON_DEVICE, "layers.2": AWAY, "head": ON_DISK}
OTHERS = {"embedding": ON_DEVICE, "layers.0": STREAMED, "layers.1": CPU, "layers.2": ON_DISK, "head": AWAY}
PARTS = {"embedding": AWAY, "layers.0": CPU, "layers.0.up": STREAMED, "layers.1.down": AWAY, "layers.1": ON_DEVICE, "head": CPU}


def moved(states: States, placements, **options) -> States:
    made = States(
        states.model, states.optimizer, placements, states.device, update=states.update, masters=states.masters, regions=("layers.0", "layers.1"),
        stream_chunk_elements=CHUNK, cpu_chunk_elements=2 * CHUNK, threads=2, **options,
    )  # fmt: skip
    made.install(pool=states._pool, store=states._store, before=states)
    return made


def in_turn(tmp_path, *places, masters="fp32", update="after", make=adamw, between=lambda model: None) -> tuple[list[float], torch.nn.Module]:
    """Three steps in each of these."""
    model = net()
    optimizer = make(model)
    losses = []
    with placed(model, optimizer, places[0], directory=tmp_path, masters=masters, update=update, delay=0.0005) as states:
        for number, placements in enumerate(places):
            if number:
                between(model)
                states = moved(states, placements)
            losses += [plain_loop(model, optimizer, 3 * number + step) for step in range(3)]
        states.close()
    return losses, model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("places", [(MIXED, OTHERS, MIXED), ({}, MIXED, {}), (everywhere(AWAY), PARTS, OTHERS)], ids=["mixed", "nowhere", "parts"])
def test_the_same_bits_as_if_nothing_had_moved(places, update, tmp_path):
    losses, model = in_turn(tmp_path, *places, update=update)
    expected = reference(9)
    assert losses == expected.losses
    assert all(torch.equal(parameter, expected.parameters[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("make", "places"), [(adamw, (MIXED, OTHERS)), (sgd, (OTHERS, MIXED)), (adagrad, ({"head": CPU}, {"layers.0": CPU}))])
def test_torchs_own_state_moves_too(make, places, tmp_path):
    """It is on the CPU that this runs, so where an update is makes no difference to torch's own."""
    losses, model = in_turn(tmp_path, *places, masters=None, make=make)
    expected = reference(6, masters=None, make=make)
    assert losses == expected.losses
    assert all(torch.equal(parameter, expected.parameters[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("first", [MIXED, OTHERS])
def test_what_somebody_wrote_between_is_in_the_masters(first, tmp_path):
    def halve(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    there, stays = (in_turn(tmp_path, *places, between=halve) for places in ((first, MIXED), (everywhere(ON_DEVICE), everywhere(ON_DEVICE))))
    assert there[0] == stays[0]
    assert all(torch.equal(one, other) for one, other in zip(there[1].parameters(), stays[1].parameters(), strict=True))


@pytest.mark.parametrize("second", [MIXED, OTHERS])
def test_who_reads_a_parameter_that_has_moved_gets_it(second, tmp_path):
    """Before any region has run in its new home."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        states = moved(states, second)
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        states.close()
    assert all(torch.equal(found[name], value) for name, value in reference(1).parameters.items())


def test_state_that_stays_is_not_touched(tmp_path):
    """Of two layers the blocks are the same; the third one's are others."""
    model = net()
    optimizer = adamw(model)
    before = {"layers.0": CPU, "layers.1": STREAMED, "layers.2": CPU}
    with placed(model, optimizer, before, masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        states.flush()
        blocks = {home.unit.regions: home.chunks.blocks for home in states.stored if home.chunks is not None}
        states = moved(states, {**before, "layers.2": STREAMED})
        after = {home.unit.regions: home.chunks.blocks for home in states.stored if home.chunks is not None}
        states.close()
    assert after[("layers.0",)] is blocks[("layers.0",)] and after[("layers.1",)] is blocks[("layers.1",)]
    assert not {*after[("layers.2",)]} & {*blocks[("layers.2",)]}


def test_memory_of_homes_that_nobody_has_any_more_is_given_back_at_once(monkeypatch):
    """Also if nobody looks for garbage: two layers' parameters lived in host memory, each in pages of its own, and one's still do."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, {"layers.0": AWAY, "layers.1": AWAY}, masters="fp32") as states:
        plain_loop(model, optimizer, 0)
        with monkeypatch.context() as patched:
            slabs = watched_slabs(patched)
            states = moved(states, {"layers.0": CPU, "layers.1": AWAY})
            gc.disable()
            states = moved(states, {"layers.0": CPU})
        alive = [slab() is not None for slab in slabs]
        gc.enable()
        states.close()
    assert alive == [False]


def homes(placements) -> list[Stored]:
    return [stored_of(unit, adamw_of_model, "fp32") for unit in units_of(Known.of(shared_model, adamw_of_model), placements)]


shared_model = net()
adamw_of_model = adamw(shared_model)


def test_the_device_has_room_before_others_come():
    """Layers are of one size: each of two that come is behind one that leaves."""
    before = homes({"embedding": ON_DEVICE, "layers.0": AWAY, "layers.1": ON_DEVICE, "layers.2": AWAY, "head": CPU})
    after = homes({"embedding": ON_DEVICE, "layers.0": ON_DEVICE, "layers.1": AWAY, "layers.2": ON_DEVICE, "head": AWAY})
    groups = groups_of(before, after)
    assert {home for group in groups for home in (*group.before, *group.after)} == {*before, *after}
    more = [group.more_bytes for group in groups]
    layer = max(more)
    assert sum(more) > 0 and [sum(more[: place + 1]) <= 0 for place in range(len(more))].count(False) == 1
    assert sorted(more)[0] == -layer and more.index(layer) > more.index(-layer)


def test_a_pool_that_is_too_small_grows(tmp_path):
    """It has room for what the first places take, and what is on disk comes to the host."""
    model, device = net(), NullDevice(1 << 26)
    optimizer = adamw(model)
    first = States(model, optimizer, {"layers.0": CPU}, device, masters="fp32")
    pool = HostPool(first.needs().host_bytes - SLACK_BYTES + (1 << 12), device)
    first.install(pool=pool)
    losses = [plain_loop(model, optimizer, step) for step in range(2)]
    nbytes = pool.nbytes
    second = States(model, optimizer, everywhere(CPU), device, masters="fp32")
    with pool.growing(1 << 16):
        second.install(pool=pool, before=first)
    assert pool.nbytes >= nbytes + (1 << 16)
    losses += [plain_loop(model, optimizer, step) for step in range(2, 4)]
    second.close()
    assert losses == reference(4).losses and pool.free_bytes == pool.nbytes
    pool.close()
    device.close()


def test_gradients_are_asked_for_first(tmp_path):
    """Nothing has moved then, and training goes on where everything was."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32") as states:
        losses = [plain_loop(model, optimizer, 0)]
        loss = loss_of(model, 1)
        loss.backward()
        with pytest.raises(BadInput, match=r"has a gradient; call optimizer.zero_grad\(\) before its home is changed"):
            moved(states, OTHERS)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), plain_loop(model, optimizer, 2)]
    assert losses == reference(3).losses


@pytest.mark.parametrize("when", [*range(5), "before"])
def test_a_move_that_fails_gives_everything_back(when, tmp_path, monkeypatch):
    """There is no room for the so-many-th module, or for buffers before anything moves: what has moved, and what has not, is in the optimizer, as
    after close()."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32") as states:
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
        seen = []
        keep = Settling._move_in

        def failing(*args, **options):
            seen.append(args)
            if when == "before" or len(seen) > when:
                raise OutOfHostMemory("no room")
            keep(*args, **options)

        with monkeypatch.context() as patched, pytest.raises(OutOfHostMemory):
            patched.setattr(*((updates, "Ring") if when == "before" else (Settling, "_move_in")), failing)
            moved(states, OTHERS)
        assert not states.is_installed and len(seen) == (1 if when == "before" else when + 1)
    with placed(model, optimizer, OTHERS, directory=tmp_path, masters="fp32"):
        losses += [plain_loop(model, optimizer, step) for step in range(2, 4)]
    assert losses == reference(4).losses


@pytest.mark.parametrize("what", ["room", "disk", "Ctrl-C"])
@pytest.mark.parametrize("when", range(4))
def test_a_first_placing_that_fails_leaves_everything_as_it_was(when, what, tmp_path, monkeypatch):
    """In the midst of the so-many-th module, with two steps of torch's own behind it, whose state has begun to move."""
    model = net()
    optimizer = adamw(model)
    losses = [plain_loop(model, optimizer, step) for step in range(2)]
    seen = []
    keep, error = {
        "room": (HostChunks.__init__, OutOfHostMemory("no room")),
        "disk": (DiskChunks.give, StorageFull("no room")),
        "Ctrl-C": (Ledger.take_over, KeyboardInterrupt()),
    }[what]  # fmt: skip

    def failing(*args, **options):
        seen.append(args)
        if len(seen) > when:
            raise error
        return keep(*args, **options)

    owner = {"room": HostChunks, "disk": DiskChunks, "Ctrl-C": Ledger}[what]
    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(owner, keep.__name__, failing)
        with placed(model, optimizer, everywhere(ON_DISK if what == "disk" else AWAY), directory=tmp_path):
            pass
    losses += [plain_loop(model, optimizer, step) for step in range(2, 4)]
    assert losses == reference(4, masters=None).losses


def test_a_move_for_which_the_device_has_no_room_loses_nothing(tmp_path):
    """Not even for one module in passing: parameters that live in host memory stay there."""
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(AWAY), directory=tmp_path, masters="fp32") as states:
        losses = [plain_loop(model, optimizer, step) for step in range(2)]
        states.retire()
        others = states.device.empty(states.device.capacity_bytes - states.device.memory().allocated_bytes)
        with pytest.raises(OutOfDeviceMemory):
            moved(states, {**everywhere(AWAY), "head": ON_DEVICE})
        assert not states.is_installed
        del others
    with placed(model, optimizer, OTHERS, directory=tmp_path, masters="fp32"):
        losses += [plain_loop(model, optimizer, step) for step in range(2, 4)]
    assert losses == reference(4).losses
