"""The formulas: by hand, against torch, and with the same bits op by op, compiled, and in pieces."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tierwise.errors import BadInput
from tierwise.execute.states import cpu_pass, passes
from tierwise.execute.states.cpu_pass import open_cpu_pass
from tierwise.execute.states.passes import Passes, best_host, numa_nodes, parameters_per_second, running_on, same_bits
from tierwise.execute.states.rules import ADAM, ADAMW, MOMENTUM, PLAIN, apply_rule, rule_of

HOST = torch.device("cpu")


def group(**options):
    known = {
        "lr": 0.5,
        "betas": (0.5, 0.75),
        "eps": 0.0,
        "weight_decay": 0.0,
        "maximize": False,
        "momentum": 0.5,
        "dampening": 0.0,
        "nesterov": False,
    }
    return known | options


def one(rule, settings, *, steps=1, w=1.0, g=2.0, dtype=torch.float32, scale=1.0):
    """A weight and its states after some steps with the same gradient."""
    weights, gradient, out = torch.tensor([w]), torch.tensor([g], dtype=dtype), torch.zeros(1, dtype=torch.bfloat16)
    states = [torch.zeros(1) for _ in rule.states]
    for step in range(1, steps + 1):
        apply_rule(rule, rule.numbers(settings, step), weights, gradient, states, out, scale=scale)
    return weights.item(), [state.item() for state in states], out.item()


def test_adamw_by_hand():
    # m = 0·0.5 + 2·0.5 = 1, v = 0·0.75 + 4·0.25 = 1; corrected 1/0.5 = 2 and 1/0.25 = 4; w = 1·(1 - 0.5·0.5) - 0.5·2/sqrt(4) = 0.25
    assert one(ADAMW, group(weight_decay=0.5)) == (0.25, [1.0, 1.0], 0.25)


def test_adam_adds_the_decay_to_the_gradient():
    # g = 2 + 1·2 = 4, m = 2, v = 4; w = 1 - 0.5·4/sqrt(16) = 0.5
    assert one(ADAM, group(weight_decay=2.0)) == (0.5, [2.0, 4.0], 0.5)


def test_momentum_by_hand():
    # first the gradient itself, then 0.5·2 + 2 = 3: w = 1 - 0.5·2 - 0.5·3 = -1.5
    assert one(MOMENTUM, group(), steps=2) == (-1.5, [3.0], -1.5)
    # dampening from the second step on: 0.5·2 + 0.5·2 = 2
    assert one(MOMENTUM, group(dampening=0.5), steps=2) == (-1.0, [2.0], -1.0)
    # nesterov looks ahead: 2 + 0.5·2 = 3
    assert one(MOMENTUM, group(nesterov=True)) == (-0.5, [2.0], -0.5)


def test_plain_descent_ascent_and_factors():
    assert one(PLAIN, group()) == (0.0, [], 0.0)
    assert one(PLAIN, group(maximize=True)) == (2.0, [], 2.0)
    assert one(PLAIN, group(), scale=0.25) == (0.75, [], 0.75)


def test_a_factor_rounds_the_gradient_in_its_own_type():
    # 1.0078125 is 1 + 2^-7, the next bf16 above 1; times 1.5 it is 1.51171875, which bf16 rounds to 1.515625 (ties to even)
    assert one(PLAIN, group(lr=1.0), w=0.0, g=1.0078125, dtype=torch.bfloat16, scale=1.5)[0] == -1.515625
    assert one(PLAIN, group(lr=1.0), w=0.0, g=1.0078125, scale=1.5)[0] == -1.51171875


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_formulas_are_torchs_up_to_rounding(name):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = OPTIMIZERS[name]([parameter])
    rule, weights = rule_of(optimizer), parameter.detach().clone()
    states = [torch.zeros(1000) for _ in rule.states]
    for step in range(1, 6):
        parameter.grad = torch.randn(1000)
        apply_rule(rule, rule.numbers(optimizer.param_groups[0], step), weights, parameter.grad, states)
        optimizer.step()
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_numbers_are_rounded_to_fp32_once():
    assert all(number == ctypes.c_float(number).value for number in ADAMW.numbers(group(lr=0.1, betas=(0.9, 0.999)), 7))


def test_the_compiled_pass_has_the_bits_of_the_formula():
    run = open_cpu_pass(3)
    assert run is not None, "the tests' machine has a C++ compiler"
    assert same_bits(run, HOST, cpu_pass.can_run)
    run.close()


def test_pieces_have_the_bits_of_the_whole():
    torch.manual_seed(0)
    numbers = ADAMW.numbers(group(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1), 3)
    tensors = [torch.rand(5000), torch.randn(5000), torch.rand(5000), torch.rand(5000)]
    whole = [tensor.clone() for tensor in tensors]
    apply_rule(ADAMW, numbers, whole[0], whole[1], whole[2:], chunk_elements=777)
    for part in (slice(0, 1), slice(1, 4097), slice(4097, 5000)):
        apply_rule(ADAMW, numbers, tensors[0][part], tensors[1][part], [tensor[part] for tensor in tensors[2:]])
    assert all(map(torch.equal, whole, tensors))


def test_code_that_gives_other_bits_is_not_used(monkeypatch, caplog):
    def nearly(rule, numbers, weights, *rest, **options):
        apply_rule(rule, numbers, weights, *rest, **options)
        weights[7].mul_(1.0000002)

    assert not same_bits(nearly, HOST, cpu_pass.can_run)
    monkeypatch.setattr(passes, "_host_is_right", lambda: False)
    chosen = Passes(HOST, threads=2)
    assert chosen.host is None and "op by op" in chosen.words() and "differs from the formula" in caplog.text


def test_without_a_compiler_updates_run_op_by_op(monkeypatch, caplog):
    monkeypatch.setattr(cpu_pass.shutil, "which", lambda name: None)
    cpu_pass._library.cache_clear()
    try:
        assert Passes(HOST, threads=2).host is None and "no C++ compiler here" in caplog.text
    finally:
        cpu_pass._library.cache_clear()


def test_a_compiler_that_fails_is_no_failure(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_pass, "FLAGS", ("--no-such-flag",))
    cpu_pass._library.cache_clear()
    try:
        assert open_cpu_pass(2) is None and "cannot compile the update pass" in caplog.text
    finally:
        cpu_pass._library.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


def test_other_threads_run_during_the_compiled_pass():
    """Python's lock is given away: a counter goes on in this thread while a long pass runs in another."""
    run = open_cpu_pass(1)
    weights, gradient, mean, square = (torch.ones(1 << 23) for _ in range(4))
    numbers = ADAMW.numbers(group(), 1)
    over = threading.Event()

    def work():
        for _ in range(3):
            run(ADAMW, numbers, weights, gradient, [mean, square])
        over.set()

    thread = threading.Thread(target=work)
    thread.start()
    counted = 0
    while not over.is_set():
        counted += 1
        time.sleep(0)
    thread.join()
    run.close()
    assert counted > 100


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it would be the whole process")
def test_threads_that_update_give_way_to_those_that_launch():
    threads, mine = Path("/proc/self/task"), os.getpriority(os.PRIO_PROCESS, 0)
    before = {*threads.iterdir()}
    run = open_cpu_pass(3)
    began = {*threads.iterdir()} - before
    expected = [min(19, mine + 10)] * 3
    for _ in range(1000):  # each does it itself, as soon as it runs
        niceness = [os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in began]
        if niceness == expected:
            break
        time.sleep(0.01)
    assert niceness == expected and os.getpriority(os.PRIO_PROCESS, 0) == mine
    run.close()


