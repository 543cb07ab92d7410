"""A shipped profile with what only this machine knows."""

from __future__ import annotations

import pytest
import torch
from fitting.test_states import batch, model_and_optimizer
from fitting.training import fitting

from tierwise import machines
from tierwise.execute.states.passes import HostRate
from tierwise.fitting import fitted, measured_here
from tierwise.ir import Phase
from tierwise.profile.links import Affine, DiskRates


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_links_that_share_a_lane_have_its_rate():
    shipped = machines.load("h200")
    found = measured_here.with_rates_of_links(shipped, Affine(3e-6, 12e9), Affine(4e-6, 11e9))
    assert (found.link("hbm", "dram").lanes, found.link("dram", "hbm").lanes) == ({"out": 12e9}, {"in": 11e9})
    assert (found.link("hbm", "dram").latency_seconds, found.link("dram", "hbm").latency_seconds) == (3e-6, 4e-6)
    assert found.link("nvme", "hbm").lanes == {"in": 11e9, "disk read": shipped.link("nvme", "dram").lanes["disk read"]}


def test_the_disk_is_the_one_that_was_named(tmp_path, monkeypatch):
    shipped = machines.load("h200")
    monkeypatch.setattr(measured_here, "measure_disk", lambda directory: DiskRates(1e9, 2e9, 1e9))
    found = measured_here.with_disk(shipped, tmp_path)
    assert found.link("hbm", "nvme").lanes == {"out": shipped.link("hbm", "dram").lanes["out"], "disk write": 1e9, "disk": 1e9}
    assert found.link("nvme", "dram").lanes == {"disk read": 2e9, "disk": 2e9}
    assert found.link("dram", "hbm") == shipped.link("dram", "hbm")


def test_a_disk_that_cannot_be_written_is_somebody_elses_trouble(tmp_path):
    shipped = machines.load("h200")
    assert measured_here.with_disk(shipped, tmp_path / "missing") == shipped


def test_updates_of_the_whole_model_take_what_an_element_was_measured_to_take(monkeypatch):
    monkeypatch.setattr(measured_here, "UPDATED_ELEMENTS", 1 << 12)
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1200KiB") as found:
        found.prepare((), batch(0))
        (menu,) = (prepared.menu for prepared in found._menus.values())
    card = torch.device("cpu")
    each = measured_here._update_seconds(optimizer, torch.float32, card)
    assert each > 0 and measured_here._update_seconds(optimizer, torch.float32, card) == each  # remembered
    after = measured_here.with_card(menu, optimizer, card)
    updates = [(op.id, "gpu") for op in menu.problem.graph.ops if op.phase is Phase.UPDATE]
    assert sum(after.problem.costs.op_seconds[op] for op in updates) == pytest.approx(each * sum(p.numel() for p in model.parameters()))
    others = menu.problem.costs.op_seconds.keys() - {*updates}
    assert all(after.problem.costs.op_seconds[op] == menu.problem.costs.op_seconds[op] for op in others)


def test_the_host_is_measured_once(monkeypatch):
    asked = []

    def best_host(candidates, elements):
        asked.append(candidates)
        return HostRate(3, (1, 2, 5), 2e9)

    monkeypatch.setattr(measured_here, "best_host", best_host)
    assert measured_here.host_rate() == measured_here.host_rate() == HostRate(3, (1, 2, 5), 2e9)
    assert len(asked) == 1


def test_updates_on_the_cpu_are_planned_at_its_speed_and_run_on_its_threads(monkeypatch):
    """The null device's CPU counts with 1e10 bytes a second, and this one updates a hundred million parameters of 28 bytes."""
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    monkeypatch.setattr(fitted, "host_rate", lambda: HostRate(1, None, 1e8))
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1200KiB") as found:
        plan = found.prepare((), batch(0))
        (menu,) = (prepared.menu for prepared in found._menus.values())
        before, after = menu.problem.costs.op_seconds, plan.menu.problem.costs.op_seconds
        assert all(after[key] == pytest.approx(before[key] * 1e10 / 28e8) for key in before if key[1] == "cpu")
        assert measured_here.with_host(plan.menu, found.lasting.host) is plan.menu  # not twice
        assert found.lasting.states is not None and found.lasting.states._threads == 1


def test_no_cpu_is_planned_faster_than_host_memory_lets_it_be():
    """One that updates 6 G parameters a second alone counts as one with 4.5."""
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1200KiB") as found:
        menu = found.prepare((), batch(0)).menu
    fast, most = (measured_here.with_host(menu, HostRate(1, None, rate)) for rate in (6e9, 4.5e9))
    assert fast == most
    assert fast.problem.machine.processor_named["cpu"].bytes_per_second == pytest.approx(28 * 4.5e9)


def test_nothing_is_measured_where_everything_fits(monkeypatch):
    monkeypatch.setattr(fitted, "LEARNS_ON", {"cpu"})
    monkeypatch.setattr(fitted, "host_rate", lambda: pytest.fail("measured"))
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget="1GiB") as found:
        assert not found.prepare((), batch(0)).program.states
