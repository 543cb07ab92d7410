"""How much longer a compiled Llama block's calls take while pinned copies run beside them: out, in, both ways.

Copies are issued ahead on a stream for each way, enough to last as long as the calls; "copying" says for how much of the calls' time they did. The
ways take turns, since a card that has just rested is faster than one that has not, and each is compared with the calls alone of its own turn.

    python -m benchmarks beside --machine h200
    python -m benchmarks.cases.beside --device cpu --hidden 64 --heads 4 --batch 1 --seq 16 --calls 2 --turns 2 --megabytes 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

NEEDS = "cuda"
COLUMNS = ["copies", "forward, ms", "backward, ms", "forward, times as long", "backward, times as long", "copying"]
WAYS: dict[str, tuple[str, ...]] = {"none": (), "out": ("out",), "in": ("in",), "both": ("out", "in")}
SHAPES = ({"hidden": 3072, "heads": 24, "batch": 8, "seq": 2048}, {"hidden": 4096, "heads": 32, "batch": 4, "seq": 2048})
CALLS, TURNS, MEGABYTES = 12, 8, 256
LASTING = 1.3  # of what calls take alone: so long copies are made to last


def run(**options: Any) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for shape in SHAPES:
        rows += _compared(shape, **options)
    return rows


def _compared(shape: dict[str, int], *, device: str = "cuda", calls: int = CALLS, turns: int = TURNS, megabytes: int = MEGABYTES) -> list[list[Any]]:
    forward, backward = _calls_of(shape, device)
    copies = _Copies(device, megabytes * 10**6)
    for call in (forward, backward, forward, backward):  # the first ones compile
        call()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    alone = 0.0
    for _ in range(turns):
        for way, directions in WAYS.items():
            found[way].append(_turn(forward, backward, calls, copies, directions, LASTING * alone))
            if way == "none":
                alone = calls * (found[way][-1][0] + found[way][-1][1])
    name = f"{shape['hidden']} wide, {shape['batch']} × {shape['seq']} tokens"
    rows = []
    for way, taken in found.items():
        times = [statistics.median(one[call] / none[call] for one, none in zip(taken, found["none"], strict=True)) for call in (0, 1)]
        milliseconds = [1e3 * statistics.median(one[call] for one in taken) for call in (0, 1)]
        rows.append([f"{name}: {way}", *milliseconds, *times, statistics.median(one[2] for one in taken)])
        print(rows[-1], flush=True)
    copies.close()
    return rows


def _turn(
    forward: Callable[[], None], backward: Callable[[], None], calls: int, copies: _Copies, directions: tuple[str, ...], lasting: float
) -> tuple[float, float, float]:
    """Seconds of a forward and of a backward, and for which part of them all the copies ran."""
    clock = copies.clock
    clock.wait()
    over = [copies.for_seconds(way, lasting) for way in directions]
    marks = [clock.mark()]
    for _ in range(calls):
        forward()
        marks.append(clock.mark())
        backward()
        marks.append(clock.mark())
    clock.wait()
    each = [clock.between(one, other) for one, other in pairwise(marks)]
    whole = clock.between(marks[0], marks[-1])
    copying = min((clock.between(marks[0], end) / whole for end in over), default=0.0)
    return statistics.median(each[::2]), statistics.median(each[1::2]), max(0.0, min(1.0, copying))


def _calls_of(shape: dict[str, int], device: str) -> tuple[Callable[[], None], Callable[[], None]]:
    import torch

    from tierwise.zoo.llama import Block, rotary_tables

    torch.manual_seed(0)
    hidden, heads = shape["hidden"], shape["heads"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        block = Block(hidden, int(hidden * 2.75), heads, heads, qkv_bias=False, norm_eps=1e-5).to(dtype)
        x = torch.randn(shape["batch"], shape["seq"], hidden, dtype=dtype).requires_grad_()
        tangent = torch.randn_like(x)  # on equal numbers a card draws less power and runs faster than it ever does
    cos, sin = rotary_tables(shape["seq"], hidden // heads, 10_000.0, like=x)
    compiled = torch.compile(Block.forward, dynamic=False)
    wanted, results = [x, *block.parameters()], []

    def forward() -> None:
        results.append(compiled(block, x, cos, sin))

    def backward() -> None:
        torch.autograd.grad(results.pop(), wanted, tangent)

    return forward, backward


class _Clock:
    """Events of a card, or the host's clock where there is none."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def mark(self, stream: Any = None) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record(stream or self._cuda.current_stream())
        return event

    def wait(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()

    def between(self, one: Any, other: Any) -> float:
        return float(other - one if self._cuda is None else one.elapsed_time(other) / 1e3)


class _Copies:
    def __init__(self, device: str, nbytes: int) -> None:
        import torch

        self._cuda = torch.cuda if device == "cuda" else None
        self.clock = _Clock(self._cuda)
        self._pairs = {}
        for way in ("out", "in"):
            there, here = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
            self._pairs[way] = (there, here) if way == "in" else (here, there)
        self._streams = {way: self._cuda.Stream() if self._cuda else None for way in self._pairs}
        self._seconds = {way: self._one(way) for way in self._pairs}

    def for_seconds(self, way: str, seconds: float) -> Any:
        """Issue so many as take so long, alone; when the last is over."""
        count = max(1, round(seconds / self._seconds[way]))
        return self._issue(way, count)

    def close(self) -> None:
        self.clock.wait()
        self._pairs.clear()

    def _one(self, way: str) -> float:
        self._issue(way, 1)
        self.clock.wait()
        began = self.clock.mark(self._streams[way])
        over = self._issue(way, 4)
        self.clock.wait()
        return self.clock.between(began, over) / 4

    def _issue(self, way: str, count: int) -> Any:
        to, source = self._pairs[way]
        if self._cuda is None:
            for _ in range(count):
                to.copy_(source)
            return self.clock.mark()
        stream = self._streams[way]
        with self._cuda.stream(stream):
            for _ in range(count):
                to.copy_(source, non_blocking=True)
        return self.clock.mark(stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    for name in ("hidden", "heads", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int, default=SHAPES[0][name])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES)
    given = vars(parser.parse_args())
    shape = {name: given.pop(name) for name in SHAPES[0]}
    _compared(shape, **given)


if __name__ == "__main__":
    main()
