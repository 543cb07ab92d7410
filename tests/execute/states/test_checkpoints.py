"""What is saved can be resumed, whatever happens: in another placement, in another process, after a kill, with a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from execute.states.test_placements import MIXED
from execute.states.training import adamw, everywhere, net, placed, plain_loop, reference

from tierwise.errors import BadFile, BadInput, CopyFault, CorruptBlock, StorageFault, StorageFull
from tierwise.execute.states.placement import Placement

DISK = everywhere(Placement("nvme", "cpu", "nvme", "host"))
STREAMED = everywhere(Placement("host", "streamed"))


def run(model, optimizer, steps):
    return [plain_loop(model, optimizer, step) for step in steps]


def resumed(placements, directory, name, steps, **options):
    torch.manual_seed(99)
    model = type(net())().to(options.pop("dtype", torch.bfloat16))  # other values than the saved ones
    optimizer = adamw(model)
    with placed(model, optimizer, placements, directory=directory, **options) as states:
        states.restore(name)
        return run(model, optimizer, steps)


@pytest.mark.parametrize("masters", [None, "fp32"])
@pytest.mark.parametrize("before", [DISK, MIXED, {}], ids=["disk", "mixed", "device"])
def test_published_in_one_placement_and_restored_in_others(before, masters, tmp_path):
    expected = reference(4, masters=masters).losses
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, before, directory=tmp_path, masters=masters) as states:
        assert run(model, optimizer, range(2)) == expected[:2]
        optimizer.param_groups[0]["lr"] = 1e-2
        states.publish("step")
        assert run(model, optimizer, range(2, 4)) == expected[2:]  # publishing changes nothing
    for after in (DISK, STREAMED, {}):
        assert resumed(after, tmp_path, "step", range(2, 4), masters=masters) == expected[2:]


def test_settings_and_buffers_are_part_of_it(tmp_path):
    model = net()
    model.register_buffer("seen", torch.tensor([3, 4]))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    optimizer = adamw(model)
    with placed(model, optimizer, MIXED, directory=tmp_path, masters="fp32") as states:
        optimizer.param_groups[1].update(lr=0.5, betas=(0.8, 0.9))
        states.publish("a")
        model.seen.zero_()
        optimizer.param_groups[1].update(lr=0.1, betas=(0.1, 0.1))
        states.restore("a")
        assert model.seen.tolist() == [3, 4] and optimizer.param_groups[1]["lr"] == 0.5 and optimizer.param_groups[1]["betas"] == (0.8, 0.9)


def test_another_models_checkpoint_is_refused(tmp_path):
    model = net()
    with placed(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, directory=tmp_path) as states:
        states.publish("sgd")
        with pytest.raises(BadFile, match="there is no state 'other'"):
            states.restore("other")
    model = net()
    with placed(model, adamw(model), {}, directory=tmp_path) as states, pytest.raises(BadFile, match="is of SGD and the optimizer is AdamW"):
        states.restore("sgd")
    small = torch.nn.Linear(2, 2)
    with (
        placed(small, torch.optim.SGD(small.parameters(), lr=0.1), {}, directory=tmp_path) as states,
        pytest.raises(BadFile, match="has no weight of 4"),
    ):
        states.restore("sgd")
    with placed(small, None, {}) as states, pytest.raises(BadInput, match="there is none; name one with nvme="):
        states.publish("a")


def test_a_full_directory_leaves_the_last_checkpoint_and_a_model_that_trains(tmp_path, monkeypatch):
    expected = reference(4).losses
    model = net()
    optimizer = adamw(model)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with placed(model, optimizer, DISK, directory=tmp_path, masters="fp32") as states:
        assert run(model, optimizer, range(2)) == expected[:2]
        states.publish("step")
        assert run(model, optimizer, range(2, 3)) == expected[2:3]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match="No space left"):
                states.publish("step")
        assert run(model, optimizer, range(3, 4)) == expected[3:]
    assert resumed(STREAMED, tmp_path, "step", range(2, 4), masters="fp32") == expected[2:]


def test_a_disk_that_fails_in_an_update_is_one_error_until_a_checkpoint_is_restored(tmp_path, monkeypatch):
    expected = reference(4).losses
    model = net()
    optimizer = adamw(model)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with placed(model, optimizer, DISK, directory=tmp_path, masters="fp32") as states:
        assert run(model, optimizer, range(2)) == expected[:2]
        states.publish("step")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", broken)
            with pytest.raises(StorageFault, match="Input/output error"):
                run(model, optimizer, range(2, 4))
        with pytest.raises(StorageFault, match=r"an update failed earlier.*load the last checkpoint"):
            run(model, optimizer, range(2, 4))
        optimizer.zero_grad()
        with pytest.raises(StorageFault, match="an update failed earlier"):
            optimizer.step()
        states.restore("step")
        assert run(model, optimizer, range(2, 4)) == expected[2:]


def test_a_copy_that_fails_in_an_update_is_one_error(tmp_path):
    failing = []

    def before_copy(direction, nbytes):
        if failing:
            raise RuntimeError("the link is down")

    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, everywhere(Placement("host", "streamed")), directory=tmp_path, masters="fp32", before_copy=before_copy) as states:
        run(model, optimizer, range(1))
        states.publish("one")
        failing.append(1)
        with pytest.raises(CopyFault, match="the link is down"):
            run(model, optimizer, range(1, 3))
        failing.clear()
        with pytest.raises(CopyFault, match="an update failed earlier"):
            model(torch.zeros(1, 2, dtype=torch.long))
        states.restore("one")
        assert run(model, optimizer, range(1, 3)) == reference(3).losses[1:]


def test_a_flipped_bit_is_never_loaded(tmp_path):
    model = net()
    optimizer = adamw(model)
    with placed(model, optimizer, {}, directory=tmp_path, masters="fp32") as states:
        run(model, optimizer, range(1))
        states.publish("step")
        file = next(tmp_path.glob("step-*.state"))
        content = bytearray(file.read_bytes())
        content[9 * 4096] ^= 4  # in the middle of it
        file.write_bytes(content)
        with pytest.raises(CorruptBlock):
            states.restore("step")
        with pytest.raises(CorruptBlock, match="load the last checkpoint"):
            run(model, optimizer, range(1))


KILLED = """
import os, sys, signal
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import torch
from execute.states.test_checkpoints import DISK
from execute.states.training import adamw, net, placed, plain_loop
from tierwise.execute.files import PageFile

model = net()
optimizer = adamw(model)
with placed(model, optimizer, DISK, directory=Path(sys.argv[1]), masters="fp32", delay=0.0) as states:
    for step in range(2):
        plain_loop(model, optimizer, step)
    states.publish("step")
    writes, write = [], PageFile.write

    def dying(*args):
        writes.append(1)
        if len(writes) == 4:  # three of the next update's blocks are new, the others are old
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    PageFile.write = dying
    print("training", flush=True)
    for step in range(2, 5):
        plain_loop(model, optimizer, step)
print("still alive")
"""


def test_a_process_killed_between_two_writes_leaves_the_last_checkpoint(tmp_path):
    here = Path(__file__).parents[3]
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), str(here), str(here / "tests")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == -9 and result.stdout == "training\n", result.stderr
    assert list(tmp_path.glob("*.scratch"))  # torn, and nobody's any more
    assert resumed(DISK, tmp_path, "step", range(2, 4), masters="fp32") == reference(4).losses[2:]
    assert not list(tmp_path.glob("*.scratch"))
