from pathlib import Path

import pytest

from tierwise.ir import Machine, serial
from tierwise.profile import links, probe


def test_fit_finds_latency_and_rate():
    found = links.fit({size: 2.0 + size / 5.0 for size in (10, 100, 1000)})
    assert (found.latency_seconds, found.bytes_per_second) == (pytest.approx(2.0), pytest.approx(5.0))


def test_fit_never_gives_a_negative_latency():
    found = links.fit({10: 1.0, 100: 20.0})  # the large copy was slower per byte: noise
    assert found.latency_seconds == 0
    assert found.bytes_per_second == pytest.approx(1 / 0.15)


def test_probe_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(links, "DISK_TEST_BYTES", 1 << 20)
    monkeypatch.setattr(links, "DISK_REQUEST_BYTES", 1 << 18)
    monkeypatch.setattr(probe, "UPDATE_PARAMETERS", 1 << 10)
    monkeypatch.setattr(probe, "MATMUL_SIZE", 512)
    said: list[str] = []
    machine = probe.probe(tmp_path, said.append)
    assert serial.loads(serial.dumps(machine), Machine) == machine
    assert (machine.device.name, machine.device.tier) == ("cpu", "dram")
    assert machine.source.startswith("measured")
    assert said[0] == "disk"
    assert list(tmp_path.iterdir()) == [], "the scratch file of the disk test stays behind"


def test_host_memory_honours_a_control_group(monkeypatch: pytest.MonkeyPatch):
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: "1000000\n" if str(path).endswith("memory.max") else real(path, **kw))
    assert probe.host_memory_bytes() == 1_000_000
