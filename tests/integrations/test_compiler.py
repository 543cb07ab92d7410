"""torch.compile(model, backend="tierwise"): what a graph saves is what was asked for."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from fitting.training import BLOCKS, ROWS, WIDTH, batch, tower
from integrations.examples import example, printed

from tierwise.errors import BadInput, InfeasibleBudget, UnknownName
from tierwise.integrations.compiler import Chooser, choose, tierwise
from tierwise.regions import Kind
from tierwise.regions.joint import describe

ROOT = Path(__file__).parent.parent.parent
WIDE = 4 * ROWS * WIDTH * 4  # bytes of what stands between the two linear layers of a block


@pytest.fixture(scope="module")
def graph():
    model = tower()
    return describe(type(model).forward, model, (), batch(0))


def test_the_entry_point_leads_to_the_backend():
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, name = entries["tierwise"].partition(":")
    assert getattr(import_module(module), name) is tierwise


def test_what_is_saved_follows_what_is_asked(graph):
    most = choose(graph, "keep")[0]
    assert choose(graph, "cheap")[0].saved_bytes < most.saved_bytes  # gelu is a pass over its input
    assert choose(graph, "checkpoint")[0].saved_bytes == 0
    for share in (0.2, 0.5, 0.9, 1.0):
        assert choose(graph, share)[0].saved_bytes <= share * most.saved_bytes
    for blocks in range(1, BLOCKS + 1):
        assert choose(graph, blocks * WIDE)[0].saved_bytes <= blocks * WIDE
    work = [choose(graph, share)[0].recompute_flops for share in (1.0, 0.5, 0.2)]
    assert work == sorted(work)


def test_less_than_the_least_is_refused_with_the_least(graph):
    """A graph whose ops may not be repeated."""
    fixed = replace(graph, values=tuple(replace(value, must_save="so it is" if value.kind is Kind.MATMUL else "") for value in graph.values))
    least = choose(fixed, "checkpoint")[0].saved_bytes
    with pytest.raises(InfeasibleBudget, match=r"cannot save less than .* allows 1 B") as refused:
        choose(fixed, 1)
    assert refused.value.least_bytes == least > 0
    assert choose(fixed, least)[0].saved_bytes == least


def test_mistakes_are_found_before_anything_is_traced():
    with pytest.raises(UnknownName, match="did you mean 'saved'"):
        tierwise(None, (), options={"svaed": 1})
    with pytest.raises(BadInput, match="mode='max-autotune' is for Inductor alone"):
        tierwise(None, (), mode="max-autotune")
    with pytest.raises(BadInput, match="not a number of bytes"):
        tierwise(None, (), options={"saved": "half"})


def test_the_cache_on_disk_tells_choices_apart():
    assert len({Chooser(saved).uuid() for saved in ("cheap", "keep", 0.5, "0.5")}) == 4


@pytest.mark.slow
def test_a_compiled_model_saves_that_and_computes_the_same(monkeypatch, capsys):
    """The example, by the name of the backend: a model of 0.42 MiB may save 0.5 MiB more."""
    torch._dynamo.reset()
    backend = example("compiler_backend")
    lines = printed(backend, monkeypatch, capsys, "--steps", "2", "--saved", "512KiB")
    losses = [float(re.search(r"loss ([0-9.]+)", line)[1]) for line in lines]
    saved = [float(re.search(r"([0-9.]+) MiB saved", line)[1]) for line in lines]
    assert max(saved) <= 0.5 + 0.42 + 0.01  # the tokens
    with monkeypatch.context() as plain:
        plain.setattr(torch, "compile", lambda model, **options: model)
        eager = printed(backend, monkeypatch, capsys, "--steps", "2")
    assert losses == pytest.approx([float(re.search(r"loss ([0-9.]+)", line)[1]) for line in eager], abs=2e-6)


def test_open_sizes_are_refused_with_what_to_do():
    def partition(gm, inputs):
        return Chooser("cheap")(gm, inputs, num_fwd_outputs=1)

    size = torch.fx.GraphModule({}, torch.fx.Graph())
    given = size.graph.placeholder("size")
    given.meta["val"] = open_size()
    size.graph.output((given,))
    with pytest.raises(BadInput, match="dynamic=False"):
        partition(size, ())


def open_size() -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(7, source=ConstantSource("size"), dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=7)
