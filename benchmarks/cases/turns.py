"""Who gets the link, of one lane with many copies issued ahead and one with a larger copy now and then.

The first is state that passes through the device, the other parameters of a layer that is about to run. How long those take that come while the first
lane is busy, and what the link carries in all.

    python -m benchmarks turns --machine h200
    python -m benchmarks.cases.turns --device cpu --megabytes 1 --copies 30
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

NEEDS = "cuda"
COLUMNS = ["turns", "others, best, ms", "others, worst, ms", "link in, GB/s"]
MEGABYTES, COPIES, AHEAD = 80, 300, 12
OTHERS, OTHERS_TIMES_LARGER, APART_SECONDS = 8, 3, 0.02


def run(*, device: str = "cuda", megabytes: int = MEGABYTES, copies: int = COPIES) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for what, every in (("never", 0), ("after every copy", 1), ("after every second copy", 2), ("never", 0), ("after every second copy", 2)):
        rows.append([what, *_measured(device, megabytes * 10**6, copies, every)])
        print(rows[-1], flush=True)
    return rows


def _measured(device: str, nbytes: int, copies: int, every: int) -> tuple[float, float, float]:
    from tierwise.execute.device import CudaDevice, Direction
    from tierwise.execute.host_pool import HostPool
    from tierwise.execute.null_device import NullDevice

    lanes: list[Any] = [CudaDevice() if device == "cuda" else NullDevice(8 << 30) for _ in range(2)]
    pool = HostPool((OTHERS_TIMES_LARGER + 1) * nbytes + (1 << 20), lanes[0])
    chunk, larger = pool.allocate(nbytes), pool.allocate(OTHERS_TIMES_LARGER * nbytes)
    here, there = lanes[0].empty(nbytes), lanes[1].empty(OTHERS_TIMES_LARGER * nbytes)
    lanes[0].synchronize()
    issued: deque[Any] = deque()
    others: list[tuple[Any, Any]] = []
    start, began = lanes[0].moment(Direction.IN), time.perf_counter()
    for number in range(copies):
        while len(issued) >= AHEAD:
            issued.popleft().wait()
        issued.append(lanes[0].copy(Direction.IN, here, chunk.bytes))
        if every and number % every == 0:
            lanes[0].let_others(Direction.IN)
        if len(others) < OTHERS and time.perf_counter() - began > APART_SECONDS * (len(others) + 1):
            asked = lanes[1].moment()
            lanes[1].copy(Direction.IN, there, larger.bytes)
            others.append((asked, lanes[1].moment(Direction.IN)))
    end = lanes[0].moment(Direction.IN)
    end.wait()
    for _, moment in others:
        moment.wait()
    lanes[0].synchronize()
    taken = [1e3 * moment.since(asked) for asked, moment in others] or [float("nan")]
    carried = nbytes * (copies + OTHERS_TIMES_LARGER * len(others))
    seconds = end.since(start)
    pool.close()
    for lane in lanes:
        lane.close()
    return min(taken), max(taken), carried / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--copies", type=int, default=COPIES)
    given = parser.parse_args()
    run(device=given.device, megabytes=given.megabytes, copies=given.copies)


if __name__ == "__main__":
    main()
