"""Gradients that have left the device, behind a `.grad` that ordinary code can work on.

A gradient that goes to host memory leaves as it arrives. What is left in `parameter.grad` is a tensor without bytes that knows where they are.
clip_grad_norm_, clip_grad_value_, zero_grad, GradScaler and accumulation are done where the gradient is: norms were taken on the device before it
left, factors are noted and applied by the update, sums and bounds are computed on the host, all with the bits they would have had on the
device. Any other operation brings the gradient back to the device, where it stays until the update.

clip_grad_norm_ takes norms of such tensors one by one; with foreach=True it takes them as it does of ordinary gradients, to the last bit.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...errors import BadInput
from ..device import Device, Direction, bytes_of
from ..host_pool import Block, HostPool
from ..lanes import Event, Lane, already, settled
from ..torch_compat import is_at, version_of
from .homes import copy_block
from .torch_compat import no_torch_function, without_bytes
from .units import Slot, Unit

LEAVING_BYTES = 256 << 20  # the most device memory held by gradients on their way out before compute waits for one of them
LEFT_LEAVING = 1 / 3  # of that, which is then not waited for: about what the region under way has sent, the one before it being two thirds
MOST_USES = 4  # of a block of gradients, for each of them, that are known; more where they are not over

aten = torch.ops.aten


class HostGradients:
    """The gradients of a unit in host memory, in a block of at least its size."""

    def __init__(self, unit: Unit, block: Block) -> None:
        self.unit, self.block = unit, block
        self.flat = block.bytes[: unit.nbytes].view(unit.dtype)
        self.users: list[Event] = []
        ends = [*(slot.offset for slot in unit.slots[1:]), unit.numel]
        for slot, end in zip(unit.slots, ends, strict=False):
            if slot.stop < end:
                self.flat[slot.stop : end].zero_()  # a gap, which no gradient ever reaches

    def use(self, event: Event) -> None:
        """Its bytes are in use until then. Those that are over are forgotten now and then: to ask takes a moment of backward, each time."""
        if len(self.users) >= MOST_USES * len(self.unit.slots):
            self.users = [other for other in self.users if not other.done()]
        self.users.append(event)

    def span(self, slot: Slot) -> slice:
        return slice(slot.offset * self.unit.dtype.itemsize, slot.stop * self.unit.dtype.itemsize)


class Shelf:
    """Host memory for gradients: a block for each unit, or a few that units take in turn, where they are used as soon as they are complete."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._free: list[Block] = []
        self._blocks: list[Block] = []

    def add(self, nbytes: int, count: int = 1) -> None:
        for _ in range(count):
            block = self._pool.allocate(nbytes)
            for event in block.after:
                event.wait()
            self._blocks.append(block)
            self._free.append(block)

    def take(self, unit: Unit) -> HostGradients | None:
        """The smallest free block that is large enough; None if there is none."""
        fits = [block for block in self._free if block.nbytes >= unit.nbytes]
        if not fits:
            return None
        block = min(fits, key=lambda block: block.nbytes)
        self._free.remove(block)
        return HostGradients(unit, block)

    def give(self, gradients: HostGradients) -> None:
        for event in gradients.users:
            settled(event).wait()
        self._free.append(gradients.block)

    def close(self) -> None:
        for block in self._blocks:
            self._pool.free(block)
        self._blocks, self._free = [], []


class Factor:
    """A number that a gradient is to be multiplied by. One that was computed on the device is on its way to the host."""

    def __init__(self, value: Any, dtype: torch.dtype, traffic: Traffic) -> None:
        self._value = value  # as it was given, for gradients that are multiplied on the device
        self._wide = dtype == torch.float32
        self._lock = threading.Lock()  # lanes may ask at once
        self._number: float | None = None if isinstance(value, torch.Tensor) else float(value)
        if not isinstance(value, torch.Tensor):
            return
        # A tensor on a card takes the gradient's type before it multiplies; on the CPU, where all of this is a rehearsal, it does not.
        narrow = value.detach().to(dtype) if value.device.type == "cuda" else value.detach()
        leaving = bytes_of(narrow.to(torch.float32).reshape(1).clone().untyped_storage())[:4]
        block = traffic.pool.allocate(4)
        self._arrives = block.bytes.view(torch.float32)
        self._event = traffic.device.copy(Direction.OUT, block.bytes, leaving, after=(traffic.device.mark(), *block.after))
        traffic.hold(self._event, leaving)
        weakref.finalize(self, traffic.pool.free, block, [self._event]).atexit = False

    def multiply(self, gradient: torch.Tensor) -> None:
        """In place, on the device. A factor that keeps fp32 beside a narrower gradient rounds the product only."""
        gradient.copy_(gradient.float().mul_(self._value)) if self._wide else gradient.mul_(self._value)

    def number(self) -> float:
        """Waits for it."""
        with self._lock:
            if self._number is None:
                self._event.wait()
                self._number = float(self._arrives.item())
            return self._number


