from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tierwise.ir import Graph, Phase, Role, check_graph, serial

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def made() -> Graph:
    spec = importlib.util.spec_from_file_location("make_step", EXAMPLES / "make_step.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gpt_step()


def test_the_committed_step_is_what_the_script_makes(made):
    text = (EXAMPLES / "gpt-small.step.json").read_text(encoding="utf-8")
    assert text == serial.dumps(made), "run `python examples/make_step.py` again"
    assert serial.loads(text, Graph) == made


def test_the_step_is_whole(made):
    check_graph(made)
    params = [s for s in made.storages if s.role is Role.PARAM]
    updates = [op for op in made.ops if op.phase is Phase.UPDATE]
    assert len(updates) == len(params) == 4 * 8 + 4
    for param, update in zip(params, updates, strict=True):
        grad, *rest = (made.storages[s] for s in update.reads + update.mutates)
        assert grad.role is Role.GRAD
        assert [s.role for s in rest] == [Role.PARAM, Role.OPTIMIZER_STATE, Role.OPTIMIZER_STATE]
        assert {s.nbytes for s in (grad, *rest)} == {param.nbytes}
    assert [call.module for call in made.calls] == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert {made.calls[op.region].module for op in made.ops if op.phase is not Phase.UPDATE} == {call.module for call in made.calls}


def test_the_flops_are_those_of_a_transformer(made):
    """Six flops a parameter of the products and token, and attention: two products of half a square forward, five backward."""
    weights = 4 * 12 * 2048**2 + 2048 * 32000
    tokens, attention = 16 * 1024, 4 * (2 + 5) * 2 * 1024 * 2048 // 2
    assert sum(op.flops for op in made.ops) == tokens * (6 * weights + attention)
