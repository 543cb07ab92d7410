"""Activations and lasting state in one budget, on the null device: the same losses and parameters to the bit, and the budget held."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fitting.training import Tower, equal, fitting
from safetensors.torch import save_file
from torch import nn

import tierwise
from tierwise.errors import BadInput, InfeasibleBudget, OutOfHostMemory, UnknownName
from tierwise.execute.null_device import NullDevice
from tierwise.execute.states.gradients import LEAVING_BYTES
from tierwise.fitting import fitted, plan_of
from tierwise.fitting.homes import homes_of
from tierwise.fitting.lasting import Lasting
from tierwise.ir import ON_DEVICE, Placement, Role, check_schedule, peak_bytes
from tierwise.lower import image, keep_everything
from tierwise.lower.bound import least_seconds
from tierwise.lower.compact import compact
from tierwise.lower.states import anew
from tierwise.report.summary import times
from tierwise.simulate import simulate

ROWS = 64
KIB = 1 << 10


class Wide(Tower):
    """A tower whose parameters outweigh its activations: 33 thousand in each block, of four 600 KiB in all, and twice that of moments."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks=blocks)
        self.enter, self.leave = nn.Linear(8, 64), nn.Linear(64, 4)
        self.blocks = nn.ModuleList(type(self.blocks[0])(width=64) for _ in range(blocks))


FEW = 2  # blocks, where it does not matter how many: a plan for them takes half as long


def model_and_optimizer(kind=torch.optim.AdamW, blocks: int = 4):
    torch.manual_seed(0)
    model = Wide(blocks).train()
    return model, kind(model.parameters(), lr=0.01)


def batch(number: int, rows: int = ROWS):
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(rows, 8, generator=generator), "target": torch.randn(rows, 4, generator=generator)}


def train(model, optimizer, *, steps=4, clip=False, accumulate=1, scheduler=None):
    losses = []
    for number in range(steps):
        for part in range(accumulate):
            loss = model(**batch(10 * number + part))
            loss.backward()
            losses.append(loss.item())
        if clip:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def untouched(blocks: int = 4, **options):
    model, optimizer = model_and_optimizer(blocks=blocks)
    losses = train(model, optimizer, **options)
    return losses, model.state_dict(), optimizer.state_dict()


def homes(model) -> set[tuple[str, str, str]]:
    return {(place.state, place.update, place.parameters) for place in plan_of(model).program.states.values()}


@pytest.mark.parametrize("update", ["after", "backward"])
def test_a_compact_menu_has_the_same_images(update):
    """Fewer ops and storages; the device holds as much, and the step takes as long but for latencies."""
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=1400 * KIB, update=update) as found:
        plan = found.prepare((), batch(0))
        small = compact(plan.menu)
    assert plan.program.states
    assert plan.predicted.seconds >= least_seconds(plan.menu, update)
    assert (len(plan.menu.problem.graph.ops), len(small.problem.graph.ops)) == (96, 48)
    assert len(small.problem.graph.storages) < len(plan.menu.problem.graph.storages)
    for program in (keep_everything(plan.menu), plan.program):
        one, other = image(plan.menu, program), image(small, program)
        assert peak_bytes(one.problem, one.schedule)["hbm"] == peak_bytes(other.problem, other.schedule)["hbm"]
        seconds = [simulate(made.problem.with_budget(1 << 30), made.schedule).seconds for made in (one, other)]
        assert seconds[1] == pytest.approx(seconds[0], rel=0.1)


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize(
    "budget",
    [1400 * KIB, 760 * KIB],  # moments leave; parameters too
)
def test_the_same_bits_within_the_budget(update, budget):
    losses, weights, state = untouched()
    model, optimizer = model_and_optimizer()
    device = NullDevice(1 << 30)
    with fitting(model, optimizer=optimizer, budget=budget, update=update, device=device):
        assert train(model, optimizer) == losses
        assert plan_of(model).program.states
        assert device.memory().peak_allocated_bytes <= plan_of(model).peak_bytes <= budget
        assert equal(optimizer.state_dict()["state"], state["state"])
        assert equal(dict(model.state_dict()), dict(weights))
    assert equal(dict(model.state_dict()), dict(weights))  # and after it was given back
    assert equal(optimizer.state_dict()["state"], state["state"])


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("place", [Placement("host", "streamed"), Placement("host", "streamed", "host"), Placement("host", "cpu", gradients="host")])
def test_gradients_to_which_the_next_are_added_stay_where_they_are(update, place):
    """Whoever updates elsewhere has a copy of them, which is old as soon as the next batch's are added."""
    model, optimizer = model_and_optimizer(blocks=FEW)
    with fitting(model, optimizer=optimizer, budget="64MiB") as found:
        model(**batch(0)).backward()
        menu = found.prepare((), batch(1)).menu
        kept = {storage.name for storage in menu.problem.graph.storages if storage.lasting and storage.role is Role.GRAD}
        paths = ("blocks.0", "blocks.1.up", "leave")
        graph = anew(menu.problem.graph, paths if place.gradients == "host" else ())
        menu = replace(menu, problem=replace(menu.problem, graph=graph))
        made = image(menu, replace(keep_everything(menu), states=dict.fromkeys(paths, place), update=update))
    assert {f"{name}.grad" for name, _ in model.named_parameters()} == kept
    check_schedule(made.problem, made.schedule)


