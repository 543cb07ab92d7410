"""The codecs of execute/codecs on this device: plain bytes a second each way, how small, whether every bit came back, and what they make of a link.

`times the link` is how much faster a tensor reaches the host if it is encoded first and its parts are sent, one after the other: below 1 the codec
does not pay; the link's own row has its bytes a second. Runs on a GPU, or on the CPU, where there is no link.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

NEEDS = ""
COLUMNS = ["codec", "ratio", "encode B/s", "decode B/s", "every bit", "times the link", "by"]
DENSITIES = (1.0, 0.35, 0.1)
REPEATS = 10


def run() -> list[list[Any]]:
    import torch

    from tierwise.execute import codecs

    on_gpu = torch.cuda.is_available()
    elements = 1 << 28 if on_gpu else 1 << 22
    link = _link_rate(1 << 28) if on_gpu else None
    rows = [["link to the host", 1.0, link, None, None, 1.0, "pinned copy"]] if link else []
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        for density in DENSITIES:
            tensor = _activations(elements, dtype, density)
            for codec in ("zvc", "csr", *(c for c in ("fp16", "bf16", "fp8") if density == 1.0 and c != name)):
                rows.append(_row(f"{codec}, {name}, density {density}", tensor, codec, link))
        tensor = _activations(elements, dtype, 0.35)
        rows.append(_signs(f"signs, {name}", tensor, link))
        del tensor
    rows.append(_row("bits, bool", _activations(elements, torch.float32, 0.5) > 0, "bits", link))
    for row in rows:
        print(*(f"{cell / 1e9:.1f} GB/s" if isinstance(cell, float) and cell > 1e6 else cell for cell in row), sep="\t", file=sys.stderr)
    if broken := {row[0].split(",")[0] for row in rows if row[4] is False} - codecs.LOSSY:
        raise AssertionError(f"{', '.join(sorted(broken))} lost bits")
    return rows


def _activations(elements: int, dtype: Any, density: float) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    values = torch.rand(elements, device=device, dtype=torch.float32).add_(0.01)
    return values.mul_(torch.rand(elements, device=device) < density).to(dtype)


def _row(name: str, tensor: Any, codec: str, link: float | None) -> list[Any]:
    from tierwise.execute import codecs

    encoded = codecs.encode(tensor, codec)
    exact = _same_bits(codecs.decode(encoded), tensor)
    return [
        *_measured(name, tensor, encoded.nbytes, lambda: codecs.encode(tensor, codec), lambda: codecs.decode(encoded), exact, link),
        _by(tensor, codec),
    ]


def _signs(name: str, tensor: Any, link: float | None) -> list[Any]:
    """A ReLU's backward from signs, where others read the output; `decode` is the whole backward."""
    import torch

    from tierwise.execute.codecs import bits

    gradient = torch.rand_like(tensor)
    encoded = bits.signs(tensor)
    exact = _same_bits(bits.relu_backward(gradient, encoded), torch.ops.aten.threshold_backward(gradient, tensor, 0))
    measured = _measured(name, tensor, encoded.nbytes, lambda: bits.signs(tensor), lambda: bits.relu_backward(gradient, encoded), exact, link)
    return [*measured, _by(tensor, "bits")]


def _measured(
    name: str, tensor: Any, nbytes: int, encode: Callable[[], Any], decode: Callable[[], Any], exact: bool, link: float | None
) -> list[Any]:
    encoding, decoding = _seconds(encode), _seconds(decode)
    gain = (tensor.nbytes / link) / (encoding + nbytes / link) if link else None
    return [name, tensor.nbytes / nbytes, tensor.nbytes / encoding, tensor.nbytes / decoding, exact, gain]


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def _by(tensor: Any, codec: str) -> str:
    """Of what this benchmark encodes, only bf16 is torch's cast where there are kernels."""
    from tierwise.execute.codecs.encoded import kernels_for

    if kernels_for(tensor) and codec != "bf16":
        return "Triton"
    return f"torch on the {'GPU' if tensor.is_cuda else 'CPU'}"


def _seconds(work: Callable[[], Any]) -> float:
    """Median seconds of one call, waits for the device included, after two to warm up."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once(), once()
    return statistics.median(once() for _ in range(REPEATS))


def _link_rate(nbytes: int) -> float:
    import torch

    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return nbytes / _seconds(lambda: host.copy_(device, non_blocking=True))
