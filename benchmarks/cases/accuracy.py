"""Predicted against measured: peak and step time of zoo models with everything kept, eager and with each repeated block compiled.

Predictions are made before a step runs: from fake tensors and the roofline of the shipped machine profile; and a second time from this GPU's own
times of each kind of block, of the ops outside them and of the update (tierwise/measurement.py). Nothing is fitted to a step.

A row's `detail` says where its time goes, predicted and measured; for a row that misses it also says what the GPU was busy with, and what blocks
took within the step.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEEDS = "cuda"
MACHINE = "h200"
# Of different kinds, each large enough to keep the GPU busy and small enough for a card of 80 GB: name, batch, seq. And two that a host
# cannot keep up with: there its own times decide, which on a shared machine are not the same from one minute to the next.
MODELS: tuple[tuple[str, int, int | None], ...] = (
    ("gpt2-medium", 16, 1024),
    ("llama-1.4b", 8, 2048),
    ("qwen-1.5b", 4, 2048),
    ("bert-large", 32, 512),
    ("t5-large", 32, 512),
    ("vit-large-16", 256, None),
    ("resnet-152", 256, None),
    ("vgg-16", 128, None),
    ("inception-v4", 256, None),
    ("unet", 8, None),
    ("t5-large", 8, 512),
    ("lstm-large", 64, None),
)
WARM_UP_STEPS, TIMED_STEPS = 3, 7
WARM_UP_SECONDS = 1.2  # at least: until the clocks have settled
LIMIT_SECONDS = 480.0  # no model is started that may not be done by then
MISS = 0.04  # beyond this, a row says why


def run() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    began, longest = time.perf_counter(), 0.0
    for name, batch, seq in MODELS:
        started = time.perf_counter()
        if started - began + longest > LIMIT_SECONDS:
            rows.append({"case": name, "way": "not run", "notes": [f"{LIMIT_SECONDS:.0f} s are over"]})
            continue
        try:
            for row in rows_of(name, batch, seq):
                rows.append(row)
                print(_line(row), flush=True)
        except Exception:
            rows.append({"case": name, "way": "failed", "notes": [traceback.format_exc()[-1500:]]})
            print(name, "failed:", rows[-1]["notes"][0], flush=True)
        longest = max(longest, time.perf_counter() - started)
        print(f"  {name}: {time.perf_counter() - started:.0f} s of {time.perf_counter() - began:.0f} s", flush=True)
    return rows


def rows_of(name: str, batch: int, seq: int | None, *, device: str = "cuda") -> Any:
    """The eager row and the compiled one."""
    import torch

    from tierwise import machines, pipeline
    from tierwise.measurement import measure_step

    torch.compiler.reset()
    machine = machines.load(MACHINE)
    model = pipeline.capture_model(name, batch=batch, seq=seq)
    compiled = pipeline.compiled_step(model)
    problems = {"eager": pipeline.make_problem(model.graph, machine), "compiled": pipeline.compiled_problem(model, compiled, machine)}
    with tempfile.TemporaryDirectory() as scratch:
        for way, problem in problems.items():
            counted = pipeline.reference(problem).row
            profile = measure_step(
                model, machine, compiled=compiled if way == "compiled" else None, every_op=False, device=device, cache=Path(scratch)
            )  # fmt: skip
            predicted = pipeline.reference(profile.problem).row
            step = RealStep(name, batch, seq, model, set(compiled.compiled) if way == "compiled" else set(), device)
            measured = step.measure()
            peak = counted.peak_bytes + machine.device.library_bytes
            seconds_error = predicted.seconds / measured["seconds"] - 1
            detail = {"predicted": _phases(profile), "measured": measured.pop("phases"), "parts": _parts(profile)}
            if abs(seconds_error) > MISS:
                detail |= step.explain()
            yield {
                "case": name, "way": way, "budget_bytes": None, **measured, "ratio": None,
                "predicted_seconds": predicted.seconds, "predicted_peak_bytes": peak, "roofline_seconds": counted.seconds,
                "seconds_error": seconds_error, "roofline_error": counted.seconds / measured["seconds"] - 1,
                "peak_error": peak / measured["peak_bytes"] - 1 if measured["peak_bytes"] else None,
                "batch": batch, "seq": seq, "notes": [*(compiled.notes if way == "compiled" else ()), *profile.notes], "detail": detail,
            }  # fmt: skip
            del step


def _phases(profile: Any) -> dict[str, Any]:
    """Seconds of each phase as predicted, and what of it the GPU works and the host needs to issue it."""
    graph, costs, device = profile.problem.graph, profile.problem.costs.op_seconds, profile.problem.machine.device.name
    found: dict[str, dict[str, float]] = {}
    for op in graph.ops:
        phase = found.setdefault(str(op.phase), {"seconds": 0.0, "busy": 0.0, "host": 0.0})
        phase["seconds"] += costs[op.id, device]
    for part in profile.parts:
        found[str(part.phase)]["busy"] += part.taken.device_seconds
        found[str(part.phase)]["host"] += part.taken.host_seconds
    return found


def _parts(profile: Any) -> dict[str, Any]:
    """For each kind of block: how often it is called, and seconds of a call on the GPU and on the host."""
    from tierwise.measurement import by_name

    return {
        name: {str(phase): [count, taken.device_seconds / count, taken.host_seconds / count] for phase, (count, taken) in phases.items()}
        for name, phases in by_name(profile.parts).items()
    }


class RealStep:
    """A real step with AdamW (fused)."""

    def __init__(self, name: str, batch: int, seq: int | None, model: Any, compile_regions: set[int], device: str) -> None:
        import torch

        from tierwise import zoo

        gc.collect()
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        self.graph, self.device = model.graph, device
        with torch.device(device):
            self.made = zoo.build(name, batch=batch, seq=seq)
        for module in dict.fromkeys(call.module for call in self.graph.calls if call.region in compile_regions):
            block = self.made.model.get_submodule(module)
            block.forward = torch.compile(block.forward, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.made.model.parameters(), lr=1e-5, fused=self.cuda)

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        import torch

        from tierwise import zoo

        made = self.made
        mark()
        with torch.autocast(self.device, dtype=made.autocast or torch.bfloat16, enabled=made.autocast is not None):
            out = made.model(**made.batch)
        loss = zoo.loss_of(out)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark()

    def wait(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def measure(self) -> dict[str, Any]:
        """Peaks and median seconds, also of each phase on the GPU and on the host."""
        import torch

        began = time.perf_counter()
        done = 0
        while done < WARM_UP_STEPS or time.perf_counter() - began < WARM_UP_SECONDS:
            self.step()
            self.wait()
            done += 1
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        taken, marked = [], []
        for _ in range(TIMED_STEPS):
            marks = _Marks(self.cuda)
            start = time.perf_counter()
            self.step(marks)
            self.wait()
            taken.append(time.perf_counter() - start)
            marked.append(marks.seconds())
        phases = {
            phase: {kind: statistics.median(one[place][kind] for one in marked) for kind in ("seconds", "host")}
            for place, phase in enumerate(("forward", "backward", "update"))
        }
        if not self.cuda:
            return {"peak_bytes": None, "seconds": statistics.median(taken), "phases": phases}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "seconds": statistics.median(taken),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "outside_bytes": total - free - torch.cuda.memory_reserved(),
            "phases": phases,
        }

    def explain(self) -> dict[str, Any]:
        """What only a miss is worth: the kernels of a step, and each block's forward within it."""
        try:
            return {"kernels": self._kernels(), "forward_within_step": self._within()} if self.cuda else {"forward_within_step": self._within()}
        except Exception as error:  # the row stands without it
            return {"unexplained": f"{type(error).__name__}: {error}"[:300]}

    def _kernels(self) -> dict[str, Any]:
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self.step()
            self.wait()
        found = sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
        most = {kernel.key[:60]: [kernel.count, kernel.self_device_time_total / 1e6] for kernel in found[:8]}
        return {"busy": sum(kernel.self_device_time_total for kernel in found) / 1e6, "count": sum(kernel.count for kernel in found), "most": most}

    def _within(self) -> dict[str, list[float]]:
        """For each kind of block, the median over its calls in three steps: seconds on the GPU, and on the host."""
        marks: dict[str, list[_Marks]] = {}
        blocks = {call.module: self.graph.regions[call.region].example for call in self.graph.calls}
        before = {module: vars(self.made.model.get_submodule(module)).get("forward") for module in blocks}
        for module, example in blocks.items():
            block = self.made.model.get_submodule(module)
            block.forward = _marked(block.forward, marks.setdefault(example, []), self.cuda)
        for _ in range(3):
            self.step()
            self.wait()
        for module, forward in before.items():
            block = self.made.model.get_submodule(module)
            if forward is None:
                del block.forward
            else:
                block.forward = forward
        found = {example: [one.seconds()[0] for one in taken] for example, taken in marks.items()}
        return {example: [statistics.median(one[kind] for one in ones) for kind in ("seconds", "host")] for example, ones in found.items()}


