"""Updates on the CPU, parameters a second: ours, torch's fused AdamW, and DeepSpeed's CPU Adam if a folder with it is named, one after the other.

Ours reads a bf16 gradient, updates fp32 master and moments and writes the bf16 parameter in one pass; torch's fused update is all fp32, with
nothing to cast; DeepSpeed's has fp32 parameters and gradients, as ZeRO-Offload gives them to it, its copy to bf16 not counted. Past every cache, the
best of a few.

    PEERS_PATH=DIR/deepspeed-0.19.8:DIR/site python -m benchmarks cpu_adam --machine h200
    python -m benchmarks.cases.cpu_adam --parameters 1000000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

NEEDS = ""
COLUMNS = ["whose", "threads", "G parameters/s", "of the first"]
PARAMETERS = 1 << 26
REPEATS = 5


def run(*, parameters: int = PARAMETERS) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for whose, threads, rate in _rates(parameters):
        rows.append([whose, threads, rate / 1e9, rate / (1e9 * rows[0][2]) if rows else 1.0])
        print(rows[-1], flush=True)
    return rows


def _rates(parameters: int) -> Iterator[tuple[str, int, float]]:
    import torch

    from tierwise.execute.states.passes import best_host

    ours = best_host(elements=parameters)
    yield "ours", ours.threads, ours.parameters_per_second
    for threads in sorted({ours.threads, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        yield "torch, fused, all fp32", threads, _best(torch.optim.AdamW([_parameter(parameters)], lr=1e-4, fused=True).step, parameters)
    sys.path[:0] = [path for path in os.environ.get("PEERS_PATH", "").split(os.pathsep) if path]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        print(f"without DeepSpeed, which PEERS_PATH has no whole copy of: {error}", file=sys.stderr)
        return
    for threads in sorted({ours.threads, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        yield "DeepSpeed's CPU Adam", threads, _best(DeepSpeedCPUAdam([_parameter(parameters)], lr=1e-4, adamw_mode=True).step, parameters)


def _parameter(elements: int) -> Any:
    import torch

    made = torch.nn.Parameter(torch.randn(elements))
    made.grad = torch.randn(elements)
    return made


def _best(step: Callable[[], Any], parameters: int) -> float:
    step()  # makes its state
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return parameters / min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    run(parameters=parser.parse_args().parameters)


if __name__ == "__main__":
    main()
