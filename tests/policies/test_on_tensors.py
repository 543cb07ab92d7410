"""Every policy that says its plans can be run, run: three steps of a small tower on the null device, to the bit of the untouched run.

Sizes below which a policy leaves a tensor alone are those of real models; here they are set to the tower's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fitting.conftest import nothing_stays, one_thread  # noqa: F401  (fixtures)
from fitting.training import Tower, equal, fitting, sgd, three_steps, tower

from tierwise import policies
from tierwise.fitting import fitted, menus
from tierwise.ir import ON_DEVICE

BLOCKS, BUDGET = 6, "1.6MiB"  # keeping everything takes 2 MiB
BUDGETS = {"deeptm": "1.7MiB", "g10": "1.9MiB", "keep_all": "2.4MiB", "sentinel": "2MiB", "ssdtrain": "1.8MiB", "superoffload": "2.3MiB",
           "zero_infinity": "2.3MiB", "zero_offload": "2.3MiB"}  # fmt: skip
OPTIONS = {
    "autotm": {"time_limit_seconds": 0.2},
    "ssdtrain": {"adaptive": False, "min_bytes": 0},
    "torchtune": {"mode": "offload"},
    "unsloth": {"min_bytes": 0},
}
SEND, RECOMPUTE, STATE = {"sends"}, {"recomputes"}, {"moves state"}
DOES = {
    **dict.fromkeys(("chen", "echo", "megatron", "oneflow", "pytorch_budget"), RECOMPUTE),
    **dict.fromkeys(("superoffload", "zero_infinity", "zero_offload"), STATE),
    **dict.fromkeys(("torchtune", "unsloth"), SEND | RECOMPUTE),
    "deeptm": SEND | STATE,
    "keep_all": set(),
    "ratel": SEND | RECOMPUTE | STATE,
}  # the others send
DISK = {"g10": {"dram", "nvme"}, "ssdtrain": {"nvme"}}

EXECUTABLE = [name for name in policies.names() if policies.card(name).executable is True]


@functools.cache
def untouched():
    model = tower(blocks=BLOCKS)
    return trained(model, sgd(model))


def trained(model: Tower, optimizer: torch.optim.Optimizer) -> list[Any]:
    seen = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in three_steps(model, optimizer)]
    return [*seen, {name: value.clone() for name, value in model.state_dict().items()}]


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """The towers are alike, so their step is captured for the first of them only."""
    found = []

    def prepare_menu(*args, **options):
        found[:] = found or [menus.prepare_menu(*args, **options)]
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitted, "prepare_menu", prepare_menu)
        yield


@pytest.mark.parametrize("name", EXECUTABLE)
def test_has_the_bits_of_the_untouched_run(name, tmp_path, monkeypatch):
    assert not policies.card(name).exactness.startswith("lossy")  # what rounds or trains another way needs a test of its own
    for option, value in OPTIONS.get(name, {}).items():
        monkeypatch.setitem(policies.load(name).plan.__kwdefaults__, option, value)
    expected, model = untouched(), tower(blocks=BLOCKS)
    optimizer = sgd(model)
    with fitting(model, budget=BUDGETS.get(name, BUDGET), policy=name, optimizer=optimizer, nvme=f"{tmp_path}:64MiB") as found:
        assert equal(trained(model, optimizer), expected)
        program, counts = found.current.program, found.below.copies.counts()
    calls = program.calls.values()
    did = {"sends"} if counts.sent_bytes > 0 and counts.fetched_bytes > 0 else set()
    did |= {"recomputes"} if any(call.choice != "keep" for call in calls) else set()
    did |= {"moves state"} if any(place != ON_DEVICE for place in program.states.values()) else set()
    assert did == DOES.get(name, SEND)
    assert {call.tier for call in calls if call.sent} <= DISK.get(name, {"dram"})


def test_what_is_not_run_says_why():
    for name in set(policies.names()) - set(EXECUTABLE):
        assert len(policies.card(name).simulated_only_because) > 20
