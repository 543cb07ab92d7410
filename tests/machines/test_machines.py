from __future__ import annotations

import pytest

from tierwise import machines
from tierwise.errors import BadFile, UnknownName
from tierwise.ir import serial

GB, GIB = 10**9, 2**30


@pytest.mark.parametrize("name", machines.names())
def test_every_shipped_machine_is_sane(name):
    machine = machines.load(name)
    assert machine.name == name
    assert machine.source.startswith(("measured ", "data sheet "))
    assert [tier.name for tier in machine.tiers] == ["hbm", "dram", "nvme"]
    assert [(p.name, p.tier) for p in machine.processors] == [("gpu", "hbm"), ("cpu", "dram")]
    assert 10 * GIB < machine.capacity("hbm") < 200 * GIB
    assert machine.capacity("dram") >= 32 * GIB
    assert machine.capacity("nvme") >= 64 * GIB
    gpu, cpu = machine.processors
    assert set(gpu.flops_per_second) == {"bf16", "fp16", "tf32", "fp32"}
    assert gpu.flops_per_second["fp32"] <= gpu.flops_per_second["tf32"] <= gpu.flops_per_second["fp16"]
    assert 5e12 < gpu.flops_per_second["fp32"] < gpu.flops_per_second["fp16"] * 1.01 < 1e15
    assert 200 * GB < gpu.bytes_per_second < 5000 * GB
    assert 10 * GB < cpu.bytes_per_second < gpu.bytes_per_second
    assert 0 < gpu.launch_seconds <= cpu.launch_seconds < 1e-4


@pytest.mark.parametrize("name", machines.names())
def test_bytes_get_from_every_tier_to_every_other(name):
    machine = machines.load(name)
    pairs = {(a, b) for a in machine.tier_named for b in machine.tier_named if a != b}
    assert set(machine.link_between) == pairs
    device = machine.device.bytes_per_second
    for there, back in (("hbm", "dram"), ("hbm", "nvme"), ("dram", "nvme")):
        out, into = machine.link(there, back), machine.link(back, there)
        assert not set(out.lanes) & set(into.lanes), "each direction is a lane of its own"
        assert 0.3 * GB < out.bytes_per_second <= into.bytes_per_second < device
    # Disk traffic of the device takes its share of PCIe, and waits for the disk in a bounce buffer of host memory.
    for link, lane in ((machine.link("hbm", "nvme"), "out"), (machine.link("nvme", "hbm"), "in")):
        assert link.lanes[lane] == machine.link_between["hbm", "dram"].lanes["out"]
        assert (link.staging_tier, link.staging_bytes) == ("dram", 4 * (16 << 20))


def test_the_measured_h200_is_what_was_measured():
    h200 = machines.load("h200")
    assert h200.copy_seconds(55_400_000_000, "dram", "hbm") == pytest.approx(1.0, rel=1e-5)
    adamw_bytes = 2 + 3 * (4 + 4) + 2  # gradient in; master and two moments in and out; parameter out
    assert h200.processor_named["cpu"].bytes_per_second / adamw_bytes == pytest.approx(4.27e9)


def test_a_machine_file_is_loaded_by_its_path(tmp_path):
    one = machines.load("t4")
    serial.save(one, tmp_path / "mine.json")
    assert machines.load(tmp_path / "mine.json") == machines.load(str(tmp_path / "mine.json")) == one


def test_unknown_machines_name_the_nearest():
    with pytest.raises(UnknownName, match="unknown machine 'h20'; did you mean 'h200'"):
        machines.load("h20")
    with pytest.raises(BadFile, match="cannot read nowhere"):
        machines.load("nowhere.json")
