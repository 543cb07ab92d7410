"""Every policy that says its plans can be run, run: three steps of a small tower on the null device, to the bit of the untouched run.

Sizes below which a policy leaves a tensor alone are those of real models; here they are set to the tower's.
"""

from __future__ import annotations

import functools

import pytest
from fitting.conftest import nothing_stays, one_thread  # noqa: F401  (fixtures)
from fitting.training import equal, fitting, three_steps, tower, trained

from tierwise import policies
from tierwise.fitting import fitted, menus

BLOCKS, BUDGET = 6, "1.6MiB"  # keeping everything takes 2 MiB
BUDGETS = {"g10": "1.9MiB", "keep_all": "2.2MiB", "ssdtrain": "1.8MiB"}
OPTIONS = {
    "autotm": {"time_limit_seconds": 0.2},
    "ssdtrain": {"adaptive": False, "min_bytes": 0},
    "torchtune": {"mode": "offload"},
    "unsloth": {"min_bytes": 0},
}
RECOMPUTE, BOTH = {"recomputes"}, {"recomputes", "sends"}
DOES = {"chen": RECOMPUTE, "echo": RECOMPUTE, "keep_all": set(), "megatron": RECOMPUTE, "oneflow": RECOMPUTE, "pytorch_budget": RECOMPUTE,
        "torchtune": BOTH, "unsloth": BOTH}  # fmt: skip
DISK = {"g10": {"dram", "nvme"}, "ssdtrain": {"nvme"}}

EXECUTABLE = [name for name in policies.names() if policies.card(name).executable is True]


@functools.cache
def untouched():
    return trained(three_steps, tower(blocks=BLOCKS))


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
    assert policies.card(name).exactness == "exact"  # what rounds or trains another way needs a test of its own
    for option, value in OPTIONS.get(name, {}).items():
        monkeypatch.setitem(policies.load(name).plan.__kwdefaults__, option, value)
    expected, model = untouched(), tower(blocks=BLOCKS)
    with fitting(model, budget=BUDGETS.get(name, BUDGET), policy=name, nvme=f"{tmp_path}:64MiB") as found:
        assert equal(trained(three_steps, model), expected)
        calls, counts = found.current.program.calls.values(), found.below.copies.counts()
    did = {"sends"} if counts.sent_bytes > 0 and counts.fetched_bytes > 0 else set()
    did |= {"recomputes"} if any(call.choice != "keep" for call in calls) else set()
    assert did == DOES.get(name, {"sends"})
    assert {call.tier for call in calls if call.sent} <= DISK.get(name, {"dram"})


def test_what_is_not_run_says_why():
    for name in set(policies.names()) - set(EXECUTABLE):
        assert len(policies.card(name).simulated_only_because) > 20
