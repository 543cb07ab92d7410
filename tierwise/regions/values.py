"""The values of one region's forward and backward, in plain types: what planning code needs to choose what is saved. No torch.

A joint graph is the forward of a module call followed by its backward. Here are the values of it that do not depend on a gradient: any of them
can be handed from forward to backward (saved), and what is not saved is computed again in backward from what is. A view costs nothing and
has no bytes of its own, so what is saved is always the value that owns the bytes. The results of an op with several are values of kind PART.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from ..errors import BadFile, UnknownName

__all__ = ["Handover", "JointGraph", "JointValue", "Kind"]


class Kind(StrEnum):
    """What makes a value, as far as the cost of making it again goes."""

    INPUT = "input"
    PARAMETER = "parameter"  # parameters, buffers, and constants the graph carries
    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    POINTWISE = "pointwise"  # one pass over its data: arithmetic, casts, copies, gathers, constants
    REDUCTION = "reduction"  # sums and the like, and kernels made of one: norms, softmax, pooling
    RANDOM = "random"
    RANDOM_STATE = "random state"
    VIEW = "view"
    PART = "part"  # one of an op's several results
    OTHER = "other"


GIVEN = frozenset({Kind.INPUT, Kind.PARAMETER})
CHEAP = frozenset({Kind.POINTWISE, Kind.REDUCTION, Kind.RANDOM, Kind.RANDOM_STATE, Kind.VIEW, Kind.PART})
"""Kinds whose work is at most a pass over the data."""


@dataclass(frozen=True, slots=True)
class JointValue:
    name: str
    kind: Kind
    op: str = ""  # "aten.mm.default"
    nbytes: int = 0  # of its own; 0 for a view and for an op with several results, whose parts have them
    flops: int = 0
    made_from: tuple[str, ...] = ()
    label: str = ""  # the submodule it is computed in, for people
    must_save: str = ""  # why it may not be computed a second time; empty if it may
    in_forward: bool = True  # the forward's results need it; otherwise it is made for backward alone, so making it there repeats nothing
    read_by_backward: bool = False  # by an op that works on gradients
    is_output: bool = False  # its bytes are also a result of the region, so somebody else keeps them


@dataclass(frozen=True, slots=True)
class Handover:
    """What one choice of saved values comes to."""

    saved: tuple[str, ...]  # values with bytes of their own that forward leaves for backward
    given: tuple[str, ...]  # inputs and parameters that backward reads
    recomputed: tuple[str, ...]  # everything backward makes before it needs a gradient, in order


@dataclass(frozen=True)
class JointGraph:
    """The values of a region in the order they are computed, inputs first."""

    values: tuple[JointValue, ...]
    compiled: bool  # as Inductor sees it, or op by op as eager runs it
    keep: tuple[str, ...]  # what is saved when memory does not matter

    @cached_property
    def named(self) -> dict[str, JointValue]:
        return {value.name: value for value in self.values}

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Ops with several results: op -> its parts."""
        found: dict[str, tuple[str, ...]] = {}
        for value in self.values:
            if value.kind is Kind.PART:
                found[value.made_from[0]] = (*found.get(value.made_from[0], ()), value.name)
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that two graphs share if they have the same ops in the same places, whatever the sizes."""
        shape = [(value.name, value.kind, value.op, value.made_from, value.read_by_backward) for value in self.values]
        return hashlib.sha256(json.dumps([self.compiled, shape]).encode()).hexdigest()[:16]

    def owner(self, name: str) -> JointValue:
        """The value whose bytes a value lies in: itself, unless it is a view."""
        value = self._value(name)
        while value.kind is Kind.VIEW:
            value = self._value(value.made_from[0])
        return value

    def savable(self, value: JointValue) -> bool:
        return value.kind not in GIVEN and value.kind is not Kind.VIEW and value.name not in self.parts

    def hand_over(self, names: Iterable[str]) -> Handover:
        """What is really saved when `names` are to be: without what backward does not need, and with what must not be computed twice."""
        wanted = {self.owner(name).name for name in names}
        saved, given, recomputed = set(), set(), set()
        waiting = [value.name for value in self.values if value.read_by_backward]
        while waiting:
            value = self.named[waiting.pop()]
            if value.name in saved or value.name in given or value.name in recomputed:
                continue
            if value.kind in GIVEN:
                given.add(value.name)
            elif self.savable(value) and (value.name in wanted or value.must_save):
                saved.add(value.name)
            else:
                recomputed.add(value.name)
                waiting.extend(value.made_from)
        order = [value.name for value in self.values]
        return Handover(*(tuple(name for name in order if name in chosen) for chosen in (saved, given, recomputed)))

    def moved_bytes(self, name: str) -> int:
        """Bytes the op behind a value reads and writes when it runs by itself; nothing for views and parts, which are not ops."""
        value = self.named[name]
        if value.kind in (Kind.VIEW, Kind.PART):
            return 0
        written = value.nbytes + sum(self.named[part].nbytes for part in self.parts.get(name, ()))
        return written + sum(self.owner(source).nbytes for source in dict.fromkeys(value.made_from))

    def to_json(self) -> str:
        values = [{field: item for field, item in dataclasses.asdict(value).items() if item != _DEFAULTS.get(field)} for value in self.values]
        return json.dumps({"values": values, "compiled": self.compiled, "keep": self.keep}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> JointGraph:
        try:
            data = json.loads(text)
            joint = JointGraph(tuple(_value_from(item) for item in data["values"]), bool(data["compiled"]), tuple(data["keep"]))
            seen: set[str] = set()
            for value in joint.values:
                if not seen.issuperset(value.made_from):
                    raise ValueError(f"{value.name} comes before what it is made from")
                seen.add(value.name)
            return joint
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFile(f"not the values of a region ({error}); describe the region again") from None

    def _value(self, name: str) -> JointValue:
        try:
            return self.named[name]
        except KeyError:
            raise UnknownName("value", name, self.named) from None


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(JointValue)}


def _value_from(item: dict[str, Any]) -> JointValue:
    return JointValue(**{**item, "kind": Kind(item["kind"]), "made_from": tuple(item.get("made_from", ()))})