def test_parameters_that_no_step_uses_are_in_nobodys_way():
    model, _ = model_and_optimizer(blocks=FEW)
    model.spare = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with fitting(model, optimizer=optimizer, budget=700 * KIB, update="backward"):
        losses = train(model, optimizer, steps=2)
        assert plan_of(model).program.states
    assert losses == untouched(FEW, steps=2)[0]


def test_parameters_leave_when_their_moments_are_not_enough():
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=760 * KIB):
        train(model, optimizer, steps=1)
        assert any(parameters == "host" for *_, parameters in homes(model))
        words = "\n".join([*plan_of(model).words(), *plan_of(model).reasons()])
        assert "optimizer state of a module lives in host memory" in words and " before it runs" in words


def test_clipping_accumulation_schedulers_and_evaluation_in_between():
    def loop(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        seen = train(model, optimizer, steps=2, clip=True, accumulate=2, scheduler=scheduler)
        with torch.no_grad():
            seen.append(model(**batch(99)).item())
        return [*seen, *train(model, optimizer, steps=2, clip=True, accumulate=2, scheduler=scheduler)]

    expected = loop(*model_and_optimizer(blocks=FEW))
    model, optimizer = model_and_optimizer(blocks=FEW)
    with fitting(model, optimizer=optimizer, budget=700 * KIB):
        assert loop(model, optimizer) == expected
        assert any(parameters == "host" for *_, parameters in homes(model))


def test_another_batch_runs_around_the_state_as_it_is_and_a_large_one_makes_it_move():
    def loop(model, optimizer, sizes):
        for rows in sizes:
            loss = model(**batch(rows, rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    expected = list(loop(*model_and_optimizer(), (64, 32, 64, 224)))
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=1400 * KIB) as found:
        assert list(loop(model, optimizer, (64, 32, 64))) == expected[:3]
        assert len(found.plans) == 2
        placed = found.lasting.placements
        assert all(plan.program.states == placed for plan in found.plans.values())
        assert list(loop(model, optimizer, (224,))) == expected[3:]
        assert len(found.plans) == 1 and found.lasting.placements != placed


def test_on_the_disk_where_host_memory_is_too_small(tmp_path):
    losses, weights, _ = untouched(steps=2)
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=900 * KIB, host="3MiB", nvme=f"{tmp_path}:16MiB"):
        assert train(model, optimizer, steps=2) == losses
        assert "nvme" in {state for state, *_ in homes(model)}
    assert equal(dict(model.state_dict()), dict(weights))
    assert not list(tmp_path.iterdir())


def test_masters_are_kept_wherever_the_state_is():
    """bf16 parameters with fp32 masters: one formula, so placements do not change a bit."""

    def run(budget):
        model, optimizer = model_and_optimizer(blocks=FEW)
        model.bfloat16()
        seen = []
        with fitting(model, optimizer=optimizer, budget=budget, masters="fp32"):
            for number in range(3):
                loss = model(**{name: value.bfloat16() for name, value in batch(number).items()})
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            state = copy.deepcopy(optimizer.state_dict())
            updates = {place.update for place in plan_of(model).program.states.values()}
        return seen, dict(model.state_dict()), state["state"], updates

    (*expected, kept), (*found, moved) = run(8 << 20), run(700 * KIB)
    assert not kept and "cpu" in moved
    assert equal(found, expected)
    assert found[2][0]["master"].dtype == torch.float32


def test_a_saved_training_goes_on_in_another_budget():
    expected = untouched(steps=4, blocks=FEW)
    model, optimizer = model_and_optimizer(blocks=FEW)
    with fitting(model, optimizer=optimizer, budget=700 * KIB):
        train(model, optimizer, steps=2)
        places = homes(model)
        saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    model, optimizer = model_and_optimizer(blocks=FEW)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    with fitting(model, optimizer=optimizer, budget=1200 * KIB):
        losses = []
        for number in (2, 3):
            loss = model(**batch(10 * number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == expected[0][2:]
        assert homes(model) and homes(model) != places  # they live elsewhere
        assert equal(dict(model.state_dict()), dict(expected[1]))


def test_a_model_without_values_is_read_from_a_checkpoint_module_by_module(tmp_path):
    losses, weights, _ = untouched(steps=2)
    source, _ = model_and_optimizer()
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Wide().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    device = NullDevice(1 << 30)
    with fitting(model, optimizer=optimizer, budget=760 * KIB, weights=tmp_path, device=device):
        assert train(model, optimizer, steps=2) == losses
        assert plan_of(model).program.states and device.memory().peak_allocated_bytes <= 760 * KIB
    assert equal(dict(model.state_dict()), dict(weights))
    with pytest.raises(BadInput, match="the model is on meta"):
        tierwise.fit(Wide().to("meta"), budget=760 * KIB)


def test_what_cannot_be_done_is_said():
    model, optimizer = model_and_optimizer(blocks=FEW)
    with fitting(model, optimizer=optimizer, budget=100 * KIB), pytest.raises(InfeasibleBudget, match="is too small for this step"):
        train(model, optimizer, steps=1)
    with fitting(model, optimizer=optimizer, budget=700 * KIB, host="64KiB"), pytest.raises((InfeasibleBudget, OutOfHostMemory), match="host"):
        train(model, optimizer, steps=1)
    with fitting(model, optimizer=optimizer, budget=800 * KIB, verify=True), pytest.raises(BadInput, match="verify=True runs the step twice"):
        train(model, optimizer, steps=1)
    with pytest.raises(UnknownName), fitting(model, optimizer=optimizer, budget=900 * KIB, update="before"):
        pass
    assert train(model, optimizer) == untouched(blocks=FEW)[0]  # after all of it the model is as it was


@pytest.mark.parametrize(
    ("masters", "on_card", "places"), [(None, True, {"streamed"}), (None, False, {"cpu", "streamed"}), ("fp32", True, {"cpu", "streamed"})]
)
def test_on_a_card_torch_s_own_updates_run_there(masters, on_card, places):
    """On the CPU they would have other last bits. Our formula has the same ones everywhere, and the null device is a CPU itself."""
    model, optimizer = model_and_optimizer()
    graph = tierwise.capture(model, batch(0), optimizer=optimizer)
    found = homes_of(model, graph, optimizer, masters=masters, update="after", disk=True, on_card=on_card)
    assert found and all({home.update for home in options} == {"device", *places} for options in found.values())


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), "soon"])
def test_a_time_to_plan_in_that_is_none(seconds):
    model, optimizer = model_and_optimizer()
    with pytest.raises(BadInput, match="is no number of seconds; use one above 0, such as plan_seconds=10"):
        tierwise.fit(model, optimizer, budget="1MiB", device=NullDevice(1 << 30), plan_seconds=seconds)


