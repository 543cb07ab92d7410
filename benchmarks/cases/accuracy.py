"""Predicted against measured: peak and step time of zoo models with everything kept, eager and with each block compiled."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

NEEDS = "cuda"
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


def measure(name: str, batch: int, seq: int | None, *, compiled: bool) -> dict[str, Any]:
    """Peak allocated and reserved bytes and median seconds of a real step with AdamW (fused) on the GPU."""
    import torch

    from tierwise import zoo

    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = zoo.build(name, batch=batch, seq=seq)
    if compiled:
        from tierwise import pipeline

        compile_blocks(made.model, pipeline.capture_model(name, batch=batch, seq=seq).graph)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=made.autocast or torch.bfloat16, enabled=made.autocast is not None):
            out = made.model(**made.batch)
        loss = zoo.loss_of(out)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    return {
        "seconds": statistics.median(taken),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
        "warm_up_seconds": warm,
    }


def compile_blocks(model: Any, graph: Any) -> None:
    """Each repeated block that capture found is compiled once and shared by all layers of its kind."""
    import torch

    repeated = [call for call in graph.calls if sum(other.region == call.region for other in graph.calls) > 1]
    for module in dict.fromkeys(call.module for call in repeated):
        block = model.get_submodule(module)
        block.forward = torch.compile(block.forward)


def predict(name: str, batch: int, seq: int | None, machine: str) -> dict[str, Any]:
    """What capture and the roofline say of the same step."""
    from tierwise import pipeline

    start = time.perf_counter()
    captured = pipeline.capture_model(name, batch=batch, seq=seq)
    seconds = time.perf_counter() - start
    found = pipeline.reference(pipeline.make_problem(captured.graph, machine)).row
    return {"predicted_peak_bytes": found.peak_bytes, "predicted_seconds": found.seconds, "capture_seconds": seconds, "ops": len(captured.graph.ops)}
