"""What a policy is asked: this graph, on this machine, at these costs. The budget is the capacity of the device's tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .graph import Graph
from .machine import Machine


@dataclass(frozen=True, slots=True)
class Codec:
    """A form in which storages can be held or moved that is smaller than what ops read."""

    name: str
    encoded_bytes: Mapping[int, int]  # by storage; what is missing has no such form
    encode_bytes_per_second: Mapping[str, float] = field(default_factory=dict)  # of plain bytes, by processor; what is missing cannot do it
    decode_bytes_per_second: Mapping[str, float] = field(default_factory=dict)  # empty: never decoded, only read by variants of ops
    lossy: bool = False  # what is decoded is not bit for bit what was encoded


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to run an op, to the same result: a kernel with another scratch, or one that reads something else."""

    op: int
    name: str
    seconds: Mapping[str, float]  # by processor
    workspace_bytes: int = 0
    reads: tuple[int, ...] | None = None  # instead of what the op reads; None: the same
    forms: Mapping[int, str] = field(default_factory=dict)  # of what it reads, the storages it takes encoded, and how


@dataclass(frozen=True)
class Costs:
    """Seconds of an op on a processor; a processor that is missing cannot run the op. And what else there is to choose from."""

    op_seconds: Mapping[tuple[int, str], float]
    codecs: tuple[Codec, ...] = ()
    variants: tuple[Variant, ...] = ()

    def slowed(self, factor: float, *processors: str) -> Costs:
        """With ops that take so many times as long on these processors."""
        return replace(self, op_seconds={key: factor * cost if key[1] in processors else cost for key, cost in self.op_seconds.items()})

    @cached_property
    def codec_named(self) -> dict[str, Codec]:
        return {codec.name: codec for codec in self.codecs}

    @cached_property
    def variant_of(self) -> dict[tuple[int, str], Variant]:
        return {(variant.op, variant.name): variant for variant in self.variants}


@dataclass(frozen=True)
class Problem:
    graph: Graph
    machine: Machine
    costs: Costs
    cyclic: bool = True  # steps follow each other; False is one cold step, as in a trace

    @property
    def budget_bytes(self) -> int:
        return self.machine.capacity(self.machine.device.tier)

    @property
    def device_tier(self) -> str:
        return self.machine.device.tier

    @cached_property
    def device_seconds(self) -> tuple[float, ...]:
        """Seconds of each op on the device; an op only another processor can run costs 0 of the device's time."""
        device = self.machine.device.name
        return tuple(self.costs.op_seconds.get((op.id, device), 0.0) for op in self.graph.ops)

    @cached_property
    def op_starts(self) -> tuple[float, ...]:
        """When each op would start if all ran in order on the device with every byte there; one more entry, the end."""
        starts = [0.0]
        for seconds in self.device_seconds:
            starts.append(starts[-1] + seconds)
        return tuple(starts)

    def seconds(self, op: int, processor: str, variant: str = "") -> float:
        return self.costs.variant_of[op, variant].seconds[processor] if variant else self.costs.op_seconds[op, processor]

    def form_bytes(self, storage: int, form: str = "") -> int:
        """What a storage takes in a form; KeyError where it has none."""
        return self.costs.codec_named[form].encoded_bytes[storage] if form else self.graph.storages[storage].nbytes

    def coding_seconds(self, storage: int, src_form: str, dst_form: str, processor: str) -> float:
        """To encode a storage or decode it in place; KeyError where the processor cannot."""
        codec = self.costs.codec_named[src_form or dst_form]
        rates = codec.decode_bytes_per_second if src_form else codec.encode_bytes_per_second
        return self.machine.processor_named[processor].launch_seconds + self.graph.storages[storage].nbytes / rates[processor]

    def with_budget(self, budget_bytes: int) -> Problem:
        return replace(self, machine=self.machine.with_capacity(self.device_tier, budget_bytes))