def test_parameters_come_as_early_as_the_plan_says():
    """Also where another plan has the same places: nothing moves for it."""
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=1400 * KIB, update="backward") as found:
        plan = found.prepare((), batch(0))
        states = found.lasting.states
        assert states is not None and states.residency.ahead == plan.program.ahead
        found.current = replace(plan, program=replace(plan.program, ahead=3))
        found.plans = dict.fromkeys(found.plans, found.current)
        found.prepare((), batch(0))
        assert found.lasting.states is states and states.residency.ahead == 3


def test_what_passes_through_the_device_is_not_said_to_live_there(monkeypatch):
    """As on a card, where torch's own updates pass through it: buffers for that are counted, and no tier of them is shown."""
    monkeypatch.setattr(fitted, "homes_of", lambda *args, **options: homes_of(*args, **{**options, "on_card": True}))
    model, optimizer = model_and_optimizer()
    with fitting(model, optimizer=optimizer, budget=1000 * KIB, update="backward") as found:
        plan = found.prepare((), batch(0))
        assert {place.update for place in plan.program.states.values()} == {"streamed"}
        staging, _ = found.lasting.takes(plan.program.states)
        said = plan.summary()
        run = plan.run("placed")
    assert staging > 0 and plan.aside_bytes >= staging
    assert "on the gpu beside its other work" in said and "passing" not in said
    assert [peak.tier for peak in times(run.predicted, run.problem, run.schedule).peaks] == ["hbm", "dram", "nvme"]


