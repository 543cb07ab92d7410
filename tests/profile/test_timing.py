"""Ops, blocks and updates timed on the CPU: the right calls are made, as often as said, and nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tierwise.capture import capture_step
from tierwise.profile import ops, sustained
from tierwise.profile.blocks import block_times
from tierwise.profile.cache import TimingCache
from tierwise.profile.ops import op_times
from tierwise.profile.taken import Taken
from tierwise.profile.updates import _as_many_as_fit, update_times

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick")


def test_pieces_run_in_order_and_each_has_a_time():
    ran: list[str] = []
    found = sustained.sustained([lambda: ran.append("forward"), lambda: ran.append("backward")], CPU)
    assert len(found) == 2 and all(piece.device_seconds == piece.host_seconds > 0 for piece in found)
    assert ran == ["forward", "backward"] * (len(ran) // 2)
    assert len(ran) >= 2 * (2 + sustained.LEAST_ROUNDS), "two rounds to warm up"


def test_the_device_pauses_only_where_the_host_would_be_behind():
    long, short = Taken(10.0, 1.0), Taken(1.0, 3.0)
    assert sustained.pauses_for([long, long]) == [sustained.PAUSE_SECONDS, 0.0]
    assert sustained.pauses_for([long, short]) == [sustained.PAUSE_SECONDS, sustained.PAUSE_SECONDS + 1.2 * 2.0]
    assert sustained.pauses_for([Taken(1.0, 0.9)]) == [sustained.PAUSE_SECONDS], "almost behind: a short pause is enough"


def test_layers_run_forward_one_by_one_and_backward_together():
    layers = [nn.Linear(2, 2) for _ in range(3)]
    inputs = [torch.rand(1, 2, requires_grad=True) for _ in layers]
    ran: list[object] = []
    for place, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, place=place: ran.append(place))
        layer.weight.register_hook(lambda _: ran.append("gradient"))
    calls = [lambda layer=layer, x=x: layer(x) for layer, x in zip(layers, inputs, strict=True)]
    found = block_times(calls, [*inputs, *(p for layer in layers for p in layer.parameters())], CPU)
    assert ran[:6] == [0, 1, 2, "gradient", "gradient", "gradient"]
    assert found.forward.device_seconds > 0 and found.backward.device_seconds > 0
    assert all(leaf.grad is None for leaf in (*inputs, *(p for layer in layers for p in layer.parameters())))


def test_a_block_without_gradients_has_a_forward_only():
    layer = nn.Linear(2, 2).requires_grad_(False)
    assert block_times([lambda: layer(torch.ones(1, 2))], layer.parameters(), CPU).backward.device_seconds < 1e-3


def test_each_distinct_op_is_timed_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))  # two equal layers
    recipes = capture_step(model, torch.ones(2, 4), loss=torch.sum).recipes
    asked: list[str] = []

    def pretend(recipe, device):
        asked.append(recipe.key)
        return None if "sum" in str(recipe.op) else Taken(1.0, 2.0)

    monkeypatch.setattr(ops, "op_seconds", pretend)
    cache = tmp_path / "ops.json"
    said: list[str] = []
    found = op_times(recipes, CPU, cache=cache, progress=said.append)
    assert len(asked) == len(set(asked)) == len({recipe.key for recipe in recipes.values()}) < len(recipes)
    assert said[0] == f"timing op 1 of {len(asked)}"
    assert set(found) == {op for op, recipe in recipes.items() if "sum" not in str(recipe.op)}
    before = len(asked)
    assert op_times(recipes, CPU, cache=cache) == found
    assert all("sum" in key for key in asked[before:]), "what could be timed is not timed again"


def test_ops_of_a_real_step_can_be_run_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops, "BURST_SECONDS", 1e-5)
    recipes = capture_step(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 1)), torch.ones(2, 4), loss=torch.sum).recipes
    found = op_times(recipes, CPU, cache=tmp_path / "ops.json")
    assert set(found) == set(recipes) and all(taken.device_seconds > 0 for taken in found.values())


def test_recorded_ops_cost_the_host_more():
    forward, backward = ops.autograd_host_seconds(CPU, nodes=20)
    assert forward >= 0 and backward >= 0


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "sgd-momentum", "adafactor"])
def test_updates_are_timed_as_one_call(optimizer):
    taken = update_times(optimizer, [((4, 4), torch.float32), ((4,), torch.float32)], CPU)
    assert taken is not None and taken.device_seconds > 0


def test_an_optimizer_that_is_not_here_is_not_timed():
    assert update_times("adamw8bit", [((4, 4), torch.float32)], CPU) is None


def test_as_many_parameters_as_fit_half_the_memory_are_updated():
    shapes = [((100,), torch.float32)] * 4  # 400 bytes each, five times that with gradient and state
    assert len(_as_many_as_fit(shapes, free_bytes=12_000)) == 3
    assert len(_as_many_as_fit(shapes, free_bytes=10)) == 1
    assert len(_as_many_as_fit(shapes, free_bytes=1e9)) == 4


def test_two_processes_add_to_one_cache(tmp_path: Path):
    path = tmp_path / "deep" / "times.json"
    one, two = TimingCache(path), TimingCache(path)
    one["a"], two["b"] = (1.0, 2.0), (3.0,)
    one.save()
    two.save()
    assert json.loads(path.read_text()) == {"a": [1.0, 2.0], "b": [3.0]}
    assert TimingCache(path)["b"] == (3.0,)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 3}', '{"a": ["x"]}', "\x00"])
def test_a_cache_that_makes_no_sense_is_empty(tmp_path: Path, text: str):
    path = tmp_path / "times.json"
    path.write_text(text)
    cache = TimingCache(path)
    assert not cache.found
    cache["a"] = (1.0,)
    cache.save()
    assert TimingCache(path)["a"] == (1.0,)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    cache = TimingCache(tmp_path / "file" / "times.json")
    cache["a"] = (1.0,)
    cache.save()
    assert cache["a"] == (1.0,)
