"""Which code runs a formula where: compiled where it can be and has been seen to give the same bits, op by op elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .cpu_pass import CpuPass, can_run, open_cpu_pass
from .rules import ADAMW, MOMENTUM, PLAIN, Rule, apply_rule

_log = logging.getLogger(__name__)

Run = Callable[..., None]
"""run(rule, numbers, weights, gradient, states, out, scale=...)"""

CHECKED_ELEMENTS = 100_003
MEASURED_ELEMENTS = 1 << 25  # 0.9 GB: far past every cache


def is_over() -> None:
    """There is nothing to wait for."""


class Passes:
    """The formulas on the host and on one device. `threads`: how many the host's pass may use, by default all cores but one; `cpus`: which
    processors they run on, such as those of one NUMA node."""

    def __init__(self, device: torch.device, *, threads: int | None = None, cpus: Sequence[int] | None = None, compiled: bool = True) -> None:
        self.device = device
        with running_on(cpus):
            self.host: CpuPass | None = open_cpu_pass(threads or default_threads()) if compiled else None
        if self.host is not None and not _host_is_right():
            _log.warning("the compiled update pass differs from the formula on this processor, so updates on the CPU run op by op")
            self.host.close()
            self.host = None
        self._on_card = _checked_cuda_pass(device) if compiled and device.type == "cuda" else None

    def __call__(self, *args: Any, **options: Any) -> None:
        """What `start` does, and over when this returns."""
        self.start(*args, **options)()

    def start(
        self,
        rule: Rule,
        numbers: Sequence[float],
        weights: torch.Tensor,
        gradient: torch.Tensor,
        states: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Callable[[], None]:
        """As rules.apply_rule; on the host beside the caller, if it is compiled. What comes back waits for it."""
        run: Run = apply_rule
        if weights.device.type == "cuda":
            if self._on_card is not None and self._on_card[1](gradient, out):
                run = self._on_card[0]
        elif self.host is not None and can_run(gradient, out):
            return self.host.start(rule, numbers, weights, gradient, states, out, scale=scale)
        run(rule, numbers, weights, gradient, states, out, scale=scale)
        return is_over

    def words(self) -> str:
        host = "op by op" if self.host is None else f"compiled, {self.host.threads} threads"
        return f"updates on the CPU {host}; on the device {'compiled' if self._on_card else 'op by op'}"

    def close(self) -> None:
        if self.host is not None:
            self.host.close()
            self.host = None


def same_bits(run: Run, device: torch.device, takes: Callable[[torch.Tensor, torch.Tensor | None], bool]) -> bool:
    """Whether compiled code agrees with the formula, denormal numbers included."""
    generator = torch.Generator().manual_seed(0)
    count = CHECKED_ELEMENTS
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    settings |= {"momentum": 0.9, "dampening": 0.1, "nesterov": True}
    for rule in (ADAMW, MOMENTUM, PLAIN):
        for dtype in (torch.bfloat16, torch.float32):
            exponents = torch.randint(-22, 1, (count,), generator=generator)
            gradient = (torch.randn(count, generator=generator) * 10.0**exponents).to(dtype).to(device)
            weights = torch.randn(count, generator=generator).to(device)
            states = [torch.rand(count, generator=generator).to(device) * gradient.float().square() for _ in rule.states]
            out = torch.empty(count, dtype=torch.bfloat16, device=device)
            if not takes(gradient, out):
                continue
            mine = [tensor.clone() for tensor in (weights, *states, out)]
            numbers = rule.numbers(settings, 3)
            for scale in (1.0, 0.377):
                apply_rule(rule, numbers, weights, gradient, states, out, scale=scale)
                run(rule, numbers, mine[0], gradient, mine[1:-1], mine[-1], scale=scale)
            if not all(map(torch.equal, (weights, *states, out), mine)):
                return False
    return True


@cache
def _host_is_right() -> bool:
    """Looked at once in a process."""
    run = open_cpu_pass(2)
    assert run is not None
    try:
        return same_bits(run, torch.device("cpu"), can_run)
    finally:
        run.close()


@cache
def _checked_cuda_pass(device: torch.device) -> tuple[Run, Callable[[torch.Tensor, torch.Tensor | None], bool]] | None:
    try:
        from . import cuda_pass

        if same_bits(cuda_pass.cuda_pass, device, cuda_pass.can_run):
            return cuda_pass.cuda_pass, cuda_pass.can_run
        reason = "it gives other bits than the formula on this card"
    except Exception as error:  # no Triton, no compiler for its launcher, or a version that knows other names
        reason = f"{type(error).__name__}: {error}"
    _log.warning("updates on the device run op by op, about three times slower, because the kernel cannot be used: %s", reason)
    return None


# -- how many threads -------------------------------------------------------------------------------------------------------------------


def default_threads() -> int:
    """All cores this process may use but one, which launches the device's work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def parameters_per_second(
    threads: int, *, compiled: bool = True, elements: int = MEASURED_ELEMENTS, repeats: int = 3, cpus: Sequence[int] | None = None
) -> float:
    """How many parameters AdamW updates a second on the host: bf16 gradient in, fp32 master and moments, bf16 parameter out.

    `cpus` are the processors to run on, such as those of one NUMA node.
    """
    threads_before = torch.get_num_threads()
    run: CpuPass | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_on(cpus))
        stack.callback(torch.set_num_threads, threads_before)
        run = open_cpu_pass(threads) if compiled else None
        if run is not None:
            stack.callback(run.close)
        torch.set_num_threads(threads)
        weights, mean, square = (torch.zeros(elements) for _ in range(3))
        gradient, out = (torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2))
        weights.fill_(0.5), gradient.fill_(1e-3)  # no denormal numbers
        numbers = ADAMW.numbers({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}, 1)
        best = float("inf")
        for _ in range(repeats + 1):  # the first one touches the pages
            start = time.perf_counter()
            (run or apply_rule)(ADAMW, numbers, weights, gradient, [mean, square], out)
            best = min(best, time.perf_counter() - start)
        return elements / best


