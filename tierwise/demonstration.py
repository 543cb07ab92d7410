"""`tierwise demo`: a small GPT learns the source of Tierwise twice, untouched and inside a budget, and both runs must agree to the bit.

All on the CPU in the place of a GPU: memory is counted by storage and refused beyond the budget, copies are real and run beside the compute.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from . import estimation, fitting, pipeline
from .capture import capture_step
from .errors import NotExact
from .execute.null_device import NullDevice
from .fitting.here import machine_of
from .ir import Comparison, Machine, Run
from .units import format_bytes
from .zoo.gpt2 import GPT2

LAYERS, HIDDEN, HEADS, TOKENS, SAMPLES = 6, 64, 4, 64, 8
VOCABULARY = 256  # bytes
LEARNING_RATE = 3e-3
TRIAL_STEPS = 4  # the first has the tracing in it
BUDGET_SHARE = 0.6  # of what keeping everything takes
# What is known to plan quickly, and five more that do for a step this small.
POLICIES = (*estimation.QUICK_TO_PLAN, "chen", "dtr", "capuchin", "superneurons", "flashneuron")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training came to."""

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    weights: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Demonstration:
    model: str
    keep_all_bytes: int
    budget_bytes: int
    peak_bytes: int  # measured
    parameters: int
    comparison: Comparison
    run: Run


def demonstrate(steps: int = 40, *, progress: Progress = lambda what: None) -> Demonstration:
    """Capture, compare, train inside a budget, check. Raises NotExact if the two trainings differ in one bit."""
    text = _own_source()
    with _one_thread():
        progress("capturing one training step of a small GPT")
        model, optimizer = _made()
        graph = capture_step(model, _batch(text, 0), optimizer=optimizer).graph
        progress(f"training it untouched for {steps} steps")
        untouched = _trained(model, optimizer, text, steps)
        assumed = _assumed_machine()
        kept = pipeline.reference(pipeline.make_problem(graph, assumed)).row.peak_bytes or 0
        budget_bytes = int(kept * BUDGET_SHARE)
        _, trial, _ = _inside(budget_bytes, assumed, text, TRIAL_STEPS, lambda what: progress(f"a trial, to see how fast this machine is: {what}"))
        machine = _as_fast_as_here(assumed, trial)
        problem = pipeline.make_problem(graph, machine)
        names = (pipeline.REFERENCE, *POLICIES)
        progress(f"comparing {len(names)} policies")
        comparison = pipeline.compare(problem.with_budget(budget_bytes), names)
        planned, run, peak_bytes = _inside(budget_bytes, machine, text, steps, progress)
    _check(untouched, planned)
    name = f"GPT of {LAYERS} layers, {SAMPLES} × {TOKENS} bytes of text"
    run = replace(
        run,
        name=name,
        comparisons=(comparison,),
        losses=planned.losses,
        untouched_losses=untouched.losses,
        step_seconds=planned.step_seconds,
        reserved_bytes=peak_bytes,
    )
    return Demonstration(
        model=name,
        keep_all_bytes=kept,
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        parameters=sum(weight.numel() for weight in model.parameters()),
        comparison=comparison,
        run=run,
    )


def _inside(budget_bytes: int, machine: Machine, text: Tensor, steps: int, progress: Progress) -> tuple[Trained, Run, int]:
    """The same training inside the budget, on a device that has no more than that; its last step recorded."""
    device = NullDevice(budget_bytes)
    model, optimizer = _made()
    fitting.fit(model, optimizer, budget=budget_bytes, device=device, machine=machine, example=_batch(text, 0), progress=progress)
    try:
        fitted = fitting.fitted_of(model)
        progress(f"training it inside {format_bytes(budget_bytes)} for {steps} steps")
        planned = _trained(model, optimizer, text, steps, before_last=fitted.record_next_step)
        run = fitting.plan_of(model).run("", measured=fitted.measured)
        return planned, run, device.memory().peak_allocated_bytes
    finally:
        fitting.release(model)
        device.close()


def _trained(
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    steps: int,
    *,
    before_last: Callable[[], None] = lambda: None,
) -> Trained:
    """A plain loop, the same for all."""
    losses, seconds = [], []
    for step in range(steps):
        if step == steps - 1:
            before_last()
        began = time.perf_counter()
        loss = model(**_batch(text, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    return Trained(tuple(losses), tuple(seconds), {name: value.clone() for name, value in model.state_dict().items()})


def _check(untouched: Trained, planned: Trained) -> None:
    other = next((step for step, pair in enumerate(zip(untouched.losses, planned.losses, strict=True)) if pair[0] != pair[1]), None)
    if other is not None:
        raise NotExact(f"the losses of step {other} differ: {untouched.losses[other]!r} untouched, {planned.losses[other]!r} inside the budget; "
                       "this is a bug of Tierwise: please report it with your version of torch")  # fmt: skip
    for name, weight in untouched.weights.items():
        if not torch.equal(weight, planned.weights[name]):
            raise NotExact(f"{name} differs at the end, though all losses were equal; this is a bug of Tierwise: please report it")


def _made() -> tuple[GPT2, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2(vocab=VOCABULARY, positions=TOKENS, layers=LAYERS, hidden=HIDDEN, heads=HEADS).train()
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _own_source() -> Tensor:
    """Text that is always there: the bytes of this package's Python files."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def _batch(text: Tensor, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - TOKENS, (SAMPLES, 1), generator=generator)
    rows = text[starts + torch.arange(TOKENS + 1)].long()
    return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _assumed_machine() -> Machine:
    """The CPU in the place of a GPU, at rates nobody measured."""
    device = NullDevice(1 << 40)
    try:
        return machine_of(device)
    finally:
        device.close()


def _as_fast_as_here(machine: Machine, trial: Run) -> Machine:
    """The same machine, at such rates that what was predicted of the trial is what was measured."""
    assert trial.predicted is not None and trial.measured is not None
    slower = trial.measured.seconds / trial.predicted.seconds
    predicted, measured = trial.predicted.busy_seconds(), trial.measured.busy_seconds()
    busier = {lane: measured[lane] / seconds for lane, seconds in predicted.items() if seconds and measured.get(lane)}
    processors = tuple(
        replace(
            processor,
            flops_per_second={precision: rate / slower for precision, rate in processor.flops_per_second.items()},
            bytes_per_second=processor.bytes_per_second / slower,
            launch_seconds=processor.launch_seconds * slower,
        )
        for processor in machine.processors
    )
    slowed = machine.with_rates(lambda _, lane, rate: rate / busier.get(lane, 1.0))
    return replace(slowed, processors=processors, source=f"scaled so that a trial of {TRIAL_STEPS} steps takes as long as it took here")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Ops this small wait for each other's threads longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