def test_the_rate_of_updates_can_be_measured():
    for compiled in (True, False):
        assert parameters_per_second(2, compiled=compiled, elements=1 << 16, repeats=1) > 1e4
    assert parameters_per_second(1, elements=1 << 16, repeats=1, cpus=[0]) > 1e4
    best = best_host([1, 2], elements=1 << 16)
    assert best.threads in (1, 2) and best.parameters_per_second > 1e4


def test_threads_can_be_kept_to_some_processors():
    assert sorted(cpu for node in numa_nodes() for cpu in node) == sorted(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with running_on([min(before)]):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    chosen = Passes(HOST, threads=2, cpus=[min(before)])
    assert os.sched_getaffinity(0) == before
    chosen.close()


def test_optimizers_without_a_formula_are_refused():
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    for optimizer, message in (
        (torch.optim.RMSprop(parameters), "knows Adam, AdamW and SGD, not RMSprop"),
        (torch.optim.AdamW(parameters, amsgrad=True), "no formula for amsgrad"),
        (torch.optim.SGD([{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}], lr=0.1), "some have none"),
    ):
        with pytest.raises(BadInput, match=message):
            rule_of(optimizer)


@pytest.mark.gpu
def test_the_kernel_for_the_card_has_the_bits_of_the_formula():
    from tierwise.execute.states import cuda_pass

    assert same_bits(cuda_pass.cuda_pass, torch.device("cuda"), cuda_pass.can_run)


@pytest.mark.gpu
def test_the_formula_has_the_same_bits_on_the_card_and_on_the_cpu():
    torch.manual_seed(0)
    for rule in (ADAMW, ADAM, MOMENTUM, PLAIN):
        tensors = [torch.randn(100_003), (torch.randn(100_003) * 10.0 ** torch.randint(-20, 1, (100_003,))).bfloat16()]
        tensors += [torch.rand(100_003) * 1e-6 for _ in rule.states]
        there = [tensor.cuda() for tensor in tensors]
        numbers = rule.numbers(group(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1), 3)
        apply_rule(rule, numbers, tensors[0], tensors[1], tensors[2:], scale=0.377)
        apply_rule(rule, numbers, there[0], there[1], there[2:], scale=0.377)
        assert all(torch.equal(mine, other.cpu()) for mine, other in zip(tensors, there, strict=True)), rule.name


def test_passes_that_are_started_one_after_the_other_are_each_what_they_are_alone():
    """Several are under way before anybody waits, the last one is waited for first, and two callers share the threads."""
    run = open_cpu_pass(2)
    if run is None:
        pytest.skip("no C++ compiler here")
    count, numbers = 100_003, ADAMW.numbers(group(eps=1e-8), 3)
    generator = torch.Generator().manual_seed(0)

    def parts():
        weights, gradient = torch.randn(count, generator=generator), torch.randn(count, generator=generator).bfloat16()
        return weights, gradient, [torch.rand(count, generator=generator) for _ in range(2)], torch.empty(count, dtype=torch.bfloat16)

    mine = [parts() for _ in range(8)]
    alone = [(weights.clone(), gradient, [state.clone() for state in states], out.clone()) for weights, gradient, states, out in mine]
    for one_of_them in alone:
        apply_rule(ADAMW, numbers, *one_of_them)

    def caller(which):
        started = [run.start(ADAMW, numbers, *found) for found in which]
        for finish in reversed(started):
            finish()

    other = threading.Thread(target=caller, args=(mine[4:],))
    other.start()
    caller(mine[:4])
    other.join()
    run.close()
    for (weights, _, states, out), (expected, _, moments, narrow) in zip(mine, alone, strict=True):
        assert torch.equal(weights, expected) and torch.equal(out, narrow) and all(map(torch.equal, states, moments))


def test_a_pass_goes_on_while_its_caller_does_something_else():
    run = open_cpu_pass(1)
    if run is None:
        pytest.skip("no C++ compiler here")
    weights, gradient, states = torch.ones(1 << 20), torch.ones(1 << 20), [torch.zeros(1 << 20) for _ in range(2)]
    finish = run.start(ADAMW, ADAMW.numbers(group(), 1), weights, gradient, states)
    deadline = time.monotonic() + 60
    while weights[-1] == 1.0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert weights[-1] != 1.0, "nobody but its caller works on it"
    finish()
    run.close()
