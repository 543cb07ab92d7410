"""A captured model's step measured on the device that is here: its blocks, its other ops and its update, each timed once; then its costs.

Nothing of the model needs to fit: a block, a few copies of it, and what a call of it makes are on the device at a time.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadInput
from .ir import Graph, Machine, Op, Phase, Problem, Region
from .profile.cache import TimingCache, cache_folder
from .profile.roofline import SMALL_SHARE, region_shares
from .profile.step import BlockTimes, Part, StepTimes, measured_costs, parts_of
from .profile.taken import Taken
from .units import format_bytes

if TYPE_CHECKING:
    from .pipeline import CapturedModel, CompiledStep

Progress = Callable[[str], None]
MOST_LAYERS = 8  # that run one behind the other
SAME_CARD = 0.1  # two cards whose memory differs by more are not the same
MOST_LAUNCHES = 800  # of ops in a row: beyond about a thousand a GPU's queue is full, and the host waits
MEMORY_SHARE, MOST_BYTES = 0.4, 8 << 30  # of the device's free memory, and at most, for the layers and what they make


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    problem: Problem
    parts: tuple[Part, ...]  # in no order
    notes: tuple[str, ...]  # of what could not be timed, and why


def measure_step(
    model: CapturedModel,
    machine: Machine,
    *,
    compiled: CompiledStep | None = None,
    optimizer: str = "adamw",
    masters: str | None = None,
    every_op: bool = True,
    device: Any = None,
    cache: Path | None = None,
    progress: Progress = lambda what: None,
) -> MeasuredStep:
    """The step with its measured costs, eager or with the blocks of `compiled` compiled.

    every_op  time the ops inside blocks too, which says how a block's time is shared among them; a plan made op by op wants to know
    device    a torch.device; the GPU if it is not given
    cache     a folder for what was measured; the user's own if it is not given
    """
    import torch

    device = torch.device(device) if device is not None else gpu(machine)
    folder = cache or cache_folder()
    graph = model.graph if compiled is None else compiled.coarse.graph
    members = None if compiled is None else compiled.coarse.members
    with _tidy(device):
        blocks = _Blocks(model, machine, device, folder / "blocks.json", progress)
        times = StepTimes(
            eager=blocks.times(_classes(graph, macro=False), compile=False),
            compiled=blocks.times(_classes(graph, macro=True), compile=True),
            ops=_op_times(model, graph, members, blocks.failed, every_op, device, folder / "ops.json", progress),
            update=_update(model, optimizer, masters, device, progress),
            autograd=_autograd(device),
        )
    parts = parts_of(graph, machine, times)
    return MeasuredStep(Problem(graph, machine, measured_costs(graph, machine, times, parts)), tuple(parts), tuple(blocks.notes))


def gpu(machine: Machine | None = None) -> Any:
    """The GPU of this machine, which is the one that `machine` describes."""
    import torch

    if not torch.cuda.is_available():
        raise BadInput("there is no GPU here to measure on; leave --measure out for a roofline, or run this on the machine it is about")
    device = torch.device("cuda", torch.cuda.current_device())
    if machine is not None:
        here, said = torch.cuda.get_device_properties(device).total_memory, machine.capacity(machine.device.tier)
        if abs(here - said) > SAME_CARD * said:
            raise BadInput(
                f"the GPU here is a {torch.cuda.get_device_name(device)} with {format_bytes(here)}, and {machine.name} has {format_bytes(said)}: "
                f"what is measured here says nothing about it; name this machine, or write its file with tierwise machine --probe -o machine.json"
            )
    return device


def _classes(graph: Graph, *, macro: bool) -> list[Region]:
    """Region classes that have macro-ops in the graph, or ops of their own."""
    found = {graph.calls[op.region].region for op in graph.ops if op.region >= 0 and op.kind.startswith("region_") == macro}
    return [region for region in graph.regions if region.id in found]


class _Blocks:
    """Times of region classes, each made real, run and forgotten."""

    def __init__(self, model: CapturedModel, machine: Machine, device: Any, cache: Path, progress: Progress) -> None:
        self.model, self.device, self.progress = model, device, progress
        self.remembered = TimingCache(cache)
        self.failed: set[int] = set()
        self.notes: list[str] = []
        self.shares = region_shares(model.graph, machine)

    @cached_property
    def examples(self) -> dict[int, Any]:
        from .capture import region_examples

        made = self.model.made
        with region_examples(made.model, made.batch, self.model.graph, autocast=made.autocast) as examples:
            return dict(examples)

    def times(self, regions: list[Region], *, compile: bool) -> dict[int, BlockTimes]:
        found = {}
        for done, region in enumerate(regions, start=1):
            key = self._key(region, compile)
            if key not in self.remembered:
                self.progress(f"timing {'compiled ' if compile else ''}{region.example} ({done} of {len(regions)} kinds)")
                taken = self._timed(region, compile)
                if taken is None:
                    self.failed.add(region.id)
                    continue
                self.remembered[key] = (*_numbers(taken.forward), *_numbers(taken.backward))
                self.remembered.save()
            a, b, c, d = self.remembered[key]
            found[region.id] = BlockTimes(Taken(a, b), Taken(c, d))
        return found

    def _key(self, region: Region, compile: bool) -> str:
        import torch

        from .profile.ops import device_name

        graph = self.model.graph
        storages = graph.storages
        shape = [
            (op.kind, op.phase, op.flops, op.precision, [storages[s].nbytes for s in op.reads], [storages[s].nbytes for s in op.writes])
            for op in self._ops(region)
        ]
        digest = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        how = "compiled" if compile else "eager"
        return f"{how} {region.kind} {digest}, autocast {self.model.made.autocast}, on {device_name(self.device)}, torch {torch.__version__}"

    def _ops(self, region: Region) -> list[Op]:
        """Of the first call."""
        graph = self.model.graph
        call = next(call.id for call in graph.calls if call.region == region.id)
        return [op for op in graph.ops if op.region == call]

    def _timed(self, region: Region, compile: bool) -> BlockTimes | None:
        import torch

        count = self._layers(region)
        while True:
            try:
                return self._run(region, count, compile)
            except torch.OutOfMemoryError as error:
                if count == 1:
                    self.notes.append(f"{region.example} ({region.kind}) does not fit the device by itself and keeps its roofline: {_first(error)}")
                    return None
                count = 1
            except Exception as error:
                self.notes.append(f"{region.example} ({region.kind}) could not be run by itself, so its ops are timed one by one: {_first(error)}")
                return None
            finally:
                _let_go(self.device, collect=compile)  # compiled modules hold themselves

    def _run(self, region: Region, count: int, compile: bool) -> BlockTimes:
        import torch
        from torch.utils._pytree import tree_leaves

        from .capture.materialise import materialise
        from .profile.blocks import block_times

        layers = [materialise(self.examples[region.id], self.device) for _ in range(count)]
        if compile:
            for layer in layers:
                layer.module.forward = torch.compile(layer.module.forward, dynamic=False)  # type: ignore[method-assign]
        dtype = self.model.made.autocast
        kind = self.device.type

        def call(layer: Any) -> Any:
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                return layer.module(*layer.args, **layer.kwargs)

        leaves = [
            t for layer in layers for t in (*layer.module.parameters(), *tree_leaves((layer.args, layer.kwargs))) if isinstance(t, torch.Tensor)
        ]
        settle = self.shares[region.id] >= SMALL_SHARE
        return block_times([lambda layer=layer: call(layer) for layer in layers], leaves, self.device, settle=settle)  # type: ignore[misc]

    def _layers(self, region: Region) -> int:
        """As many as keep the queue of a GPU from filling up, and fit."""
        graph = self.model.graph
        ops = self._ops(region)
        made = sum(graph.storages[s].nbytes for op in ops for s in op.writes)
        lasting = {s for op in ops for s in (*op.reads, *op.mutates) if graph.storages[s].lasting}
        each = made + sum(graph.storages[s].nbytes for s in lasting)
        room = int(min(MEMORY_SHARE * _free_bytes(self.device), MOST_BYTES) / max(1, each))
        return max(1, min(MOST_LAYERS, MOST_LAUNCHES // max(1, len(ops)), room))


def _op_times(
    model: CapturedModel,
    graph: Graph,
    members: tuple[tuple[int, ...], ...] | None,
    failed: set[int],
    every_op: bool,
    device: Any,
    cache: Path,
    progress: Progress,
) -> dict[int, Taken]:
    """Of the ops outside blocks, of those in blocks that could not be run, and of all if asked."""
    from .profile.ops import op_times

    recipes: dict[int, Any] = {}
    for op in graph.ops:
        fine = op.id if members is None else members[op.id][0]
        in_block = op.region >= 0 and graph.calls[op.region].region not in failed
        if fine in model.recipes and op.phase is not Phase.UPDATE and not op.kind.startswith("region_") and (every_op or not in_block):
            recipes[op.id] = model.recipes[fine]
    return op_times(recipes, device, cache=cache, progress=progress)


def _update(model: CapturedModel, optimizer: str, masters: str | None, device: Any, progress: Progress) -> Taken | None:
    from .profile.updates import update_times

    if masters is not None:
        return None
    progress("timing the update")
    trained = [parameter for parameter in model.made.model.parameters() if parameter.requires_grad]
    try:
        return update_times(optimizer, [(tuple(parameter.shape), parameter.dtype) for parameter in trained], device)
    finally:
        _let_go(device)


def _autograd(device: Any) -> tuple[float, float]:
    from .profile.ops import autograd_host_seconds

    return autograd_host_seconds(device)


def _numbers(taken: Taken) -> tuple[float, float]:
    return taken.device_seconds, taken.host_seconds


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no reason given').strip().splitlines()[0]}"


def _free_bytes(device: Any) -> float:
    from .profile.updates import free_bytes

    return free_bytes(device)


@contextmanager
def _tidy(device: Any) -> Iterator[None]:
    """Random numbers drawn inside are not missed outside, and no memory stays."""
    from .profile.sustained import random_state_kept

    with random_state_kept(device):
        yield
    _let_go(device)


def _let_go(device: Any, *, collect: bool = True) -> None:
    import torch

    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def by_name(parts: tuple[Part, ...]) -> Mapping[str, Mapping[Phase, tuple[int, Taken]]]:
    """How many parts there are of each name and phase, and what they take together, without the waits."""
    found: dict[str, dict[Phase, tuple[int, Taken]]] = {}
    for part in parts:
        count, taken = found.setdefault(part.name, {}).get(part.phase, (0, Taken(0.0, 0.0)))
        together = Taken(taken.device_seconds + part.taken.device_seconds, taken.host_seconds + part.taken.host_seconds)
        found[part.name][part.phase] = (count + 1, together)
    return found