class Held:
    """One parameter's gradient: on the device, at home in host memory, or used up."""

    def __init__(self, slot: Slot, home: HostGradients | None, traffic: Traffic | None) -> None:
        self.slot, self.home, self._traffic = slot, home, traffic
        self.here: torch.Tensor | None = None
        self.there: Event = already()  # its way to the host, and what was done to it there since
        self.factors: list[Factor] = []
        self.norms: dict[tuple[Any, ...], torch.Tensor] = {}
        self.spent = False
        self.before_touch: Callable[[], None] | None = None  # waits for an update that still reads it

    @property
    def traffic(self) -> Traffic:
        assert self._traffic is not None, "a gradient that has a home has a way to it"
        return self._traffic

    def as_tensor(self) -> Gradient:
        """What stands in the parameter's `.grad`."""
        return Gradient(self, self.slot.parameter.dtype, self.slot.parameter.device)

    def settle_factors(self) -> Factor | None:
        """The one factor the update has to apply; more than one are applied on the host before."""
        if len(self.factors) > 1:
            self.on_host(lambda flat: None)
        return self.factors[0] if self.factors else None

    def bring(self) -> torch.Tensor:
        """A copy on the device."""
        self.touch()
        assert self.home is not None
        self.there.wait()  # here and not on the copy lane: the host's work on a gradient may stand behind updates that wait for that lane
        device, slot = self.traffic.device, self.slot
        arriving = device.empty(slot.numel * self.home.unit.dtype.itemsize)
        event = copy_block(device, Direction.IN, self.home.block, self.home.span(slot), arriving, after=(device.mark(),))
        device.wait(event)
        tensor = arriving.view(self.home.unit.dtype).as_strided(slot.size, slot.stride)
        for factor in self.factors:
            factor.multiply(tensor)
        return tensor

    def recall(self) -> torch.Tensor:
        """Back on the device, until its update."""
        if self.here is None:
            self.here = self.bring()
            self.factors.clear()
            self.norms.clear()
        self.touch()
        return self.here

    def touch(self) -> None:
        if self.before_touch is not None:
            wait, self.before_touch = self.before_touch, None
            wait()

    def on_host(self, work: Callable[[torch.Tensor], object], *, after: Sequence[Event] = ()) -> None:
        """Do something to the gradient where it is, after what was noted or started before."""
        self.touch()
        assert self.home is not None
        flat, factors, there = self.home.flat[self.slot.offset : self.slot.stop], list(self.factors), self.there
        self.factors.clear()
        self.norms.clear()

        def run() -> None:
            for factor in factors:
                flat.mul_(factor.number())
            work(flat)

        self.there = self.traffic.lane.put(run, after=(there, *after))
        self.home.use(self.there)


