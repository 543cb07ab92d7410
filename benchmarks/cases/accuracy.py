"""Predicted against measured: peak and step time of zoo models with everything kept, eager and with each repeated block compiled.

Predictions are made before anything runs: from fake tensors and the roofline of the shipped machine profile; and a second time from this GPU's own
times of each distinct op and each block.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

NEEDS = "cuda"
MACHINE = "h200"
# Of different kinds, each large enough to keep the GPU busy and small enough for a card of 80 GB: name, batch, seq.
MODELS: tuple[tuple[str, int, int | None], ...] = (
    ("gpt2-medium", 8, 1024),
    ("llama-1.4b", 8, 2048),
    ("qwen-1.5b", 4, 2048),
    ("bert-large", 32, 512),
    ("t5-large", 8, 512),
    ("vit-large-16", 64, None),
    ("resnet-152", 128, None),
    ("vgg-16", 128, None),
    ("inception-v4", 64, None),
    ("unet", 8, None),
    ("lstm-large", 64, None),
)
WARM_UP_STEPS, TIMED_STEPS = 3, 5


def run() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, batch, seq in MODELS:
        try:
            rows += rows_of(name, batch, seq)
        except Exception:
            rows.append({"case": name, "way": "failed", "error": traceback.format_exc()[-1500:]})
    return rows


def rows_of(name: str, batch: int, seq: int | None) -> list[dict[str, Any]]:
    from tierwise import machines, pipeline
    from tierwise.ir import Problem
    from tierwise.profile.ops import measured_costs

    machine = machines.load(MACHINE)
    model = pipeline.capture_model(name, batch=batch, seq=seq)
    compiled = pipeline.compiled_step(model)
    eager_roofline = pipeline.reference(pipeline.make_problem(model.graph, machine)).row
    compiled_roofline = pipeline.reference(pipeline.compiled_problem(model, compiled, machine)).row
    with tempfile.TemporaryDirectory() as scratch:
        costs = measured_costs(model.graph, model.recipes, machine, cache=Path(scratch) / "ops.json")
    eager_profiled = pipeline.reference(Problem(model.graph, machine, costs)).row
    rows = []
    for way, roofline in (("eager", eager_roofline), ("compiled", compiled_roofline)):
        blocks: dict[int, tuple[float, float]] = {}
        measured = measure(name, batch, seq, model=model, compile_regions=set(compiled.compiled) if way == "compiled" else set(), blocks=blocks)
        profiled = eager_profiled
        if way == "compiled":
            profiled = pipeline.reference(_with_blocks(pipeline.compiled_problem(model, compiled, machine, costs), blocks)).row
        rows.append({
            "case": name, "way": way, "budget_bytes": None, **measured, "ratio": None,
            "predicted_seconds": profiled.seconds, "predicted_peak_bytes": roofline.peak_bytes + machine.device.library_bytes,
            "roofline_seconds": roofline.seconds,
            "seconds_error": profiled.seconds / measured["seconds"] - 1,
            "roofline_error": roofline.seconds / measured["seconds"] - 1,
            "peak_error": (roofline.peak_bytes + machine.device.library_bytes) / measured["peak_bytes"] - 1,
            "batch": batch, "seq": seq, "notes": list(compiled.notes) if way == "compiled" else [],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _with_blocks(problem: Any, blocks: dict[int, tuple[float, float]]) -> Any:
    """The compiled step with each block's own measured times."""
    import dataclasses

    seconds = dict(problem.costs.op_seconds)
    region_of = {call.id: call.region for call in problem.graph.calls}
    for op in problem.graph.ops:
        found = blocks.get(region_of.get(op.region, -1))
        if found is not None and op.kind in ("region_forward", "region_backward"):
            seconds[op.id, problem.machine.device.name] = found[0 if op.kind == "region_forward" else 1]
    return dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, op_seconds=seconds))


def measure(
    name: str, batch: int, seq: int | None, *, model: Any, compile_regions: set[int], blocks: dict[int, tuple[float, float]]
) -> dict[str, Any]:
    """A real step with AdamW (fused) on the GPU: peaks and median seconds. Fills `blocks` with the times of each compiled region class."""
    import torch

    from tierwise import zoo

    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = zoo.build(name, batch=batch, seq=seq)
    for module in dict.fromkeys(call.module for call in model.graph.calls if call.region in compile_regions):
        block = made.model.get_submodule(module)
        block.forward = torch.compile(block.forward)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=made.autocast or torch.bfloat16, enabled=made.autocast is not None):
            out = made.model(**made.batch)
        loss = zoo.loss_of(out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    found = {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": statistics.median(taken),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
    }
    if compile_regions:
        _time_blocks(made, model, compile_regions, blocks)
    return found


def _time_blocks(made: Any, model: Any, compile_regions: set[int], blocks: dict[int, tuple[float, float]]) -> None:
    import torch
    from torch.utils._pytree import tree_map

    from tierwise.capture import region_examples
    from tierwise.profile.blocks import block_seconds

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with torch.utils._python_dispatch._disable_current_modes():
            made = torch.empty(value.shape, dtype=value.dtype, device="cuda")
            made = made.normal_() if value.dtype.is_floating_point else made.zero_()
            return made.requires_grad_(value.requires_grad)

    calls = {}
    with region_examples(model.made.model, model.made.batch, model.graph, autocast=model.made.autocast) as examples:
        for region in compile_regions:
            calls[region] = (tree_map(on_gpu, examples[region].args), tree_map(on_gpu, examples[region].kwargs))
    for region, (args, kwargs) in calls.items():
        block = made.model.get_submodule(model.graph.regions[region].example)
        wanted = [t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor) and t.requires_grad]
        wanted += [parameter for parameter in block.parameters() if parameter.requires_grad]

        def call(block: Any = block, args: Any = args, kwargs: Any = kwargs) -> Any:
            with torch.autocast("cuda", dtype=made.autocast or torch.bfloat16, enabled=made.autocast is not None):
                return block(*args, **kwargs)

        blocks[region] = block_seconds(call, wanted)
