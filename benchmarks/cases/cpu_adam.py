"""Updates on the CPU, parameters a second: ours, torch's fused AdamW, and DeepSpeed's CPU Adam if a folder with it is named, one after the other.

Ours reads a bf16 gradient, updates fp32 master and moments and writes the bf16 parameter in one pass. Torch's and DeepSpeed's know fp32 only: with
casts they do the same job, bf16 in and bf16 out, and without they do less. Each with as many threads as ours has found best and with all cores, past
every cache, the best of a few. All of them wait for memory, so the table has the bytes a second that passed at least.

    PEERS_PATH=DIR/deepspeed-0.19.8:DIR/site python -m benchmarks cpu_adam --machine h200
    python -m benchmarks.cases.cpu_adam --parameters 1000000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

NEEDS = ""
COLUMNS = ["whose", "threads", "G parameters/s", "of the first", "GB/s"]
PASSED_BYTES = {"ours": 28, "alone": 28, "with casts": 46}
"""For each parameter: weight and two moments in and out are 24; gradient and parameter in bf16, the latter past the caches, or a gradient in fp32,
are 4; casts read 2 and write 4, read 4 and write 2, and what they write is read first."""
PARAMETERS = 1 << 26
REPEATS = 5


def run(*, parameters: int = PARAMETERS) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for whose, threads, rate in _rates(parameters):
        passed = next(passed for name, passed in PASSED_BYTES.items() if whose.endswith(name))
        rows.append([whose, threads, rate / 1e9, rate / (1e9 * rows[0][2]) if rows else 1.0, passed * rate / 1e9])
        print(rows[-1], flush=True)
    return rows


def _rates(parameters: int) -> Iterator[tuple[str, int, float]]:
    import torch

    from tierwise.execute.states.passes import best_host

    ours = best_host(elements=parameters)
    yield "ours", ours.threads, ours.parameters_per_second
    makers: dict[str, Callable[[Any], Any]] = {"torch, fused": lambda weights: torch.optim.AdamW([weights], lr=1e-4, fused=True)}
    sys.path[:0] = [path for path in os.environ.get("PEERS_PATH", "").split(os.pathsep) if path]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        makers["DeepSpeed's CPU Adam"] = lambda weights: DeepSpeedCPUAdam([weights], lr=1e-4, adamw_mode=True)
    except ImportError as error:
        print(f"without DeepSpeed, which PEERS_PATH has no whole copy of: {error}", file=sys.stderr)
    for whose, make in makers.items():
        for threads in sorted({ours.threads, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            weights = torch.nn.Parameter(torch.randn(parameters))
            weights.grad = torch.randn(parameters)
            gradient, out = weights.grad.bfloat16(), weights.detach().bfloat16()
            step = make(weights).step
            yield f"{whose}, alone", threads, _best(step, parameters)
            yield f"{whose}, with casts", threads, _best(partial(_with_casts, step, weights, gradient, out), parameters)


def _with_casts(step: Callable[[], Any], weights: Any, gradient: Any, out: Any) -> None:
    weights.grad.copy_(gradient)
    step()
    out.copy_(weights.detach())


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
