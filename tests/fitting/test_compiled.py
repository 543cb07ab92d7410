"""Compiled plans are exact against the compiled step that keeps everything, with precision casts emulated in both."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import ConvBlock, LlamaBlock
from fitting.training import batch as tower_batch
from fitting.training import equal, fitting, steps, tower, trained
from fitting.zoo import Chain, noise
from torch import nn

from tierwise.fitting import fitted
from tierwise.ir import INPUTS, CallPlan, Program

CASES = {
    "dropout": lambda: (tower(blocks=2, dropout=0.1), lambda number: tower_batch(number, rows=64)),
    "convolutions": lambda: (Chain(nn.Conv2d(8, 8, 1), ConvBlock(), ConvBlock()), noise("x", 4, 8, 6, 6)),
    "llama": lambda: (Chain(nn.Linear(32, 32), LlamaBlock(), LlamaBlock()), noise("x", 4, 12, 32)),
}


def on(batch):
    return steps(lambda model, number: model(**batch(number)))


def program_with(choice: int, send: bool):
    def program_for(prepared, *args, **options):
        calls = {}
        for call in prepared.menu.problem.graph.calls:
            if call.region in prepared.menu.choices:
                taken = prepared.menu.choices[call.region][choice]
                sent = (*(value.name for value in taken.saved), *((INPUTS,) if taken.reads_inputs else ())) if send else ()
                calls[call.id] = CallPlan(taken.name, sent)
        return prepared, Program(calls, "forced")

    return program_for


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_recomputed_and_sent_has_the_bits_of_what_is_kept(case, monkeypatch):
    torch.manual_seed(0)
    model, batch = CASES[case]()
    before = copy.deepcopy(model.state_dict())
    seen = {}
    with fitting(model, budget="1GiB", compile=True) as found:
        for name, program_for in {
            "keep": program_with(0, send=False),
            "keep, sent": program_with(0, send=True),
            "recompute, sent": program_with(-1, send=True),
        }.items():
            monkeypatch.setattr(fitted, "program_for", program_for)
            found.plans.clear()
            model.load_state_dict(before)
            seen[name] = trained(on(batch), model)
        assert found.below.copies.counts().fetched_bytes > 0
        assert not [sentence for sentence in found.session.events.said if "runs as it is" in sentence]
    assert equal(seen["keep, sent"], seen["keep"])
    assert equal(seen["recompute, sent"], seen["keep"])
