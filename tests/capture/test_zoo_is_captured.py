"""Every kind of model in the zoo becomes a graph that the judge and keep_all take."""

import pytest
from capture.models import kept_peak_bytes

from tierwise import zoo
from tierwise.capture import capture_step, on_fake_tensors
from tierwise.ir import Phase, Role


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-tiny")])
def test_tiny_models(name):
    with on_fake_tensors():
        found = zoo.build(name)
    captured = capture_step(found.model, found.batch, autocast=found.autocast)
    graph = captured.graph
    assert kept_peak_bytes(graph) > 0
    assert {op.phase for op in graph.ops} == set(Phase)
    assert sum(storage.nbytes for storage in graph.storages if storage.role is Role.PARAM) == sum(p.nbytes for p in found.model.parameters())
    assert len(graph.regions) < len(graph.calls) or len(graph.calls) > 3
    assert captured.notes == ()


def test_a_model_of_seven_billion_parameters_takes_no_memory():
    with on_fake_tensors():
        found = zoo.build("llama-7b", batch=8, seq=2048)
    for _ in range(28):
        del found.model.blocks[-1]  # four blocks are enough to see
    graph = capture_step(found.model, found.batch).graph
    block = next(region for region in graph.regions if region.kind == "Block")
    assert sum(call.region == block.id for call in graph.calls) == 4
    assert kept_peak_bytes(graph) > 10 * 2**30
