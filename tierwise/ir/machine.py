"""The hardware as data: tiers that hold bytes, links that move them, processors that work in a tier.

A link names the lanes its traffic occupies and the rate at which it passes through each. Two links that share a lane take turns on it; a
copy through several lanes (SSD traffic over PCIe, disk through a bounce buffer) runs at its slowest lane and holds each lane only for its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import MissingTier


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    capacity_bytes: int
    within: str = ""  # "pinned" lies within "dram": its bytes count in both


@dataclass(frozen=True, slots=True)
class Link:
    src: str
    dst: str
    lanes: Mapping[str, float]  # lane name -> bytes per second of this link's traffic on it
    latency_seconds: float = 0.0
    staging_tier: str = ""  # a bounce buffer, held for the whole step by a schedule that uses the link
    staging_bytes: int = 0
    fault_seconds: float = 0.0  # what serving page faults costs on top, for each `fault_bytes` or part of them
    fault_bytes: int = 0  # what one round of faults brings; 0: all at once
    compute_share: float = 0.0  # of the time that a copy takes, so much compute beside it is longer: both draw power, and use the device's memory
    codecs: Mapping[str, float] = field(default_factory=dict)  # its engine encodes or decodes on the way, so many plain bytes a second

    @property
    def bytes_per_second(self) -> float:
        return min(self.lanes.values())

    def faults_seconds(self, nbytes: int) -> float:
        """What a copy costs on top if the device faults its way through it."""
        rounds = -(-nbytes // self.fault_bytes) if self.fault_bytes else 1
        return self.fault_seconds * rounds


@dataclass(frozen=True, slots=True)
class Processor:
    name: str
    tier: str  # "gpu" works in "hbm", "cpu" in "dram" and in tiers within it
    flops_per_second: Mapping[str, float] = field(default_factory=dict)  # by precision, sustained
    bytes_per_second: float = 0.0  # its own memory bandwidth, sustained
    launch_seconds: float = 0.0  # the least an op costs
    library_bytes: int = 0  # what its libraries take from the allocator for themselves, such as cuBLAS's workspace


@dataclass(frozen=True)
class Machine:
    """The first processor is the device; its tier is what a budget caps."""

    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    processors: tuple[Processor, ...]
    source: str = ""  # "measured ..." or "data sheet ...": where the numbers come from

    @property
    def device(self) -> Processor:
        return self.processors[0]

    @cached_property
    def tier_named(self) -> dict[str, Tier]:
        return {tier.name: tier for tier in self.tiers}

    @cached_property
    def processor_named(self) -> dict[str, Processor]:
        return {processor.name: processor for processor in self.processors}

    @cached_property
    def link_between(self) -> dict[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links}

    @cached_property
    def enclosing(self) -> dict[str, tuple[str, ...]]:
        """For each tier, itself and the tiers it lies within: all of them are charged."""
        found = {}
        for tier in self.tiers:
            chain = [tier.name]
            while (outer := self.tier_named[chain[-1]].within) and outer not in chain:
                chain.append(outer)
            found[tier.name] = tuple(chain)
        return found

    def reachable(self, processor: str) -> tuple[str, ...]:
        """The tiers a processor can work in: its own, and those within it."""
        home = self.processor_named[processor].tier
        return tuple(name for name, chain in self.enclosing.items() if home in chain)

    def link(self, src: str, dst: str) -> Link:
        try:
            return self.link_between[src, dst]
        except KeyError:
            raise MissingTier(f"machine {self.name} has no link from {src!r} to {dst!r}; it has "
                              f"{', '.join(f'{link.src}->{link.dst}' for link in self.links) or 'none'}") from None  # fmt: skip

    def with_rates(self, rate_of: Callable[[Link, str, float], float]) -> Machine:
        """The same with other rates: rate_of(link, lane, rate) for each lane of each link."""
        links = (replace(link, lanes={lane: rate_of(link, lane, rate) for lane, rate in link.lanes.items()}) for link in self.links)
        return replace(self, links=tuple(links))

    def copy_seconds(self, nbytes: int, src: str, dst: str) -> float:
        link = self.link(src, dst)
        return link.latency_seconds + nbytes / link.bytes_per_second

    def capacity(self, tier: str) -> int:
        try:
            return self.tier_named[tier].capacity_bytes
        except KeyError:
            raise MissingTier(f"machine {self.name} has no tier {tier!r}; it has {', '.join(self.tier_named)}") from None

    def with_capacity(self, tier: str, capacity_bytes: int) -> Machine:
        """The same machine with a smaller or larger tier: how a budget is said."""
        self.capacity(tier)
        return replace(self, tiers=tuple(replace(t, capacity_bytes=capacity_bytes) if t.name == tier else t for t in self.tiers))

    def issuer(self, src: str, dst: str) -> str:
        """The processor a copy is issued behind: the earliest-listed one (the device first) that works at either end."""
        for processor in self.processors:
            if processor.tier in self.enclosing[src] or processor.tier in self.enclosing[dst]:
                return processor.name
        return self.device.name

    def works_in(self, tier: str) -> str | None:
        """The processor that works in a tier, the device first; None where bytes only lie."""
        return next((processor.name for processor in self.processors if processor.tier in self.enclosing[tier]), None)
