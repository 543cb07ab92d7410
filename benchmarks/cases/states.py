"""Lasting state away from the device: a Llama-shaped model of 3.2B, 8 × 2048 tokens, fp32 masters and moments, against everything on the device.

Five parts, each with a file: eager with checkpointing, the peers' setting, updates in backward; after it, with clipping, eager and compiled; with
compiled blocks; a model of 7B; and state on disk. Head and loss in pieces of one sequence, in every row of ours. One process for rows of one kind,
since locking host memory takes longer than the steps; printed as they come. `ratio` is to "everything on the device" with the same compute; "bits":
whether losses equal that row's, which they need not in the last digits: attention's gradients are not the same twice. What differs by more is wrong.
"State alone": placed by hand, every block checkpointed, beside plans of both in one budget; activations alone fit into none of these.

    python -m benchmarks states:compiled --machine h200
    python -m benchmarks.cases.states eager --machine h200 --cap --peers DIR   # with the rows of DIR/states.py, one process each
    python -m benchmarks.cases.states compiled --ways "state alone, 16 GB" --cpu-share 0.6 --threads 14
    python -m benchmarks.cases.states eager --device cpu --layers 2 --hidden 32 --heads 2 --batch 2 --seq 16 --vocab 64 --steps 1
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.processes import Process

NEEDS = "cuda"
BASELINE = "everything on the device"
SHAPE = {"layers": 26, "hidden": 3072, "heads": 24, "batch": 8, "seq": 2048, "vocab": 32000}
LARGE = {"layers": 32, "hidden": 4096, "heads": 32, "batch": 4, "seq": 2048, "vocab": 32000}
PARTS = ("eager", "after", "compiled", "7b", "disk")
PEERS = ("gpu", "torchao", "fsdp2", "zero2", "zero3")
WARM_UPS = 2
NOISE = 0.01  # of a loss: what attention, and blocks compiled in other ways, may come to
MOST_WARM_UPS = 32  # of rows by fit: by then a plan is not made again with what was measured any more
GB = 10**9
DISK_BYTES = 60 * GB  # that state on disk may take: it is about 38


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
    def part(self) -> str:
        if self.state == "nvme":
            return "disk"
        return "7b" if self.shape == "7B" else "after" if self.clip else "compiled" if self.compiled else "eager"

    @property
    def case(self) -> str:
        clip = ", clipped" if self.clip else ""
        return f"llama-{self.shape}, {'compiled blocks' if self.compiled else 'eager'}, checkpointing{clip}"


def ways() -> list[Way]:
    found = [Way(BASELINE, None, "after", clip, on_device=1.0, compiled=compiled) for compiled in (False, True) for clip in (False, True)]
    found += [Way(f"fit, {budget} GB", budget * GB, fitted=True) for budget in (16, 10, 6)]
    found += [Way("fit, after, 16 GB", 16 * GB, "after", True, compiled=compiled, fitted=True) for compiled in (False, True)]
    found += [Way(f"fit, {budget} GB", budget * GB, compiled=True, fitted=True) for budget in (24, 16, 12, 8)]
    found += [
        Way(f"state alone, {budget} GB", budget * GB, on_device=kept, away=away, compiled=True)
        for budget, kept, away in ((24, 0.2, 0.0), (16, 0.0, 0.0), (12, 0.0, 0.5), (8, 0.0, 1.0))
    ]
    large = [
        Way(BASELINE, None, "after", on_device=1.0),
        Way("fit, 40 GB", 40 * GB, fitted=True),
        Way("fit, 24 GiB", 24 << 30, fitted=True),
        Way("state alone, 40 GB", 40 * GB, on_device=0.15),
        Way("state alone, 24 GiB", 24 << 30, away=0.4),
    ]
    found += [replace(way, shape="7B") for way in large]
    disk = Way("fit, 6 GB, state on disk", 6 * GB, state="nvme", host_bytes=8 << 30, fitted=True)
    return [*found, disk, replace(disk, name="6 GB, state on disk", away=1.0, cpu_share=1.0, fitted=False)]


def run(
    part: str, *, peers: Path | None = None, only_peers: Sequence[str] = PEERS, only: list[str] | None = None, child: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a part as they come."""
    rows: list[dict[str, Any]] = []
    cases = {way.case for way in ways() if way.part == part and (only is None or way.name in only)}
    groups: dict[bool, list[int]] = {}
    for number, way in enumerate(ways()):
        if way.part == part and way.case in cases and (only is None or way.name in only or way.name == BASELINE):
            groups.setdefault(way.fitted, []).append(number)
    for numbers in groups.values():
        wanted = ",".join(map(str, numbers))
        for number, found in _in_a_process([sys.executable, "-m", "benchmarks.cases.states", "--rows", wanted, *(child or [])], numbers):
            way = ways()[number]
            row = {"case": way.case, "way": way.name, "budget_bytes": way.budget_bytes} | found
            rows.append(row)
            expected = next((other for other in rows if other["case"] == way.case and other["way"] == BASELINE), {})
            row["bits"] = _bits(row["losses"], expected["losses"]) if "losses" in row and "losses" in expected else None
            print(json.dumps(row), flush=True)
            yield row
    for name in only_peers if peers is not None and part in ("eager", "after") else ():
        ((_, found),) = _in_a_process([sys.executable, str(peers / "states.py"), name], [-1])
        row = {"case": "llama-3.2B, eager, checkpointing, as peers run it", "way": name, "seconds": found.get("step_ms", 0) / 1e3 or None}
        row |= {"peak_bytes": int(found["peak_GB"] * GB)} if "peak_GB" in found else {"outcome": found.get("outcome")}
        rows.append(row | {"host_bytes": int(found.get("host_GB", 0) * GB) or None})
        print(json.dumps(rows[-1]), flush=True)
        yield rows[-1]


