"""How updates on the CPU and updates streamed through the device share host memory and the link: each alone, and both at once.

Half a billion bf16 parameters with fp32 masters and moments in host memory for each, gradients on the device; an update is optimizer.step() until its
last parameter is there. "copies" are plain pinned copies, both ways, beside nothing and beside the CPU's update. It decides how a plan splits layers.

    python -m benchmarks sharing --machine h200
    python -m benchmarks.cases.sharing --device cpu --parameters 100000 --repeats 1
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

NEEDS = "cuda"
COLUMNS = ["what", "threads", "cpu, G parameters/s", "streamed, G parameters/s", "together, G parameters/s", "copies out, GB/s", "copies in, GB/s"]
PARAMETERS = 1 << 29
PIECES = 8  # regions of each kind
COPY_BYTES = 1 << 28


def run(*, device: str = "cuda", parameters: int = PARAMETERS, repeats: int = 3) -> list[list[Any]]:
    from tierwise.execute.states.passes import best_host, parameters_per_second

    cores = os.cpu_count() or 1
    rows: list[list[Any]] = []
    for threads in sorted({max(1, cores // 2), max(1, cores - 2), max(1, cores - 1), cores}):
        rows.append(["formula on the CPU, nothing beside it", threads, parameters_per_second(threads, elements=parameters // 8) / 1e9, *[None] * 4])
        print(rows[-1], flush=True)
    threads = best_host(elements=parameters // 8).threads
    for what, kinds in (("updates on the CPU", "c"), ("updates streamed", "s"), ("both at once", "cs")):
        seconds, ends = _updates(device, kinds, parameters, threads, repeats)
        rates = {kind: parameters / ends[kind] / 1e9 for kind in kinds}
        rows.append([what, threads, rates.get("c"), rates.get("s"), parameters * len(kinds) / seconds / 1e9, None, None])
        print(rows[-1], flush=True)
    for what, busy in (("copies", False), ("copies beside updates on the CPU", True)):
        rows.append([what, threads, *_copies(device, busy, parameters, threads)])
        print(rows[-1], flush=True)
    return rows


def _device(kind: str) -> Any:
    from tierwise.execute.device import CudaDevice
    from tierwise.execute.null_device import NullDevice

    return CudaDevice() if kind == "cuda" else NullDevice(8 << 30)


def _updates(device: str, kinds: str, parameters: int, threads: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Seconds until everything is updated, and until all of each kind are: the best of some."""
    import torch
    from torch import nn

    from tierwise.execute.host_pool import HostPool
    from tierwise.execute.states.placement import Placement
    from tierwise.execute.states.states import States

    here = _device(device)
    model = nn.Module()
    where = {"c": Placement("host", "cpu", gradients="device"), "s": Placement("host", "streamed")}
    placements = {}
    for piece in range(PIECES):
        for kind in kinds:  # in turn, as a plan would have them
            part = nn.Module()
            part.weight = nn.Parameter(torch.full((parameters // PIECES,), 0.5, dtype=torch.bfloat16, device=here.torch_device))
            model.add_module(f"{kind}{piece}", part)
            placements[f"{kind}{piece}"] = where[kind]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    states = States(model, optimizer, placements, here, masters="fp32", threads=threads)
    pool = HostPool(max(1, states.needs().host_bytes), here)
    states.install(pool=pool)
    best, best_ends = float("inf"), dict.fromkeys(kinds, float("inf"))
    for _ in range(repeats + 1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        here.synchronize()
        start = time.perf_counter()
        optimizer.step()
        ends = dict.fromkeys(kinds, 0.0)
        waiting = [home for home in states.stored if home.pending is not None]
        while waiting:
            for home in list(waiting):
                assert home.pending is not None and home.pending.signal is not None
                if home.pending.signal.done() and home.pending.event.done():
                    ends[home.unit.regions[0][0]] = time.perf_counter() - start
                    waiting.remove(home)
            time.sleep(1e-4)
        taken = time.perf_counter() - start
        states.flush()
        optimizer.zero_grad()
        if taken < best:
            best, best_ends = taken, ends
    states.close()
    pool.close()
    here.close()
    return best, best_ends


def _copies(device: str, busy: bool, parameters: int, threads: int) -> tuple[float | None, None, None, float, float]:
    """Bytes a second each way at once, while the CPU updates or does nothing; and its own rate meanwhile."""
    import threading

    import torch

    from tierwise.execute.device import Direction
    from tierwise.execute.host_pool import HostPool
    from tierwise.execute.states.cpu_pass import open_cpu_pass
    from tierwise.execute.states.rules import ADAMW

    here = _device(device)
    nbytes = min(COPY_BYTES, parameters)
    pool = HostPool(2 * nbytes, here)
    blocks = {direction: pool.allocate(nbytes) for direction in Direction}
    there = {direction: here.empty(nbytes) for direction in Direction}
    stop, updated = threading.Event(), [0, 0.0]
    elements = parameters // 8
    arrays = [torch.zeros(elements) for _ in range(3)]
    gradient, out = (torch.zeros(elements, dtype=torch.bfloat16) for _ in range(2))
    numbers = ADAMW.numbers({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}, 1)
    run = open_cpu_pass(threads)
    assert run is not None, "this case needs a C++ compiler"

    def update() -> None:
        start = time.perf_counter()
        while not stop.is_set():
            run(ADAMW, numbers, arrays[0], gradient, arrays[1:], out)
            updated[0] += elements
        updated[1] = time.perf_counter() - start

    run(ADAMW, numbers, arrays[0], gradient, arrays[1:], out)
    thread = threading.Thread(target=update)
    if busy:
        thread.start()
    rounds = 12
    start, ends = time.perf_counter(), {}
    events = {direction: [_copy(here, direction, blocks[direction], there[direction]) for _ in range(rounds)] for direction in Direction}
    for direction, found in events.items():
        found[-1].wait()
        ends[direction] = time.perf_counter() - start
    stop.set()
    if busy:
        thread.join()
    run.close()
    here.synchronize()
    pool.close()
    here.close()
    rate = updated[0] / updated[1] / 1e9 if busy else None
    return rate, None, None, rounds * nbytes / ends[Direction.OUT] / 1e9, rounds * nbytes / ends[Direction.IN] / 1e9


def _copy(device: Any, direction: Any, block: Any, there: Any) -> Any:
    from tierwise.execute.states.homes import copy_block

    return copy_block(device, direction, block, slice(0, block.nbytes), there, after=())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    run(device=given.device, parameters=given.parameters, repeats=given.repeats)
