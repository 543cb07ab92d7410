"""What the disk gives to state that lives there: chunks of 120 MB written, read, and both at once, as an update does it, through the same store.

By requests of 16 MiB in flight. The file is written once before, as state is: the first write of a claimed block costs more than those after it.
"Both" is one chunk read while the one before is written, bytes of either kind together.

    python -m benchmarks disk --machine h200
    python -m benchmarks.cases.disk --megabytes 240 --directory /mnt/nvme
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

NEEDS = ""
COLUMNS = ["requests in flight", "write, GB/s", "read, GB/s", "both, GB/s"]
CHUNK_BYTES = 120 * 10**6
MEGABYTES = 4800
REQUESTS = (4, 8, 16, 4)
BUFFERS = 4  # of host memory, as updates have


def run(*, directory: str | None = None, megabytes: int = MEGABYTES, requests: Sequence[int] = REQUESTS) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for count in requests:
        rows.append([str(count), *(round(rate / 1e9, 3) for rate in measured(directory or tempfile.gettempdir(), megabytes * 10**6, count))])
        print(rows[-1], flush=True)
    return rows


def measured(directory: str, nbytes: int, requests: int) -> tuple[float, float, float]:
    """Bytes a second: written, read, and both together."""
    from tierwise.execute.blocks import BLOCK_BYTES
    from tierwise.execute.device import CudaDevice
    from tierwise.execute.host_pool import PAGE_BYTES, HostPool
    from tierwise.execute.null_device import NullDevice
    from tierwise.execute.nvme import NvmeStore

    device: Any = CudaDevice() if _has_cuda() else NullDevice(8 << 30)
    chunks = max(2, nbytes // CHUNK_BYTES)
    pool = HostPool(BUFFERS * (CHUNK_BYTES + PAGE_BYTES) + requests * BLOCK_BYTES + (1 << 20), device)
    with NvmeStore(directory, chunks * (CHUNK_BYTES + PAGE_BYTES), pool, requests=requests) as store:
        buffers = [pool.allocate(CHUNK_BYTES, alignment=PAGE_BYTES).bytes for _ in range(BUFFERS)]
        extents = [store.reserve(CHUNK_BYTES) for _ in range(chunks)]
        under_way: deque[Any] = deque()

        def timed(work: Callable[[int], None], factor: int) -> float:
            start = time.perf_counter()
            for number in range(chunks):
                while len(under_way) >= BUFFERS:
                    under_way.popleft().wait()
                work(number)
            while under_way:
                under_way.popleft().wait()
            return factor * chunks * CHUNK_BYTES / (time.perf_counter() - start)

        def write(number: int) -> None:
            under_way.append(store.write_async(extents[number], buffers[number % BUFFERS]))

        def read(number: int) -> None:
            under_way.append(store.read_async(extents[number], buffers[number % BUFFERS]))

        def both(number: int) -> None:
            """The chunk after the next comes while this one, which came, goes back."""
            come = store.read_async(extents[(number + 2) % chunks], buffers[(number + 2) % BUFFERS])
            under_way.append(store.write_async(extents[number], buffers[number % BUFFERS]))
            under_way.append(come)

        timed(write, 1)
        found = timed(write, 1), timed(read, 1), timed(both, 2)
    pool.close()
    device.close()
    return found


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    parser.add_argument("--requests", type=int, nargs="*", default=REQUESTS)
    given = parser.parse_args()
    run(directory=given.directory, megabytes=given.megabytes, requests=given.requests)


if __name__ == "__main__":
    main()