def _in_a_process(command: list[str], numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by number as the process says them; those it did not say have an outcome instead."""
    process, left = Process(command, "RES"), list(numbers)
    for found in process:
        number = found.pop("number", left[0])
        left.remove(number)
        yield number, found
    if left:
        print(process.talk[-3000:], file=sys.stderr)
    lines = [line for line in process.talk.splitlines() if line.strip()] or ["no output"]
    for number in left:
        yield number, {"outcome": f"exit {process.code}: {lines[-1][:200]}"}


def _bits(losses: Sequence[float], expected: Sequence[float]) -> str:
    near = all(abs(loss / other - 1) < NOISE for loss, other in zip(losses, expected, strict=True))
    return "equal" if losses == expected else "differ" if near else "WRONG"


# -- rows, in their own process -------------------------------------------------------------------------------------------------------------


def fitted_row(way: Way, given: argparse.Namespace, device: Any) -> dict[str, Any]:
    """The same step under `fit`: what is recomputed, sent and updated where is its decision."""
    import torch

    import tierwise
    from tierwise.fitting import fitted_of
    from tierwise.fitting.feedback import with_cpu

    shape = {name: getattr(given, name) or size for name, size in (LARGE if way.shape == "7B" else SHAPE).items()}
    llama = _model(shape, given.device, compiled=False)
    llama.gradient_checkpointing_disable()

    model = _with_loss(llama)
    tokens = _tokens(shape, device)
    _untouched(model, model, tokens)
    baseline_bytes = _resident_bytes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start = time.perf_counter()
    budget = way.budget_bytes if given.budget is None else given.budget
    stages: dict[str, str] = {}  # what began when, for readers of the file
    disk = f"{given.nvme or tempfile.gettempdir()}:{DISK_BYTES}" if way.state == "nvme" else None
    tierwise.fit(
        model, optimizer, budget=budget, masters="fp32", update=way.update, compile=way.compiled, device=device, example=(tokens,),
        host=way.host_bytes, nvme=disk, progress=lambda what: stages.update({f"{time.perf_counter() - start:.1f} s": what}),
    )  # fmt: skip
    ready_seconds, first = time.perf_counter() - start, tierwise.plan_of(model)
    if given.cap and budget:
        device.cap(budget)

    def settle() -> None:
        states = fitted_of(model).lasting.states
        if states is not None:
            states.flush()
        device.synchronize()

    step = _stepping(lambda: model(tokens), model, optimizer, way)
    fitted = fitted_of(model)
    moved = {"written_bytes": lambda: fitted.below.disk_written_bytes, "read_bytes": lambda: fitted.below.disk_read_bytes}
    is_warm = (lambda: True) if way.state == "nvme" else lambda: fitted.is_settled
    timed = _timed(step, device, settle, given, moved, is_warm, lambda: tierwise.plan_of(model))
    plan, on_cpu = tierwise.plan_of(model), fitted.meter.cpu_seconds()

    found = timed | {
        "waits": _waits(plan, step, fitted) if way.state != "nvme" else None,
        "planned_nvme_bytes": plan.held_bytes.get("nvme") or None,
        "predicted_seconds": plan.predicted.seconds,  # with what was measured, where steps took something else
        "first_predicted_seconds": first.predicted.seconds,  # before any step
        "predicted_bytes": plan.predicted_bytes,
        "bound_seconds": fitted.least_seconds(plan.menu),
        "bound_as_had_seconds": fitted.least_seconds(with_cpu(plan.menu, on_cpu / plan.predicted.busy_seconds()["cpu"])) if on_cpu else None,
        "cpu_seconds": on_cpu,  # of each of the last steps
        "host_bytes": _resident_bytes() - baseline_bytes,
        "planned_host_bytes": plan.host_bytes,
        "ready_seconds": ready_seconds,
        "tokens_per_second": tokens.numel() / timed["seconds"],
        "corrections": plan.corrections,
        "words": "; ".join(plan.words()),
        "stages": stages,
    }
    device.cap(None)
    tierwise.release(model)
    return found | (_of_the_disk(found, given) if found["written_bytes"] else {})


class _Room:
    """Host memory that rows of one process use one after the other: as much as the largest so far."""

    def __init__(self, device: Any) -> None:
        self._device, self.pool = device, None
        self.baseline_bytes = 0  # of the process, before the first row placed anything

    def of(self, nbytes: int) -> Any:
        from tierwise.execute.host_pool import HostPool

        if self.pool is None or self.pool.nbytes < nbytes:
            before, self.pool = self.pool, None
            if before is not None:
                before.close()
                del before
                gc.collect()  # the room for this one was its
            self.pool = HostPool(nbytes, self._device)
        return self.pool


def rows(numbers: list[int], given: argparse.Namespace) -> None:
    import torch

    from tierwise.execute.device import CudaDevice, Device
    from tierwise.execute.null_device import NullDevice

    device: Device = CudaDevice() if given.device == "cuda" else NullDevice(8 << 30)
    room = _Room(device)
    for number in numbers:
        way = ways()[number]
        try:
            found = fitted_row(way, given, device) if way.fitted else placed_row(way, given, device, room)
        except Exception as error:
            found = {"outcome": f"{type(error).__name__}: {error}"[:300]}
            traceback.print_exc()
        device.cap(None)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
        print("RES", json.dumps({"number": number} | found), flush=True)


def placed_row(way: Way, given: argparse.Namespace, device: Any, room: _Room) -> dict[str, Any]:
    import torch

    from tierwise.execute.nvme import NvmeStore
    from tierwise.execute.states.passes import HostRate, best_host
    from tierwise.execute.states.states import States

    shape = {name: getattr(given, name) or size for name, size in (LARGE if way.shape == "7B" else SHAPE).items()}
    host = HostRate(given.threads or 1, None, 0.0) if given.threads or way.on_device >= 1 else best_host()
    model = _model(shape, given.device, compiled=way.compiled)
    tokens = _tokens(shape, device)
    if not room.baseline_bytes:
        _untouched(model, lambda some: _loss(model, some), tokens)
        room.baseline_bytes = _resident_bytes()  # libraries, and whatever else was there before anything was placed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    share = way.cpu_share if given.cpu_share is None else given.cpu_share
    states = States(
        model, optimizer, placements(way, shape["layers"], share), device, update=way.update, masters="fp32", threads=host.threads, cpus=host.cpus
    )
    needs = states.needs()
    pool = room.of(max(1, needs.host_bytes + (64 << 20) * (needs.nvme_bytes > 0)))
    store = NvmeStore(given.nvme or tempfile.gettempdir(), needs.nvme_bytes, pool) if needs.nvme_bytes else None
    start = time.perf_counter()
    states.install(pool=pool, store=store)
    install_seconds = time.perf_counter() - start
    if given.cap and way.budget_bytes:
        device.cap(way.budget_bytes)

    def settle() -> None:
        states.flush()
        device.synchronize()

    moved = {} if store is None else {"written_bytes": lambda: store.bytes_written, "read_bytes": lambda: store.bytes_read}
    timed = _timed(_stepping(lambda: _loss(model, tokens), model, optimizer, way), device, settle, given, moved)
    unused = pool.nbytes - needs.host_bytes  # pages that other rows touched
    found = timed | {
        "host_bytes": _resident_bytes() - room.baseline_bytes - unused,
        "planned_host_bytes": needs.host_bytes + needs.parameter_host_bytes,
        "nvme_bytes": needs.nvme_bytes or None,
        "update_rate": host.parameters_per_second or None,
        "threads": host.threads,
        "cpu_share": share if way.on_device < 1 else None,
        "install_seconds": install_seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": tokens.numel() / timed["seconds"],
        "words": states.words(),
    }
    device.cap(None)
    states.close()
    if store is not None:
        store.close()
        found |= _of_the_disk(found, given)
    return found


def _of_the_disk(found: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """What the disk carried in these steps, against what it carries with nothing else to do, as much read as written."""
    from benchmarks.cases.disk import MEGABYTES, REQUESTS, measured

    *_, both = measured(given.nvme or tempfile.gettempdir(), (MEGABYTES if given.device == "cuda" else 1) * 10**6, REQUESTS[0])
    rate = (found["written_bytes"] + found["read_bytes"]) / found["seconds"]
    return {"disk_bytes_per_second": rate, "disk_alone_bytes_per_second": both, "of_the_disk": rate / both}


def _tokens(shape: dict[str, int], device: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape["vocab"], (shape["batch"], shape["seq"]), generator=generator).to(device.torch_device)


def _stepping(loss_of: Callable[[], Any], model: Any, optimizer: Any, way: Way) -> Callable[[], Any]:
    """One step, and its loss."""
    import torch

    def step() -> Any:
        loss = loss_of()
        loss.backward()
        if way.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _waits(plan: Any, step: Callable[[], Any], fitted: Any) -> dict[str, Any]:
    """How long calls of regions took in a step that was recorded and what compute stood still for before them, beside what was planned; in
    milliseconds, the longest first."""
    from tierwise.fitting.feedback import calls_in

    step()  # so that the recorded one meets what the one before has left to do
    fitted.record_next_step()
    step()
    step()
    ran = {name: calls_in(plan, timeline) for name, timeline in (("planned", plan.predicted), ("measured", fitted.measured))}
    taken = {
        phase: {name: round(1e3 * sum(call.seconds for call in calls if str(call.phase) == phase), 1) for name, calls in ran.items()}
        for phase in ("forward", "backward")
    }
    planned = {call.step: call.pause_seconds for call in ran["planned"]}
    longest = sorted((call for call in ran["measured"] if call.step in planned), key=lambda call: -call.pause_seconds)[:8]
    pauses = [[f"{call.module} {call.phase}", round(1e3 * planned[call.step], 1), round(1e3 * call.pause_seconds, 1)] for call in longest]
    return {"calls": taken, "before": pauses}


def _timed(
    step: Callable[[], Any], device: Any, settle: Callable[[], None], given: argparse.Namespace, counters: dict[str, Callable[[], int]],
    is_warm: Callable[[], bool] = lambda: True, plan: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Steps after warm ones, and how far counters go on in one. Steps overlap, so they are timed together, on the device's clock: from the end of
    one backward to that so many steps later, with as much left to be done for the next at either end. `settle` brings it about that nothing is.
    Once more if another `plan` was made meanwhile: that takes seconds and is no step."""
    losses = [float(step()) for _ in range(WARM_UPS)]
    warm_ups = WARM_UPS
    while not is_warm() and warm_ups < MOST_WARM_UPS:  # the loop that is timed below: what learns from it shall learn from the same
        step()
        warm_ups += 1
    if warm_ups > WARM_UPS:  # what was settled last may begin with the next
        for _ in range(WARM_UPS):
            step()
        warm_ups += WARM_UPS
    for _ in range(2):
        device.reset_peak()
        exposed, counted, by = device.exposed_seconds(), {name: count() for name, count in counters.items()}, plan()
        ends = [device.moment()]
        for _ in range(given.steps):
            step()
            ends.append(device.moment())
        ends[-1].wait()
        if plan() is by:
            break
        warm_ups += given.steps
    seconds = ends[-1].since(ends[0]) / given.steps
    memory = device.memory()
    settle()
    found = {
        "seconds": seconds,
        "each_seconds": [end.since(start) for start, end in pairwise(ends)],
        "peak_bytes": memory.peak_allocated_bytes,
        "reserved_bytes": memory.peak_reserved_bytes,
        "exposed_seconds": (device.exposed_seconds() - exposed) / given.steps,
        "warm_ups": warm_ups,
        "losses": losses,
    }
    return found | {name: ((count() - counted[name]) // given.steps) or None for name, count in counters.items()}


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


def _with_loss(llama: Any) -> Any:
    """As a module whose forward is a step's."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, tokens: Any) -> Any:
            return _loss(self.llama, tokens)

    return Step().train()


def _untouched(model: Any, loss_of: Callable[[Any], Any], tokens: Any) -> None:
    """Gradients of a few tokens, for what any process that trains has: code of libraries, and what the driver keeps in host memory."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        loss_of(tokens[:1, :64]).backward()
    model.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", nargs="?", choices=PARTS, help="which part to run")
    parser.add_argument("--machine", help="what to call this machine; without it nothing is written")
    parser.add_argument("--peers", type=Path, help="a folder with states.py, which runs what people use today")
    parser.add_argument("--only-peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--ways", nargs="*", help="only these rows, and those they are compared with")
    parser.add_argument("--rows", help="numbers of rows, to run here and print")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10)  # what the last one leaves to be done is counted too
    parser.add_argument("--threads", type=int, help="of the host, for updates; measured if not given")
    parser.add_argument("--cpu-share", type=float, help="of the layers that are not on the device, updated on the cpu; the others are streamed")
    parser.add_argument("--nvme", help="a directory for state on disk")
    parser.add_argument("--budget", type=int, help="bytes, for rows by fit, instead of their own")
    parser.add_argument("--cap", action="store_true", help="hold the budget: allocations beyond it fail")
    for field in SHAPE:
        parser.add_argument(f"--{field}", type=int)
    given = parser.parse_args()
    if given.rows is not None:
        rows([int(number) for number in given.rows.split(",")], given)
        sys.stdout.flush()
        os._exit(0)  # a card is given back faster than tensors
    child = [f"--device={given.device}", f"--steps={given.steps}"] + ["--cap"] * given.cap
    for name in ("threads", "cpu_share", "nvme", "budget", *SHAPE):
        if getattr(given, name) is not None:
            child.append(f"--{name.replace('_', '-')}={getattr(given, name)}")
    if given.part is None:
        parser.error(f"name a part: {', '.join(PARTS)}")
    found = run(given.part, peers=given.peers, only_peers=given.only_peers, only=given.ways, child=child)
    if given.machine:
        command = "python -m benchmarks.cases.states " + shlex.join(sys.argv[1:])
        print("wrote", results.write_as_they_come(f"states-{given.part}", found, machine=given.machine, command=command, baseline=BASELINE))
    else:
        list(found)  # printed as they come


if __name__ == "__main__":
    main()
