"""Models that other tools have wrapped: torch.compile before and after fit, DistributedDataParallel with one process. A plan made is a plan run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from fitting.training import equal, three_steps, tower, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tierwise
from tierwise.errors import BadInput
from tierwise.fitting import fitted_of

BUDGET = "1MiB"  # keeping everything takes 1.4


@pytest.fixture(scope="module")
def expected() -> list:
    return trained(three_steps, tower())[:-2]


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def with_compiled_blocks(module: nn.Module) -> nn.Module:
    for block in module.blocks:
        block.compile(backend="eager")
    return module


def runs_as_planned(model: nn.Module, expected: list) -> None:
    assert equal(trained(three_steps, model)[:-2], expected)
    fitted = fitted_of(model)
    assert fitted.session.passes == 3
    assert any(plan.sent or plan.choice != "keep" for plan in fitted.current.program.calls.values())
    tierwise.release(model)
    with pytest.raises(BadInput, match="not under"):
        tierwise.plan_of(model)


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place, with_compiled_blocks])
def test_what_torch_compile_made_is_fitted(wrap, expected):
    model = tower()
    wrapped = wrap(model)
    before = [(dict(module.__dict__), module._compiled_call_impl) for module in wrapped.modules()]
    tierwise.fit(wrapped, budget=BUDGET)
    runs_as_planned(wrapped, expected)
    for module, (attributes, call) in zip(wrapped.modules(), before, strict=True):
        assert module.__dict__.get("forward") is attributes.get("forward")
        assert module._compiled_call_impl is call


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place])
def test_what_is_compiled_after_fit_still_runs_as_planned(wrap, expected):
    model = tower()
    tierwise.fit(model, budget=BUDGET)
    runs_as_planned(wrap(model), expected)


def test_a_compiled_part_is_refused_and_left_alone():
    model = tower()
    model.blocks[1] = compiled(model.blocks[1])
    forward = model.blocks[1].__dict__["forward"]
    with pytest.raises(BadInput, match=r"blocks\.1 is a module that torch.compile returned; .* use module.compile\(\)"):
        tierwise.fit(model, budget=BUDGET)
    assert model.blocks[1].__dict__["forward"] is forward
    assert "forward" not in model.__dict__


def test_ddp_with_one_process(one_process, expected):
    model = tower()
    wrapped = DistributedDataParallel(model)
    tierwise.fit(wrapped, budget=BUDGET)
    runs_as_planned(wrapped, expected)


def test_ddp_around_a_fitted_model(one_process, expected):
    model = tower()
    tierwise.fit(model, budget=BUDGET)
    runs_as_planned(DistributedDataParallel(model), expected)


def test_compiled_ddp(one_process, expected):
    wrapped = compiled(DistributedDataParallel(tower()))
    tierwise.fit(wrapped, budget=BUDGET)
    runs_as_planned(wrapped, expected)


def test_several_processes_are_refused(one_process, monkeypatch):
    wrapped = DistributedDataParallel(tower())
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    with pytest.raises(BadInput, match="trained by 4 processes together; Tierwise plans for one"):
        tierwise.fit(wrapped, budget=BUDGET)


def test_several_cards_are_refused():
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES=0"):
        tierwise.fit(nn.DataParallel(tower()), budget=BUDGET)


def test_sharded_models_are_refused():
    class FSDPModule:
        """By its name: what torch's fully_shard mixes into a module's class."""

    model = tower()
    model.__class__ = type("FSDPTower", (FSDPModule, type(model)), {})
    with pytest.raises(BadInput, match="sharded by FSDPModule"):
        tierwise.fit(model, budget=BUDGET)


def test_a_refused_fit_leaves_a_compiled_model_compiled():
    wrapped = compiled(tower())
    forward = wrapped.__dict__["forward"]
    with pytest.raises(BadInput, match="unknown policy"):
        tierwise.fit(wrapped, budget=BUDGET, policy="no_such")
    assert wrapped.__dict__["forward"] is forward
    assert equal(wrapped(torch.ones(2, 8)), copy.deepcopy(wrapped._orig_mod)(torch.ones(2, 8)))
