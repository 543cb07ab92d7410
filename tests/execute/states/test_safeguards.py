"""Each safeguard of lasting state, taken away, is noticed under delays; with all of them nothing is wrong."""

from __future__ import annotations

import time

import pytest
import torch
from execute.states.training import adamw, clipped_loop, everywhere, net, placed, plain_loop, reference

from tierwise.errors import TierwiseError
from tierwise.execute.lanes import already
from tierwise.execute.states import updates
from tierwise.execute.states.backlog import Backlog
from tierwise.execute.states.gradients import Held, Traffic
from tierwise.execute.states.guards import unguard
from tierwise.execute.states.homes import DiskChunks, HostChunks, Ring
from tierwise.execute.states.parameters import Residence
from tierwise.execute.states.placement import Placement
from tierwise.execute.states.stepping import Stepping
from tierwise.execute.states.updates import Updates

CPU = Placement("host", "cpu", gradients="host")
STREAMED = Placement("host", "streamed", gradients="host")
AWAY = Placement("host", "streamed", "host", "host")
CPU_AWAY = Placement("host", "cpu", "host", "host")
DISK = Placement("nvme", "cpu", "nvme", "host")


class Impatient:
    """An event that is over as soon as it is asked for."""

    def __init__(self, event) -> None:
        self._event = event

    def done(self) -> bool:
        return True

    def failed(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    settle = wait


def without_waiting_for_updates(monkeypatch):
    def finish(stepping, home):
        if home.pending is not None and home not in stepping._residences:
            unguard(slot.parameter for slot in home.unit.slots)
        home.pending = None

    monkeypatch.setattr(Stepping, "finish", finish)


def without_waiting_for_gradients(monkeypatch):
    original = Stepping._job

    def job(stepping, home, slots):
        made = original(stepping, home, slots)
        return type(made)(made.runs, made.slots, made.gradients, made.targets, (), made.ready)

    monkeypatch.setattr(Stepping, "_job", job)


def without_holding_gradients_that_leave(monkeypatch):
    monkeypatch.setattr(Traffic, "hold", lambda traffic, event, flat: None)


def without_keeping_what_an_update_reads(monkeypatch):
    original = Updates.launch

    def launch(updates, home, job, needed=0):
        pending = original(updates, home, job, needed)
        if pending is not None:
            pending.keep.clear()
            job.gradients.clear(), job.targets.clear()
        return pending

    monkeypatch.setattr(Updates, "launch", launch)


def without_waiting_for_buffers(monkeypatch):
    monkeypatch.setattr(Ring, "give", lambda ring, block, after: ring._free.put((block, already())))


def without_waiting_for_staging(monkeypatch):
    original = updates.Staging.next

    def next(staging):
        number = original(staging)
        staging.free[number] = already()
        return number

    monkeypatch.setattr(updates.Staging, "next", next)


def without_waiting_for_state_that_leaves(monkeypatch):
    monkeypatch.setattr(HostChunks, "give", lambda chunks, index, after: None)


def without_waiting_for_parameters_to_arrive(monkeypatch):
    original = Residence._copy_in
    monkeypatch.setattr(Residence, "_copy_in", lambda residence, after: Impatient(original(residence, after)))


def without_waiting_for_the_update_before_parameters_come(monkeypatch):
    monkeypatch.setattr(Residence, "start", _eager_start)


def _eager_start(residence):
    if residence.is_here or residence._coming is not None:
        return
    residence._device.resize(residence._storage, residence.unit.nbytes)
    residence._coming = None, [residence._copy_in(residence._device.mark())]


def without_dropping_what_is_old(monkeypatch):
    monkeypatch.setattr(Residence, "outdate", lambda residence, in_use: None)
    monkeypatch.setattr(Residence, "leave", lambda residence: None)


def without_waiting_for_reads(monkeypatch):
    monkeypatch.setattr(DiskChunks, "take", lambda chunks, index: (chunks._arrays(index), ()))


def without_factors(monkeypatch):
    monkeypatch.setattr(Held, "settle_factors", lambda held: None)


OUT, IN = "device to host", "host to device"
CASES = [  # what is taken away, where, which lane is slow, and whether gradients are clipped
    (without_waiting_for_updates, CPU, IN, True),
    (without_waiting_for_updates, STREAMED, IN, True),
    (without_waiting_for_gradients, CPU, OUT, False),
    (without_waiting_for_gradients, STREAMED, OUT, False),
    (without_holding_gradients_that_leave, CPU, OUT, True),
    (without_keeping_what_an_update_reads, Placement("host", "streamed"), IN, True),
    (without_waiting_for_buffers, CPU, IN, True),
    (without_waiting_for_staging, STREAMED, OUT, True),
    (without_waiting_for_state_that_leaves, Placement("host", "streamed"), OUT, False),
    (without_waiting_for_parameters_to_arrive, AWAY, IN, True),
    (without_waiting_for_the_update_before_parameters_come, CPU_AWAY, "updates", True),
    (without_dropping_what_is_old, CPU_AWAY, IN, True),
    (without_waiting_for_reads, DISK, IN, True),
    (without_factors, CPU, IN, True),
]


def moments_of(states) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in states.collected().values()]


