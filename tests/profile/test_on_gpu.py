"""What only a GPU can show: two clocks, and an allocator that must get everything back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blocks import LlamaBlock, example

from tierwise import machines, pipeline
from tierwise.measurement import by_name, measure_step
from tierwise.profile.options import time_option
from tierwise.profile.sustained import sustained
from tierwise.profile.updates import update_times
from tierwise.regions import options
from tierwise.regions.compiled import compile_option
from tierwise.regions.joint import describe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def test_the_device_and_the_host_have_times_of_their_own():
    large, small = torch.randn(4096, 4096, device=CUDA), torch.ones(1, device=CUDA)

    def products() -> None:
        for _ in range(20):
            large @ large

    def additions() -> None:
        for _ in range(200):
            small.add_(1)

    busy, idle = sustained((products, additions), CUDA)
    assert busy.device_seconds > 3 * busy.host_seconds, "twenty launches, and a hundred billion flops each"
    assert idle.host_seconds > 0.3 * idle.device_seconds, "the host needs about as long as such kernels do"


def test_an_option_is_timed_and_nothing_stays_on_the_device():
    torch.manual_seed(0)
    block = LlamaBlock().to(CUDA)
    x = example(block).to(CUDA).requires_grad_()
    option = options(describe(LlamaBlock.forward, block, (x,), compile=False))[-1]
    forward = compile_option(LlamaBlock.forward, option, compile=False)
    time_option(forward, block, (x,))  # libraries keep what they allocate the first time
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    times = time_option(forward, block, (x,))
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in block.parameters())
    assert min(times.forward_device_seconds, times.forward_host_seconds, times.backward_device_seconds, times.backward_host_seconds) > 0
    assert option.saved_bytes <= times.saved_bytes < option.saved_bytes + 512 * (len(option.saved) + 4), "but for rounding to 512 bytes"


def test_an_update_is_one_call():
    taken = update_times("adamw", [((1024, 1024), torch.bfloat16)] * 4, CUDA)
    assert taken is not None and taken.device_seconds > 0 and taken.host_seconds > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_measured(tmp_path: Path, compiled: bool):
    model = pipeline.capture_model("gpt2-tiny", batch=2)
    step = pipeline.compiled_step(model) if compiled else None
    found = measure_step(model, machines.load("h200"), compiled=step, device=CUDA, cache=tmp_path)
    assert not found.notes
    assert pipeline.reference(found.problem).row.seconds > 0
    assert {"blocks.0", "update"} <= set(by_name(found.parts))
