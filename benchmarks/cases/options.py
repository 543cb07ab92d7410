"""What each option of a Llama block costs and saves when every layer runs it, against plain torch.compile of the block.

24 layers of 2048, 8 × 2048 tokens, bf16, fused AdamW; head and loss are one compiled function in every row. "bits" says whether the gradients of
two layers, with deterministic algorithms, equal those of the plain compiled block with precision casts emulated.

    python -m benchmarks options --machine h200
    python -m benchmarks.cases.options --device cpu --layers 2 --hidden 32 --heads 2 --batch 2 --seq 16 --vocab 64 --steps 1
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

NEEDS = "cuda"
COLUMNS = [
    "way", "saved a layer, GB", "measured, GB", "recomputed a layer, TFLOP", "step, ms", "ratio", "peak, GB", "reserved, GB", "first step, s", "loss",
    "bits",
]  # fmt: skip
SHAPE = {"layers": 24, "hidden": 2048, "heads": 16, "batch": 8, "seq": 2048, "vocab": 32000}
WARM_UPS = 3


def run(*, device: str = "cuda", steps: int = 6, bits: bool = True, **shape: int) -> list[list[Any]]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products ask for it
    from tierwise.regions import options
    from tierwise.regions.compiled import compile_option
    from tierwise.regions.joint import describe
    from tierwise.zoo.llama import Block

    shape = SHAPE | shape
    setup = _Setup(device, shape)
    found = options(describe(Block.forward, setup.block(), setup.block_inputs()))
    ways: list[tuple[str, Any, Callable[[], Callable[..., Any]]]] = [
        ("torch.compile", None, _plain),
        ("torch.compile, casts", None, lambda: _plain({"emulate_precision_casts": True})),
        *((option.name, option, lambda option=option: compile_option(Block.forward, option)) for option in found),
    ]
    rows: list[list[Any]] = []
    reference = None
    for name, option, make in ways:
        forward = make()
        measured = setup.measure(forward, steps)
        gradients = setup.gradients(forward) if bits and name != "torch.compile" else None
        reference = reference or gradients
        rows.append([
            name,
            None if option is None else option.saved_bytes / 1e9,
            setup.saved_bytes(forward) / 1e9,
            None if option is None else option.recompute_flops / 1e12,
            measured["step_ms"],
            measured["step_ms"] / (rows[0][4] if rows else measured["step_ms"]),
            measured["peak"], measured["reserved"], measured["first_seconds"], measured["loss"],
            None if gradients is None else _agreement(gradients, reference, again=setup.gradients(forward)),
        ])  # fmt: skip
        print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
        setup.forget()
    return rows


def _plain(settings: dict[str, Any] | None = None) -> Callable[..., Any]:
    import torch

    from tierwise.zoo.llama import Block

    return torch.compile(Block.forward, dynamic=False, options=settings)


def _agreement(gradients: list[Any], reference: list[Any], *, again: list[Any]) -> str:
    import torch

    if not all(map(torch.equal, gradients, again)):
        return "two runs of it differ"
    different = [not torch.equal(ours, theirs) for ours, theirs in zip(gradients, reference, strict=True)]
    return "equal" if not any(different) else f"{sum(different)} of {len(different)} gradients differ"


class _Setup:
    """The same model and the same tokens for every way."""

    def __init__(self, device: str, shape: dict[str, int]) -> None:
        import torch

        self.device = torch.device(device)
        self.shape = shape
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.cuda = self.device.type == "cuda"

    def model(self, layers: int) -> Any:
        import torch

        from tierwise.zoo.llama import Llama

        torch.manual_seed(0)
        hidden = self.shape["hidden"]
        with self.device:
            model = Llama(
                vocab=self.shape["vocab"], layers=layers, hidden=hidden, intermediate=int(hidden * 2.75), heads=self.shape["heads"], kv_heads=None
            )
        return model.to(self.dtype).train()

    def block(self) -> Any:
        return self.model(1).blocks[0]

    def block_inputs(self) -> tuple[Any, Any, Any]:
        import torch

        from tierwise.zoo.llama import rotary_tables

        shape = self.shape
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape["batch"], shape["seq"], shape["hidden"], generator=generator).to(self.device, self.dtype).requires_grad_()
        return (x, *rotary_tables(shape["seq"], shape["hidden"] // shape["heads"], 10_000.0, like=x))

    def measure(self, forward: Callable[..., Any], steps: int) -> dict[str, Any]:
        import torch

        from tierwise.zoo.llama import rotary_tables
        from tierwise.zoo.parts import mean_cross_entropy

        model = self.model(self.shape["layers"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.cuda)
        tokens = torch.randint(self.shape["vocab"], (self.shape["batch"], self.shape["seq"]), device=self.device)
        tail = torch.compile(lambda x: mean_cross_entropy(model.head(model.norm(x)), tokens), dynamic=False)

        def step() -> Any:
            x = model.embedding(tokens)
            cos, sin = rotary_tables(tokens.shape[1], model.head_width, model.rotary_base, like=x)
            for block in model.blocks:
                x = forward(block, x, cos, sin)
            loss = tail(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        start = time.perf_counter()
        step()
        self.wait()
        first_seconds = time.perf_counter() - start
        for _ in range(WARM_UPS - 1):
            step()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        taken = []
        for _ in range(steps):
            self.wait()
            start = time.perf_counter()
            loss = step()
            self.wait()
            taken.append(time.perf_counter() - start)
        return {
            "step_ms": statistics.median(taken) * 1e3,
            "peak": torch.cuda.max_memory_allocated() / 1e9 if self.cuda else None,
            "reserved": torch.cuda.max_memory_reserved() / 1e9 if self.cuda else None,
            "first_seconds": first_seconds,
            "loss": float(loss),
        }

    def gradients(self, forward: Callable[..., Any]) -> list[Any]:
        """Of two layers, with deterministic algorithms, on the host."""
        import torch

        torch.use_deterministic_algorithms(True)
        try:
            blocks = self.model(2).blocks
            x, cos, sin = self.block_inputs()
            y = x
            for block in blocks:
                y = forward(block, y, cos, sin)
            (y.float() * torch.linspace(0.5, 1.5, y.shape[-1], device=y.device)).square().mean().backward()
            return [y.detach().cpu(), x.grad.cpu(), *(parameter.grad.cpu() for parameter in blocks.parameters())]
        finally:
            torch.use_deterministic_algorithms(False)

    def saved_bytes(self, forward: Callable[..., Any]) -> int:
        """Bytes of the storages one layer saves, less those of its inputs, parameters and result."""
        import torch

        block, inputs = self.block(), self.block_inputs()
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor):
            result = forward(block, *inputs)
        known = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *block.parameters(), result)}
        return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in saved) if s.data_ptr() not in known}.values())

    def wait(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Nothing of one way stays in memory for the next."""
        import torch

        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            if torch.cuda.memory_allocated() > 1e9:
                print(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB are still allocated: the next peak is that much too high", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-bits", action="store_true")
    for field, size in SHAPE.items():
        parser.add_argument(f"--{field}", type=int, default=size)
    given = parser.parse_args()
    run(device=given.device, steps=given.steps, bits=not given.no_bits, **{field: getattr(given, field) for field in SHAPE})