def test_room_is_left_for_holes_between_what_comes_and_goes():
    """Of the parameters of the largest module that moves, five times with compiled blocks and else three; and of a sixteenth of gradients that wait:
    at most an eighth of the budget."""
    model, optimizer = model_and_optimizer()
    nbytes = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    waiting = Placement("host", "streamed", "device", "device")
    with fitting(model, optimizer=optimizer, budget="64MiB") as found:
        lasting = found.lasting
        assert lasting.holes_bytes({}) == lasting.holes_bytes({"blocks.0": ON_DEVICE}) == 0
        assert lasting.holes_bytes({"blocks.0": Placement("host", "cpu", "device", "host")}) == 3 * nbytes
        assert lasting.holes_bytes({"blocks.0": waiting, "blocks.1": waiting}) == 3 * nbytes + 2 * nbytes // 16
    with fitting(model, optimizer=optimizer, budget="64MiB", compile=True) as found:
        assert found.lasting.holes_bytes({"blocks.0": waiting}) == 5 * nbytes + nbytes // 16
    with fitting(model, optimizer=optimizer, budget=760 * KIB) as found:
        assert found.lasting.holes_bytes({"blocks.0": waiting}) == 760 * KIB // 8 < 3 * nbytes


@pytest.mark.parametrize(("largest", "budget", "expected"), [(200, 8000, 300), (200, 4000, 200), (10, 8000, 160), (10, 10**12, LEAVING_BYTES)])
def test_gradients_of_a_module_leave_while_it_goes_back(largest, budget, expected):
    """One and a half times the largest module's, within a twentieth of the budget; where modules are small what the link likes, within a fiftieth."""
    known = SimpleNamespace(_least_leaving_bytes=min(LEAVING_BYTES, budget // 50), _budget_bytes=budget, _sizes=lambda placements, size: [5, largest])
    assert Lasting._leaving_bytes(known, {}) == expected
