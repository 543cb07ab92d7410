"""Lasting state away from the device: a Llama-shaped model of 3.2B, 8 × 2048 tokens, fp32 masters and moments, against everything on the device.

Eager with checkpointing, as the peers' setting, and with compiled blocks; head and loss in pieces of one sequence, in every row of ours. One
process for each row, printed as it comes. `ratio` is to "everything on the device" with the same compute; "bits": whether losses equal that row's.

    python -m benchmarks states --machine h200
    python -m benchmarks.cases.states --machine h200 --peers DIR            # with the rows of DIR/states.py, one process each
    python -m benchmarks.cases.states --ways "backward 16 GB" --cpu-share 0.6 --threads 14
    python -m benchmarks.cases.states --device cpu --layers 2 --hidden 32 --heads 2 --batch 2 --seq 16 --vocab 64 --steps 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDS = "cuda"
BASELINE = "everything on the device"
SHAPE = {"layers": 26, "hidden": 3072, "heads": 24, "batch": 8, "seq": 2048, "vocab": 32000}
LARGE = {"layers": 32, "hidden": 4096, "heads": 32, "batch": 4, "seq": 2048, "vocab": 32000}
PEERS = ("gpu", "torchao", "fsdp2", "zero2", "zero3")
WARM_UPS = 2
GB = 10**9


@dataclass(frozen=True)
class Way:
    """Which layers live where. Layers are dealt out evenly: so many on the device, the others to the cpu and to the link by `cpu_share`."""

    name: str
    budget_bytes: int | None
    update: str = "backward"
    clip: bool = False
    on_device: float = 0.0  # share of the layers whose state stays: the first ones, which the next forward needs first
    away: float = 0.0  # share of the layers whose parameters live in host memory
    state: str = "host"
    cpu_share: float = 0.5
    compiled: bool = False
    shape: str = "3.2B"
    host_bytes: int | None = None
    fitted: bool = False  # by tierwise.fit, which decides all of it from the budget

    @property
    def case(self) -> str:
        clip = ", clipped" if self.clip else ""
        return f"llama-{self.shape}, {'compiled blocks' if self.compiled else 'eager'}, checkpointing{clip}"


def ways() -> list[Way]:
    found = []
    for compiled in (False, True):
        for clip in (False, True):
            found.append(Way(BASELINE, None, "after", clip, on_device=1.0, compiled=compiled))
        found.append(Way("backward 16 GB", 16 * GB, compiled=compiled))
        found.append(Way("after 16 GB", 16 * GB, "after", True, on_device=0.1, compiled=compiled))
    return [
        *found,
        Way("backward 10 GB", 10 * GB, away=0.6),
        Way("backward 6 GB", 6 * GB, away=1.0),
        Way("backward 6 GB, state on disk", 6 * GB, away=1.0, state="nvme", cpu_share=1.0, host_bytes=8 << 30),
        Way(BASELINE, None, "after", on_device=1.0, shape="7B"),
        Way("backward 24 GiB", 24 << 30, away=0.4, shape="7B"),
        *(Way(f"fit, {budget} GB", budget * GB, fitted=True) for budget in (16, 10, 6)),
        Way("fit, after, 16 GB", 16 * GB, "after", True, fitted=True),
        Way("fit, 16 GB", 16 * GB, compiled=True, fitted=True),
        Way("fit, after, 16 GB", 16 * GB, "after", True, compiled=True, fitted=True),
        Way("fit, 24 GiB", 24 << 30, shape="7B", fitted=True),
    ]


def run(
    *, machine: str | None = None, peers: Path | None = None, only: list[str] | None = None, child: list[str] | None = None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cases = {way.case for way in ways() if only is None or way.name in only}
    for number, way in enumerate(ways()):
        if way.case in cases and (only is None or way.name in only or way.name == BASELINE):
            rows.append(_in_a_process([sys.executable, "-m", "benchmarks.cases.states", "--row", str(number), *(child or [])]))
            rows[-1] = {"case": way.case, "way": way.name, "budget_bytes": way.budget_bytes} | rows[-1]
            expected = next((row for row in rows if row["case"] == way.case and row["way"] == BASELINE), rows[-1])
            rows[-1]["bits"] = None if "losses" not in rows[-1] else "equal" if rows[-1]["losses"] == expected.get("losses") else "differ"
            print(json.dumps(rows[-1]), flush=True)
    for name in PEERS if peers is not None else ():
        found = _in_a_process([sys.executable, str(peers / "states.py"), name])
        row = {"case": "llama-3.2B, eager, checkpointing, as peers run it", "way": name, "seconds": found.get("step_ms", 0) / 1e3 or None}
        row |= {"peak_bytes": int(found["peak_GB"] * GB)} if "peak_GB" in found else {"outcome": found.get("outcome")}
        rows.append(row | {"host_bytes": int(found.get("host_GB", 0) * GB) or None})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _in_a_process(command: list[str]) -> dict[str, Any]:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | dict(os.environ)
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in result.stdout.splitlines():
        if line.startswith("RES "):
            found: dict[str, Any] = json.loads(line[4:])
            return found
    print(result.stdout[-2000:], result.stderr[-3000:], file=sys.stderr)
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no output"]
    return {"outcome": f"exit {result.returncode}: {lines[-1][:200]}"}


# -- one row, in its own process -----------------------------------------------------------------------------------------------------------


def fitted_row(way: Way, given: argparse.Namespace) -> dict[str, Any]:
    """The same step under `fit`: what is recomputed, sent and updated where is its decision."""
    import torch

    import tierwise
    from tierwise.execute.device import CudaDevice, Device
    from tierwise.execute.null_device import NullDevice
    from tierwise.fitting import fitted_of

    device: Device = CudaDevice() if given.device == "cuda" else NullDevice(8 << 30)
    shape = {name: getattr(given, name) or size for name, size in (LARGE if way.shape == "7B" else SHAPE).items()}
    llama = _model(shape, given.device, compiled=False)
    llama.gradient_checkpointing_disable()

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, tokens: Any) -> Any:
            return _loss(self.llama, tokens)

    model = Step().train()
    baseline_bytes = _resident_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = _tokens(shape, device)
    start = time.perf_counter()
    budget = way.budget_bytes if given.budget is None else given.budget
    tierwise.fit(
        model, optimizer, budget=budget, masters="fp32", update=way.update, compile=way.compiled, device=device, example=(tokens,),
        host=way.host_bytes, progress=lambda what: None,
    )  # fmt: skip
    ready_seconds = time.perf_counter() - start
    plan = tierwise.plan_of(model)
    if given.cap and budget:
        device.cap(budget)

    def settle() -> None:
        states = fitted_of(model).lasting.states
        if states is not None:
            states.flush()
        device.synchronize()

    timed, _ = _timed(lambda: model(tokens), model, optimizer, device, settle, way, given)
    return timed | {
        "predicted_seconds": plan.predicted.seconds,
        "predicted_bytes": plan.peak_bytes,
        "host_bytes": _resident_bytes() - baseline_bytes,
        "planned_host_bytes": plan.host_bytes,
        "ready_seconds": ready_seconds,
        "tokens_per_second": tokens.numel() / timed["seconds"],
        "words": "; ".join(plan.words()),
    }


def row(way: Way, given: argparse.Namespace) -> dict[str, Any]:
    if way.fitted:
        return fitted_row(way, given)
    import torch

    from tierwise.execute.device import CudaDevice, Device
    from tierwise.execute.host_pool import HostPool
    from tierwise.execute.null_device import NullDevice
    from tierwise.execute.nvme import NvmeStore
    from tierwise.execute.states.passes import HostRate, best_host
    from tierwise.execute.states.states import States

    cuda = given.device == "cuda"
    device: Device = CudaDevice() if cuda else NullDevice(8 << 30)
    shape = {name: getattr(given, name) or size for name, size in (LARGE if way.shape == "7B" else SHAPE).items()}
    host = HostRate(given.threads or 1, None, 0.0) if given.threads or way.on_device >= 1 else best_host()
    model = _model(shape, given.device, compiled=way.compiled)
    baseline_bytes = _resident_bytes()  # libraries, and whatever else was there before anything was placed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    share = way.cpu_share if given.cpu_share is None else given.cpu_share
    states = States(
        model, optimizer, placements(way, shape["layers"], share), device, update=way.update, masters="fp32", threads=host.threads, cpus=host.cpus
    )
    needs = states.needs()
    pool = HostPool(max(1, needs.host_bytes + (64 << 20) * (needs.nvme_bytes > 0)), device)
    store = NvmeStore(given.nvme or tempfile.gettempdir(), needs.nvme_bytes, pool) if needs.nvme_bytes else None
    start = time.perf_counter()
    states.install(pool=pool, store=store)
    install_seconds = time.perf_counter() - start
    if given.cap and way.budget_bytes:
        device.cap(way.budget_bytes)
    tokens = _tokens(shape, device)

    def settle() -> None:
        states.flush()
        device.synchronize()

    written = (lambda: 0) if store is None else (lambda: store.bytes_written)
    timed, written_bytes = _timed(lambda: _loss(model, tokens), model, optimizer, device, settle, way, given, written)
    found = timed | {
        "host_bytes": _resident_bytes() - baseline_bytes,
        "planned_host_bytes": needs.host_bytes + needs.parameter_host_bytes,
        "nvme_bytes": needs.nvme_bytes or None,
        "written_bytes": None if store is None else written_bytes,
        "update_rate": host.parameters_per_second or None,
        "threads": host.threads,
        "cpu_share": share if way.on_device < 1 else None,
        "install_seconds": install_seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": tokens.numel() / timed["seconds"],
        "words": states.words(),
    }
    if store is not None:
        store.close()
    return found


def _tokens(shape: dict[str, int], device: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape["vocab"], (shape["batch"], shape["seq"]), generator=generator).to(device.torch_device)


def _timed(
    loss_of: Callable[[], Any], model: Any, optimizer: Any, device: Any, settle: Callable[[], None], way: Way, given: argparse.Namespace,
    counter: Callable[[], int] = lambda: 0,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Steps after warm ones, and how far a counter goes on in one. Steps overlap, so they are timed together: from one moment when nothing is
    pending, which `settle` brings about, to the next."""
    import torch

    def step() -> Any:
        loss = loss_of()
        loss.backward()
        if way.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [float(step()) for _ in range(WARM_UPS)]
    settle()
    device.reset_peak()
    exposed, counted = device.exposed_seconds(), counter()
    start = time.perf_counter()
    for _ in range(given.steps):
        loss = step()
    settle()
    seconds = (time.perf_counter() - start) / given.steps
    memory = device.memory()
    found = {
        "seconds": seconds,
        "peak_bytes": memory.peak_allocated_bytes,
        "reserved_bytes": memory.peak_reserved_bytes,
        "exposed_seconds": (device.exposed_seconds() - exposed) / given.steps,
        "losses": [*losses, float(loss)],
    }
    return found, (counter() - counted) // given.steps


