"""Graphs lowered by another process: the code is found in torch's cache on disk, and is the code that would be made here."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import GatedBlock
from torch._dynamo.utils import counters

from tierwise.regions import lowering, options
from tierwise.regions.compiled import compile_option, compiled_together
from tierwise.regions.elsewhere import Elsewhere, Job
from tierwise.regions.joint import describe
from tierwise.regions.lowering import TracedCall


def _gradients(forward, block: GatedBlock, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block = copy.deepcopy(block)
    forward(block, x).square().mean().backward()
    return [parameter.grad for parameter in block.parameters()]


@pytest.mark.slow
def test_another_process_lowers_and_this_one_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where nothing is known yet
    torch.manual_seed(0)
    block, x = GatedBlock(), torch.randn(2, 12, 32)
    *_, checkpoint = options(describe(GatedBlock.forward, block, (x,)))
    forward = compile_option(GatedBlock.forward, checkpoint, donate=False)
    counters.clear()
    with Elsewhere() as elsewhere:
        elsewhere.start(torch.device("cpu"), processes=1)
        with compiled_together(elsewhere) as together:
            together.compile(forward, block, (x,), {})
            assert counters["inductor"]["fxgraph_cache_miss"] == 2  # looked for: forward and backward
            ((_, job),) = together._waiting
            job.wait(60)  # without that, it would be done here before the process is ready
        assert counters["inductor"]["fxgraph_cache_hit"] == 2 and counters["inductor"]["fxgraph_cache_miss"] == 2  # found, made elsewhere
        assert forward.compilations == 1
        again = compile_option(GatedBlock.forward, checkpoint, donate=False)
        with compiled_together(elsewhere) as together:  # what the cache has is compiled at once
            together.compile(again, block, (x,), {})
            assert counters["inductor"]["fxgraph_cache_hit"] == 4
    assert not elsewhere.is_running
    gradients = _gradients(forward, block, x)
    here = compile_option(GatedBlock.forward, checkpoint)
    assert all(map(torch.equal, gradients, _gradients(again, block, x)))
    assert all(map(torch.equal, gradients, _gradients(here, block, x)))


@pytest.mark.slow
def test_what_no_process_has_begun_is_done_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    block, x = GatedBlock(), torch.randn(2, 12, 32)
    keep, *_ = options(describe(GatedBlock.forward, block, (x,)))
    forward = compile_option(GatedBlock.forward, keep, donate=False)
    counters.clear()
    with Elsewhere() as elsewhere:
        elsewhere.start(torch.device("cpu"), processes=1)
        elsewhere._processes[0].kill()  # or not ready yet
        with compiled_together(elsewhere) as together:
            together.compile(forward, block, (x,), {})
    assert counters["inductor"]["fxgraph_cache_miss"] == 4  # looked for, and then made here
    assert all(gradient is not None for gradient in _gradients(forward, block, x))


def test_what_another_process_would_do_otherwise_stays_here():
    class Own:
        pass

    with torch._inductor.config.patch(post_grad_custom_pre_pass=Own()):  # set by pytest, it would be no setting at all afterwards
        assert Elsewhere().lower_later(TracedCall()) is None
    assert Elsewhere().lower_later(TracedCall()) is not None


def test_a_backward_is_given_what_its_forward_leaves():
    graph = torch.fx.Graph()
    saved, tangent = graph.placeholder("saved"), graph.placeholder("tangent")
    graph.output((saved, tangent))
    backward = torch.fx.GraphModule({}, graph)
    given = [torch.empty(2, 3), torch.empty(2, 3)]
    assert lowering._laid_out(backward, given, {"saved": (3, 1)}) is given  # as it is traced
    laid_out = lowering._laid_out(backward, given, {"saved": (1, 2)})  # the compiler has chosen columns
    assert [value.stride() for value in laid_out] == [(1, 2), (3, 1)]


def test_a_job_is_somebody_s_once():
    job = Job(b"")
    assert [job.claim(), job.claim()] == [True, False]