def trouble(placement, tmp_path, monkeypatch, slow=OUT, clip=True) -> bool:
    """Whether three steps under delays go wrong: other losses or state, lost copies, or an error."""
    model = net()
    optimizer = adamw(model)
    loop = clipped_loop if clip else plain_loop
    losses = []
    original = Updates._on_cpu

    def on_cpu(updates, home, job, needed):
        time.sleep(0.01 * (slow == "updates"))
        return original(updates, home, job, needed)

    def before_copy(direction, nbytes):
        time.sleep(0.005 * (direction.value == slow))

    monkeypatch.setattr(Updates, "_on_cpu", on_cpu)
    try:
        with placed(model, optimizer, everywhere(placement), directory=tmp_path, masters="fp32", delay=0.001, before_copy=before_copy) as states:
            for step in range(3):
                losses.append(loop(model, optimizer, step))
            saved, moments = {name: value.clone() for name, value in model.state_dict().items()}, moments_of(states)
            states.device.synchronize()
            if not all(map(torch.equal, moments, moments_of(states))):  # what was read was still on its way
                return True
    except (TierwiseError, AssertionError, RuntimeError, KeyError, IndexError):
        return True
    expected = reference(3, loop=loop)
    return losses != expected.losses or any(not torch.equal(saved[name], value) for name, value in expected.parameters.items())


@pytest.mark.parametrize(
    ("placement", "slow"),
    [(CPU, IN), (CPU, "updates"), (STREAMED, OUT), (STREAMED, IN), (AWAY, OUT), (CPU_AWAY, "updates"), (DISK, IN)],
    ids=lambda value: value if isinstance(value, str) else f"{value.update}-{value.state}-{value.parameters}",
)
def test_with_all_safeguards_nothing_is_wrong(placement, slow, tmp_path, monkeypatch):
    assert not trouble(placement, tmp_path, monkeypatch, slow, clip=False)


@pytest.mark.parametrize("placement", [CPU, CPU_AWAY], ids=["parameters on the device", "parameters in host memory"])
def test_updates_that_stop_for_others_have_the_same_bits(placement, monkeypatch, tmp_path):
    """Every update takes its time between chunks, so that gradients of layers that are needed before arrive in the middle of it."""
    original, let_in = Backlog.let_in, []

    def slowly(backlog, needed, first):
        time.sleep(0.003)
        before = backlog._let_in
        original(backlog, needed, first)
        let_in.append(backlog._let_in - before)

    monkeypatch.setattr(Backlog, "let_in", slowly)
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(placement), directory=tmp_path, masters="fp32", update="backward"):
        losses = [plain_loop(model, optimizer, step) for step in range(3)]
        saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = reference(3, loop=plain_loop)
    assert sum(let_in) > 0, "nobody was let in, so this shows nothing"
    assert losses == expected.losses and all(torch.equal(saved[name], value) for name, value in expected.parameters.items())


@pytest.mark.parametrize(("remove", "placement", "slow", "clip"), CASES, ids=[f"{case[0].__name__}-{case[1].update}" for case in CASES])
def test_each_safeguard_is_needed(remove, placement, slow, clip, monkeypatch, tmp_path):
    remove(monkeypatch)
    assert trouble(placement, tmp_path, monkeypatch, slow, clip)