def placements(way: Way, layers: int, cpu_share: float) -> dict[str, Any]:
    from tierwise.execute.states.placement import ON_DEVICE, Placement

    def dealt(share: float, count: int) -> Iterator[bool]:
        """True for that share of so many, evenly spread."""
        return (int((n + 1) * share) > int(n * share) for n in range(count))

    kept = round(way.on_device * layers)
    cpu = dealt(cpu_share, layers + 3)
    away = dealt(way.away, layers)
    found: dict[str, Any] = {}
    for path in ("model.embed_tokens", *(f"model.layers.{layer}" for layer in range(layers)), "model.norm", "lm_head"):
        layer = int(path.rpartition(".")[2]) if ".layers." in path else -1
        lives_away = next(away) if layer >= 0 else False
        if way.on_device >= 1 or 0 <= layer < kept:
            found[path] = ON_DEVICE
        elif next(cpu):
            found[path] = Placement(way.state, "cpu", "host" if lives_away else "device", "host")
        else:
            found[path] = Placement(way.state, "streamed", "host" if lives_away else "device", "device")
    return found


def _model(shape: dict[str, int], device: str, *, compiled: bool) -> Any:
    from functools import partial

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape["hidden"], intermediate_size=int(shape["hidden"] * 2.75), num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], vocab_size=shape["vocab"], use_cache=False, max_position_embeddings=shape["seq"],
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        forward = torch.compile(type(model.model.layers[0]).forward, dynamic=False)  # one for all layers
        for layer in model.model.layers:
            layer.forward = partial(forward, layer)
    return model