@contextlib.contextmanager
def running_on(cpus: Sequence[int] | None) -> Iterator[None]:
    """This thread, and the threads it starts meanwhile, on these processors only."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numa_nodes() -> list[list[int]]:
    """The processors of each NUMA node that this process may use; one list of all where the system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found = []
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        ranges = [part.split("-") for part in path.read_text(encoding="utf-8").strip().split(",") if part]
        cpus = {cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)}
        found.append(sorted(cpus & allowed))
    return [cpus for cpus in found if cpus] or [sorted(allowed)]


@dataclass(frozen=True, slots=True)
class HostRate:
    threads: int
    cpus: tuple[int, ...] | None  # None: wherever the system puts them
    parameters_per_second: float


def best_host(candidates: Sequence[int] | None = None, *, elements: int = MEASURED_ELEMENTS) -> HostRate:
    """Which threads, on which NUMA nodes, update fastest: measured. The fewest of those within two hundredths of the best."""
    nodes = numa_nodes()
    most = sum(map(len, nodes))
    counts = sorted({max(1, count) for count in candidates or (most // 4, most // 2, most * 3 // 4, most - 1, most)})
    tried: list[tuple[int, tuple[int, ...] | None]] = [(count, None) for count in counts]
    if len(nodes) > 1:
        tried += [(len(cpus), tuple(cpus)) for cpus in nodes]
    rates = [HostRate(threads, cpus, parameters_per_second(threads, elements=elements, cpus=cpus)) for threads, cpus in tried]
    fastest = max(rate.parameters_per_second for rate in rates)
    return min((rate for rate in rates if rate.parameters_per_second >= 0.98 * fastest), key=lambda rate: rate.threads)
