"""Parts of regions: of a large block each part has a home of its own, and the whole trains to the same bits."""

from __future__ import annotations

import pytest
import torch
from fitting.test_states import equal, model_and_optimizer, train, untouched
from fitting.training import fitting
from torch import nn

from tierwise.execute.null_device import NullDevice
from tierwise.execute.states.units import Known, units_of
from tierwise.fitting import homes, plan_of
from tierwise.fitting.homes import parts_of
from tierwise.ir import ON_DEVICE, Placement

KIB = 1 << 10
CPU, THROUGH = Placement("host", "cpu", "host", "host"), Placement("host", "streamed")


class Block(nn.Module):
    """As many models have them: of 13 parts of its parameters attention has four, each matrix of the mlp three, and a norm next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({name: nn.Linear(64, 192, bias=False) for name in ("gate", "up", "down")})


def test_a_part_has_a_good_part_of_its_region(monkeypatch):
    """Those of attention are too small by themselves. What is left, the norm, is too small, too: the smallest part stays with it."""
    model = nn.ModuleDict({"block": Block()})
    assert parts_of(model, "block") == []  # too small a block
    monkeypatch.setattr(homes, "LARGE_BYTES", 0)
    assert parts_of(model, "block") == ["block.attention", "block.mlp.up", "block.mlp.down"]
    del model["block"].attention
    assert parts_of(model, "block") == ["block.mlp.up", "block.mlp.down"]
    del model["block"].mlp
    assert parts_of(model, "block") == []


def test_parts_in_one_place_are_one_unit():
    model = nn.ModuleDict({"block": Block(), "head": nn.Linear(4, 4)})
    placements = {"block": CPU, "block.mlp.up": THROUGH, "block.mlp.down": CPU, "head": CPU}
    known = Known.of(model, torch.optim.AdamW(model.parameters()))
    found = units_of(known, placements, regions=["block"])
    assert [(unit.regions, unit.placement, len(unit.slots)) for unit in found] == [
        (("block",), CPU, 8),
        (("block",), THROUGH, 1),
        (("head",), CPU, 2),
    ]
    apart = units_of(known, placements)  # by modules of their own
    assert [unit.regions for unit in apart] == [("block",), ("block.mlp.up",), ("block.mlp.down",), ("head",)]
    stays = units_of(known, {"block": CPU, "block.mlp.up": ON_DEVICE}, regions=["block"])
    assert [(unit.regions, unit.placement, len(unit.slots)) for unit in stays] == [
        (("block",), CPU, 8), (("block",), ON_DEVICE, 1), (("",), ON_DEVICE, 2),
    ]  # fmt: skip
    stays = units_of(known, {"block.mlp.up": THROUGH}, regions=["block"])
    assert [(unit.regions, unit.placement) for unit in stays] == [(("",), ON_DEVICE), (("block",), THROUGH)]


@pytest.mark.parametrize("update", ["after", "backward"])
@pytest.mark.parametrize("budget", [1400 * KIB, 760 * KIB])
def test_the_same_bits_within_the_budget(monkeypatch, update, budget):
    monkeypatch.setattr(homes, "LARGE_BYTES", 0)
    losses, weights, state = untouched()
    model, optimizer = model_and_optimizer()
    device = NullDevice(1 << 30)
    with fitting(model, optimizer=optimizer, budget=budget, update=update, device=device) as found:
        assert train(model, optimizer) == losses
        program = plan_of(model).program
        regions = {*found.lasting.regions}
        assert any(path not in regions and path.rpartition(".")[0] in regions for path in program.states)
        assert device.memory().peak_allocated_bytes <= plan_of(model).peak_bytes <= budget
        assert equal(dict(model.state_dict()), dict(weights))
    assert equal(optimizer.state_dict()["state"], state["state"])