class Gradient(torch.Tensor):
    """A `.grad` whose bytes are elsewhere."""

    held: Held

    @staticmethod
    def __new__(cls, held: Held, dtype: torch.dtype, device: torch.device) -> Gradient:
        slot = held.slot
        made = without_bytes(cls, slot.size, slot.stride, dtype, device)
        made.held = held
        return made  # type: ignore[no-any-return]

    def __init__(self, held: Held, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        where = "used up" if self.held.spent else "on the device" if self.held.here is not None else "in host memory"
        return f"Gradient({self.held.slot.name}, {where}, size={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func in _ALIAS and isinstance(first, Gradient):
            return Gradient(first.held, first.dtype, first.device)
        if isinstance(first, Gradient) and first.held.spent and func is not aten.zero_.default:
            raise BadInput(
                f"the gradient of {first.held.slot.name} was used by its update during backward and is gone; "
                f"use update='after' to clip, scale, read or accumulate gradients, and call zero_grad() after every step"
            )
        one_by_one = _LISTS.get(func)
        if one_by_one is not None and any(isinstance(item, Gradient) for item in first):
            results = [_single(one_by_one, item, args[1:], kwargs) for item in first]
            return results if func in _LIST_RESULTS else None
        if isinstance(first, Gradient) and first.held.here is None and func in _AT_HOME:
            return _AT_HOME[func](first, *args[1:], **kwargs)
        back = lambda value: value.held.recall() if isinstance(value, Gradient) else value  # noqa: E731
        result = func(*tree_map(back, args), **tree_map(back, kwargs))
        return first if isinstance(first, Gradient) and result is first.held.here else result


def _single(func: Any, item: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _unscale and not isinstance(item, Gradient):
        return aten._amp_foreach_non_finite_check_and_unscale_.default([item], *rest, **kwargs)
    return func(item, *rest, **kwargs)


def _norm(gradient: Gradient, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if dim is None and not keepdim:
        return _known_norm(gradient, (_plain_norm, ord, dtype))
    norm: torch.Tensor = torch.linalg.vector_norm(gradient.held.bring(), ord, dim, keepdim, dtype=dtype)
    return norm


def _foreach_norm(item: torch.Tensor, ord: Any = 2, dtype: Any = None) -> torch.Tensor:
    if isinstance(item, Gradient) and item.held.here is None:
        return _known_norm(item, (_norm_of_list, ord, dtype))
    return _norm_of_list(item.held.recall() if isinstance(item, Gradient) else item, ord, dtype)


def _known_norm(gradient: Gradient, key: tuple[Any, ...]) -> torch.Tensor:
    """A norm that was taken before the gradient left, or is taken now and from now on before gradients leave."""
    held = gradient.held
    if key not in held.norms or held.factors:
        held.traffic.wanted_norms.add(key)
        norm: torch.Tensor = key[0](held.bring(), *key[1:])
        if held.factors:
            return norm
        held.norms[key] = norm
    return held.norms[key].clone()


def _plain_norm(tensor: torch.Tensor, ord: Any, dtype: Any) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, ord, dtype=dtype)
    return norm


def _norm_of_list(tensor: torch.Tensor, ord: Any, dtype: Any) -> torch.Tensor:
    """As clip_grad_norm_ takes it of ordinary gradients, which need not have the last bits of the one above; a list of one is as good as any."""
    norm: torch.Tensor = aten._foreach_norm.Scalar([tensor], ord, dtype)[0]
    return norm


def _multiply(gradient: Gradient, other: Any) -> Any:
    held = gradient.held
    is_number = isinstance(other, (int, float)) or (isinstance(other, torch.Tensor) and other.numel() == 1 and other.dim() == 0)
    if not is_number:
        held.recall().mul_(other)
        return gradient
    held.factors.append(held.traffic.factor(other, gradient.dtype))
    held.norms.clear()
    return gradient


def _zero(gradient: Gradient) -> Gradient:
    held = gradient.held
    if not held.spent:
        held.factors.clear()
        held.on_host(lambda flat: flat.zero_())
    return gradient


def _clamp(gradient: Gradient, min: Any = None, max: Any = None) -> Gradient:
    gradient.held.on_host(lambda flat: flat.clamp_(min, max))
    return gradient


def _clamp_min(gradient: Gradient, min: Any) -> Gradient:
    return _clamp(gradient, min, None)


def _clamp_max(gradient: Gradient, max: Any) -> Gradient:
    return _clamp(gradient, None, max)


def _add(gradient: Gradient, other: Any, *, alpha: Any = 1) -> Gradient:
    held = gradient.held
    fits = isinstance(other, torch.Tensor) and type(other) is torch.Tensor and other.shape == gradient.shape and other.dtype == gradient.dtype
    if not fits or alpha != 1:
        held.recall().add_(other, alpha=alpha)
        return gradient
    held.traffic.accumulate(held, other)
    return gradient


def _unscale(item: torch.Tensor, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    assert isinstance(item, Gradient)
    held = item.held
    if held.here is not None:
        aten._amp_foreach_non_finite_check_and_unscale_.default([held.recall()], found_inf, inv_scale)
        return
    aten._amp_foreach_non_finite_check_and_unscale_.default([held.bring()], found_inf, inv_scale)
    held.factors.append(held.traffic.factor(inv_scale.float(), torch.float32))  # the factor keeps fp32 here, only the product is rounded
    held.norms.clear()


_ALIAS = {aten.detach.default, aten.alias.default}
_AT_HOME: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.zero_.default: _zero,
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp_min,
    aten.clamp_max_.default: _clamp_max,
    aten.add_.Tensor: _add,
}
_LISTS: dict[Any, Callable[..., Any]] = {
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_mul_.Tensor: lambda item, other: item.mul_(other),
    aten._foreach_mul_.Scalar: lambda item, other: item.mul_(other),
    aten._foreach_zero_.default: lambda item: item.zero_(),
    aten._foreach_clamp_min_.Scalar: lambda item, low: item.clamp_min_(low),
    aten._foreach_clamp_max_.Scalar: lambda item, high: item.clamp_max_(high),
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
_LIST_RESULTS = {aten._foreach_norm.Scalar}


class Traffic:
    """Gradients on their way out. `lane` is where the host works on them."""

    def __init__(self, device: Device, pool: HostPool, lane: Lane, *, leaving_bytes: int = LEAVING_BYTES) -> None:
        self.device, self.pool, self.lane = device, pool, lane
        self.wanted_norms: set[tuple[Any, ...]] = set()  # (how to take it, its order, its type)
        self.sent_bytes = 0
        self._limit_bytes = leaving_bytes
        self._leaving: deque[tuple[Event, torch.Tensor]] = deque()
        self._leaving_bytes = 0
        self._factors: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int | None, Factor]] = {}

    @torch.no_grad()
    def send(self, held: Held, gradient: torch.Tensor) -> None:
        """The gradient leaves for its home; its bytes on the device are let go when they have been copied."""
        assert held.home is not None
        held.touch()
        held.there.wait()  # as in Held.bring
        for take, *options in self.wanted_norms:
            held.norms[take, *options] = take(gradient, *options)
        flat = held.slot.flat(gradient).view(torch.uint8)
        held.there = copy_block(self.device, Direction.OUT, held.home.block, held.home.span(held.slot), flat, after=(self.device.mark(),))
        held.home.use(held.there)
        held.here = None
        self.hold(held.there, flat)

    @torch.no_grad()
    def accumulate(self, held: Held, gradient: torch.Tensor) -> None:
        """Add another gradient to one that is at home."""
        flat = held.slot.flat(gradient).view(torch.uint8)
        block = self.pool.allocate(flat.numel())
        arrived = copy_block(self.device, Direction.OUT, block, slice(0, flat.numel()), flat, after=(self.device.mark(), *block.after))
        self.hold(arrived, flat)
        dtype = gradient.dtype

        def add(mine: torch.Tensor) -> None:
            mine.add_(block.bytes.view(dtype))
            self.pool.free(block)

        held.on_host(add, after=(arrived,))

    def factor(self, value: Any, dtype: torch.dtype) -> Factor:
        """One for all gradients that are multiplied by the same tensor."""
        if not isinstance(value, torch.Tensor):
            return Factor(value, dtype, self)
        known = self._factors.get((id(value), dtype))
        if known is None or known[0] is not value or not is_at(value, known[1]):
            self._factors[id(value), dtype] = known = (value, version_of(value), Factor(value, dtype, self))
        return known[2]

    def forget_factors(self) -> None:
        """Once a step is over no gradient meets the same factor again."""
        self._factors.clear()

    def release(self, *, all: bool = False) -> None:
        """Let go of what has been copied. Beyond the limit, or with `all`, compute waits: once, for the last of several. Copies end in the order in
        which they began, and each wait keeps compute for a moment, also for what was copied long ago by the time that compute is there."""
        most_bytes = 0 if all else self._limit_bytes if self._leaving_bytes <= self._limit_bytes else int(LEFT_LEAVING * self._limit_bytes)
        gone: list[tuple[Event, torch.Tensor]] = []  # with their bytes, until compute waits
        while self._leaving and (self._leaving_bytes > most_bytes or self._leaving[0][0].done()):
            gone.append(self._leaving.popleft())
            self._leaving_bytes -= gone[-1][1].numel()
        if gone:
            self.device.wait(next((event for event, _ in gone if event.failed()), gone[-1][0]))

    def hold(self, event: Event, flat: torch.Tensor) -> None:
        self.sent_bytes += flat.numel()
        self._leaving.append((event, flat))
        self._leaving_bytes += flat.numel()
        self.release()