def _marked(forward: Callable[..., Any], into: list[_Marks], cuda: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        marks = _Marks(cuda)
        into.append(marks)
        marks()
        found = forward(*args, **kwargs)
        marks()
        return found

    return call


class _Marks:
    """Moments on the GPU and on the host."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.host: list[float] = []
        self.device: list[Any] = []

    def __call__(self) -> None:
        import torch

        self.host.append(time.perf_counter())
        if self.cuda:
            self.device.append(torch.cuda.Event(enable_timing=True))
            self.device[-1].record()

    def seconds(self) -> list[dict[str, float]]:
        host = [after - before for before, after in zip(self.host[:-1], self.host[1:], strict=True)]
        if not self.cuda:
            return [{"seconds": one, "host": one} for one in host]
        device = [before.elapsed_time(after) / 1e3 for before, after in zip(self.device[:-1], self.device[1:], strict=True)]
        return [{"seconds": one, "host": other} for one, other in zip(device, host, strict=True)]


# -- for whoever watches -------------------------------------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    """A row as text: the verdict, then predicted against measured for each phase and the parts that matter, in milliseconds."""
    detail = row["detail"]
    lines = [
        f"{row['case']} {row['way']}: measured {1e3 * row['seconds']:.1f} ms, predicted {1e3 * row['predicted_seconds']:.1f} "
        f"({100 * row['seconds_error']:+.1f}%), roofline {100 * row['roofline_error']:+.1f}%"
        + (f", peak {100 * row['peak_error']:+.1f}%" if row["peak_error"] is not None else "")
    ]
    for phase, predicted in detail["predicted"].items():
        measured = detail["measured"][phase]
        lines.append(
            f"  {phase}: {1e3 * measured['seconds']:.1f} (host {1e3 * measured['host']:.1f}); predicted {1e3 * predicted['seconds']:.1f} "
            f"(busy {1e3 * predicted['busy']:.1f}, host {1e3 * predicted['host']:.1f})"
        )
    within = detail.get("forward_within_step", {})
    for name, phases in sorted(detail["parts"].items(), key=lambda item: -sum(count * max(d, h) for count, d, h in item[1].values()))[:5]:
        text = ", ".join(f"{phase} {count} × {1e3 * device:.3f} (host {1e3 * host:.3f})" for phase, (count, device, host) in phases.items())
        inside = f"; within the step {1e3 * within[name][0]:.3f} (host {1e3 * within[name][1]:.3f})" if name in within else ""
        lines.append(f"    {name}: {text}{inside}")
    if "kernels" in detail:
        kernels = detail["kernels"]
        most = ", ".join(f"{name[:32]} {count} × {1e3 * seconds / count:.3f}" for name, (count, seconds) in list(kernels["most"].items())[:4])
        lines.append(f"  busy {1e3 * kernels['busy']:.1f} with {kernels['count']} kernels; {most}")
    lines += [f"  unexplained: {detail['unexplained']}"] if "unexplained" in detail else []
    return "\n".join([*lines, *(f"  note: {note[:200]}" for note in row["notes"])])
