"""What leaves the device goes where it may: host memory, pinned or not, and a disk, each within its limit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from fitting.training import ROWS, WIDTH, batch, fitting, forced, same, three_steps, tower

from tierwise.execute.below import Below, bounce_bytes
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import plan_of, stats

KIB = 1 << 10
ONE_BLOCK = 9 * ROWS * WIDTH * 4  # what a block that keeps everything sends away


def tiers_of(plan) -> list[str]:
    return [call.tier for call in plan.program.calls.values() if call.sent]


def test_through_the_disk_bit_for_bit(tmp_path, monkeypatch):
    with forced(monkeypatch, "keep", send=True, tier="nvme"):
        found = same(three_steps, tower(dropout=0.1), budget="64MiB", nvme=f"{tmp_path}:8MiB", host="256KiB")
    assert set(tiers_of(found.current)) == {"nvme"}
    assert not list(tmp_path.iterdir())  # the scratch file is gone


def test_host_memory_first_and_the_disk_for_the_rest(tmp_path):
    """At this budget six blocks send the 32 KiB they were given; 160 KiB of host memory hold four of these and the disk's buffers."""
    model = tower(blocks=8)
    with fitting(model, budget="0.75MiB", nvme=f"{tmp_path}:8MiB", host="160KiB") as found:
        model(**batch(0)).backward()
        assert set(tiers_of(plan_of(model))) == {"dram", "nvme"}
        assert found.below.host_bytes <= 160 * KIB
        assert plan_of(model).host_bytes <= 160 * KIB
        assert stats(model)["disk_written_bytes"] > 0
        (scratch,) = tmp_path.iterdir()
        assert scratch.stat().st_size == 8 << 20
    assert not list(tmp_path.iterdir())
    same(three_steps, tower(blocks=8), budget="0.75MiB", nvme=f"{tmp_path}:8MiB", host="160KiB")


@pytest.mark.parametrize("pinned", ["4KiB", "200KiB"])
def test_what_may_not_be_pinned_is_pageable(pinned, monkeypatch):
    device = NullDevice(1 << 30)
    with forced(monkeypatch, "keep", send=True):
        found = same(three_steps, tower(), budget="64MiB", pinned=pinned, device=device)
        model = tower()
        with fitting(model, budget="64MiB", pinned=pinned):
            model(**batch(0)).backward()
            numbers = stats(model)
    assert numbers["pinned_bytes"] == int(pinned[:-3]) * KIB < numbers["host_bytes"]
    assert found.below.copies.counts().sent_bytes == 3 * 4 * ONE_BLOCK


def test_what_the_system_does_not_pin_is_pageable(monkeypatch, caplog):
    with forced(monkeypatch, "keep", send=True):
        same(three_steps, tower(), budget="64MiB", device=NullDevice(1 << 30, pinnable_bytes=0))
    assert any("stay pageable" in record.getMessage() for record in caplog.records)


def test_when_host_memory_is_short_after_all_it_stays_on_the_device(monkeypatch):
    """Three forwards before a backward, and host memory for one."""

    def loop(model, optimizer):
        losses = [model(**batch(number)) for number in range(3)]
        sum(losses).backward()
        yield losses

    model = tower()
    with forced(monkeypatch, "keep", send=True), fitting(model, budget="64MiB", host="2MiB"):
        model(**batch(0)).backward()
        planned = plan_of(model).host_slab_bytes
    with forced(monkeypatch, "keep", send=True):
        found = same(loop, tower(), budget="64MiB", host=planned + 300 * KIB)
    assert any("stays on the device" in sentence and "host= allows" in sentence for sentence in found.session.events.said)


def test_slabs_grow_with_the_plan_and_are_replaced_when_empty(tmp_path):
    device = NullDevice(1 << 30)
    below = Below(device, host_limit_bytes=1 << 20)
    below.provide(100 * KIB, 0)
    below.provide(50 * KIB, 0)
    assert below.host_bytes == 100 * KIB
    below.provide(200 * KIB, 0)
    assert below.host_bytes == 200 * KIB  # one slab, since nothing was in the first
    ticket = below.copies.send(device.empty(8 * KIB))
    below.provide(300 * KIB, 0)
    assert below.host_bytes == 300 * KIB and below.used_bytes == 8 * KIB  # two, since something is
    del ticket
    below.copies.release_sent()
    assert below.used_bytes == 0
    below.close()
    device.close()
    assert not device.pinned


def test_a_slab_that_turns_out_too_small_gets_an_eighth_more():
    device = NullDevice(1 << 30)
    below = Below(device)
    below.provide(160 * KIB, 0)
    tickets = [below.copies.send(device.empty(80 * KIB)) for _ in range(2)]  # full
    tickets.append(below.copies.send(device.empty(8 * KIB)))
    assert below.host_bytes == (160 + 20) * KIB
    tickets.append(below.copies.send(device.empty(64 * KIB)))  # or as much as is asked for
    assert below.host_bytes == (180 + 64) * KIB
    tickets.clear()
    below.copies.release_sent()
    below.close()
    device.close()


def test_the_disk_s_buffers_are_a_small_part_of_a_small_limit():
    assert bounce_bytes(None) == 64 << 20
    assert bounce_bytes(1 << 40) == 64 << 20
    assert bounce_bytes(1 << 20) == 128 * KIB
    assert bounce_bytes(1) == 4 * 4096  # one page for each of four requests: less is not possible


SCRIPT = """
import os, sys
sys.path[:0] = [{tests!r}]
from fitting.training import batch, forced, tower
import pytest
from tierwise.fitting import fit

def begin():
    global model, loss  # they last as long as the process
    model = tower()
    with forced(pytest.MonkeyPatch(), "keep", send=True, tier="nvme"):
        fit(model, budget="64MiB", nvme={directory!r} + ":8MiB", host="256KiB", compile=False, progress=lambda _: None)
        loss = model(**batch(0))
    print(sorted(os.listdir({directory!r})), flush=True)

crashes = os.fork()  # a process of its own, without waiting for another import of torch
if not crashes:
    begin()
    os.kill(os.getpid(), 9)
assert os.waitpid(crashes, 0)[1] == 9
print(sorted(os.listdir({directory!r})), flush=True)
begin()
raise SystemExit(3)
"""


def test_the_file_is_removed_when_the_interpreter_exits_and_after_a_crash_by_the_next_run(tmp_path):
    code = SCRIPT.format(tests=str(Path(__file__).parent.parent), directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    in_use, left, next_run = map(ast.literal_eval, done.stdout.splitlines())
    assert len(in_use) == 1 and in_use[0].endswith(".scratch")
    assert left == in_use
    assert len(next_run) == 1 and next_run != left  # its own; the one that was left is gone
    assert not list(tmp_path.iterdir())  # and after its end so is its own
