"""`verify=True`: before the first step of each shape, the step is run twice from the same state and what comes out is compared.

reference   every region call under torch.utils.checkpoint, with the module's own forward, or compiled with the choice that saves the most: the
            least that can go wrong, in the least memory
planned     as the plan has it

Eager plans are exact: equal to the bit. Compiled ones are exact against the compiled step that keeps everything, with precision casts emulated
in both. Where two runs of the reference differ from each other, on a GPU with kernels that add in any order, a difference of the planned run is
allowed to be a few times theirs. Parameters' .grad, buffers and random states are left as they were; hooks on submodules are called twice more.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..errors import NotExact
from ..execute.session import PlannedPass, RegionForward
from ..profile.options import tensors_in
from .plan import Plan

if TYPE_CHECKING:
    from .fitted import Fitted

NOISE = 4.0  # times the difference of two runs of the reference: what the planned run may differ by where those two differ


@dataclass(frozen=True)
class Outcome:
    """One run of the step, on the host."""

    results: list[torch.Tensor]  # what the loss was made of
    calls: list[tuple[str, list[int]]]  # region calls in order, with a digest of what each returned
    gradients: dict[str, torch.Tensor]


class Checkpointed:
    """In place of a planned pass: region calls with nothing saved but their inputs."""

    def __init__(self, plan: Plan, compiled: bool) -> None:
        self._kept = plan.kept if compiled else {}
        self.calls: list[tuple[str, list[int]]] = []

    def run(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self._kept.get(region.name, region.plain)
        out = checkpoint(forward, region.module, *args, use_reentrant=False, **kwargs)
        self.calls.append((region.name, _digests(out)))
        return out

    def over(self) -> None: ...

    def abandon(self) -> None: ...


class Watched(PlannedPass):
    """A planned pass that notes what each call returned."""

    def __init__(self, fitted: Fitted, plan: Plan) -> None:
        super().__init__(fitted.session, plan.plans)
        self.calls: list[tuple[str, list[int]]] = []

    def run(self, region: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().run(region, args, kwargs)
        self.calls.append((region.name, _digests(out)))
        return out


def verify_step(fitted: Fitted, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise NotExact, naming the region, unless the planned step gives what the reference gives."""
    compiled = fitted.settings.compile

    def reference() -> Outcome:
        return _run(fitted, Checkpointed(plan, compiled), args, kwargs)

    expected = reference()
    found = _run(fitted, Watched(fitted, plan), args, kwargs)
    fitted.session.last = None
    if _first_difference(expected, found, None, fitted) is None:
        return
    again = reference()  # does it differ from itself?
    difference = _first_difference(expected, found, again, fitted)
    if difference is not None:
        against = "the compiled step that keeps everything" if compiled else "plain eager checkpointing"
        raise NotExact(
            f"verify: the planned step differs from {against}: {difference}; nothing was trained with it. Call tierwise.release(model) to train "
            "without a plan, and report this, with tierwise.plan_of(model).summary()"
        )


def _run(fitted: Fitted, runner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    given = tree_map(_own, (args, dict(kwargs)))
    with _state_kept(fitted.model), torch.enable_grad():
        out = fitted.session.run_pass(runner, *given)
        results = _loss(out)
        weights = {name: weight for name, weight in fitted.model.named_parameters() if weight.requires_grad}
        found = torch.autograd.grad(_projected(results), list(weights.values()), allow_unused=True)
    gradients = {name: gradient.to("cpu", copy=True) for name, gradient in zip(weights, found, strict=True) if gradient is not None}
    return Outcome([result.detach().to("cpu", copy=True) for result in results], runner.calls, gradients)


def _first_difference(expected: Outcome, found: Outcome, again: Outcome | None, fitted: Fitted) -> str | None:
    """In forward order what a call returned, then in backward order the gradients of its parameters."""
    again_calls = again.calls if again else expected.calls
    for (name, before), (_, after), (_, once_more) in zip(expected.calls, found.calls, again_calls, strict=True):
        if before != after and before == once_more:
            return f"{name} is the first region whose result is another"
    for index, result in enumerate(expected.results):
        if wrong := _differs(result, found.results[index], again.results[index] if again else result):
            return f"the loss differs, though every region returned the same ({wrong})"
    if expected.gradients.keys() != found.gradients.keys():
        names = sorted(expected.gradients.keys() ^ found.gradients.keys())
        return f"{names[0]} has a gradient in one of them only"
    for owner, name in _backward_order(expected, fitted.model):
        noise = again.gradients[name] if again else expected.gradients[name]
        if wrong := _differs(expected.gradients[name], found.gradients[name], noise):
            return f"{owner or 'outside of the regions'}: the gradient of {name} is the first in backward that differs ({wrong})"
    return None


def _backward_order(outcome: Outcome, model: nn.Module) -> list[tuple[str, str]]:
    """(region, parameter): the regions called last first, then what belongs to none."""
    last_call = {name: place for place, (name, _) in enumerate(outcome.calls)}

    def owner(parameter: str) -> str:
        return max((name for name in last_call if parameter.startswith(f"{name}.")), key=len, default="")

    found = [(owner(parameter), parameter) for parameter in outcome.gradients]
    return sorted(found, key=lambda pair: -last_call.get(pair[0], -1))


def _differs(expected: torch.Tensor, found: torch.Tensor, again: torch.Tensor) -> str:
    if _same_bits(expected, found):
        return ""
    noise = float((expected.double() - again.double()).abs().max()) if expected.numel() else 0.0
    gap = (expected.double() - found.double()).abs()
    largest = float(gap.nan_to_num(float("inf")).max())
    if noise and largest <= NOISE * noise:
        return ""
    return f"{int((gap != 0).sum())} of {gap.numel()} elements, by up to {largest:.3g}"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and _digests(one) == _digests(other)


def _digests(out: Any) -> list[int]:
    """A number for each tensor that is another one if a bit is another; on the host, where there is room."""
    on_host = [tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for tensor in tensors_in(out)]
    return [xxhash.xxh3_64_intdigest(tensor.numpy().data) for tensor in on_host]


def _loss(out: Any) -> list[torch.Tensor]:
    """What gradients start from: the loss if the model returns one, else everything it returns."""
    from ..capture.fake_step import loss_of
    from ..errors import CaptureError

    with contextlib.suppress(CaptureError):
        loss = loss_of(out)
        if loss.requires_grad:
            return [loss]
    return [tensor for tensor in tensors_in(out) if tensor.is_floating_point() and tensor.requires_grad]


def _projected(results: list[torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every element in a way of its own, the same each time."""
    if len(results) == 1 and results[0].numel() == 1:
        return results[0].reshape(())
    generator = torch.Generator().manual_seed(20261115)
    weights = [torch.randn(result.shape, generator=generator).to(result) for result in results]
    return torch.stack([(result * weight).sum() for result, weight in zip(results, weights, strict=True)]).sum()


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Random states and buffers as they were, whatever happens within."""
    owners = [(owner, name, buffer) for owner in model.modules() for name, buffer in owner._buffers.items() if buffer is not None]
    before = [buffer.detach().to("cpu", copy=True) for _, _, buffer in owners]
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    python, numpy_state = random.getstate(), numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng(devices=_cards(model)):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy_random:
                numpy_random.set_state(numpy_state)
            with torch.no_grad():
                for (owner, name, buffer), kept in zip(owners, before, strict=True):
                    buffer.copy_(kept)
                    owner._buffers[name] = buffer


def _cards(model: nn.Module) -> list[torch.device]:
    return sorted({weight.device for weight in model.parameters() if weight.device.type == "cuda"}, key=str)