def _loss(model: Any, tokens: Any) -> Any:
    """Head and loss one sequence at a time, recomputed in backward: 13 bytes for each logit of one sequence, not of all."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def tail(hidden: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    hidden = model.model(input_ids=tokens).last_hidden_state
    total = sum(checkpoint(tail, hidden[n, :-1], tokens[n, 1:], use_reentrant=False) for n in range(len(tokens)))
    return total / (tokens.numel() - len(tokens))


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--machine", help="what to call this machine; without it nothing is written")
    parser.add_argument("--peers", type=Path, help="a folder with states.py, which runs what people use today")
    parser.add_argument("--ways", nargs="*", help="only these rows, and those they are compared with")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, help="of the host, for updates; measured if not given")
    parser.add_argument("--cpu-share", type=float, help="of the layers that are not on the device, updated on the cpu; the others are streamed")
    parser.add_argument("--nvme", help="a directory for state on disk")
    parser.add_argument("--budget", type=int, help="bytes, for rows by fit, instead of their own")
    parser.add_argument("--cap", action="store_true", help="hold the budget: allocations beyond it fail")
    for field in SHAPE:
        parser.add_argument(f"--{field}", type=int)
    given = parser.parse_args()
    if given.row is not None:
        print("RES", json.dumps(row(ways()[given.row], given)), flush=True)
        os._exit(0)  # a card is given back faster than tensors
    child = [f"--device={given.device}", f"--steps={given.steps}"] + ["--cap"] * given.cap
    for name in ("threads", "cpu_share", "nvme", "budget", *SHAPE):
        if getattr(given, name) is not None:
            child.append(f"--{name.replace('_', '-')}={getattr(given, name)}")
    found = run(peers=given.peers, only=given.ways, child=child)
    if given.machine:
        from benchmarks import results

        command = "python -m benchmarks.cases.states " + " ".join(sys.argv[1:])
        print("wrote", results.write("states", found, machine=given.machine, command=command, baseline=BASELINE))


if __name__ == "__main__":
    main()
