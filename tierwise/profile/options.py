"""One option of a region class timed on the device it will run on: seconds of its forward and backward, and the bytes it needs meanwhile.

    forward = compile_option(Block.forward, option)
    times = option_times(forward, block, (x,), kwargs)      # remembered on disk; time_option measures in any case

The calls are the runtime's own, with the gradients of every parameter and input that wants one. The module is left as it was: its parameters'
.grad is not touched, buffers that forward overwrites are put back, random numbers are not used up, and no memory stays behind. Only the peak that
CUDA's allocator reports is counted from anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import BadInput
from .cache import TimingCache, cache_folder
from .memory import allocated_bytes, measured_bytes
from .sustained import random_state_kept, sustained
from .torch_compat import has_data, quickly_tuned, version_kept


@dataclass(frozen=True, slots=True)
class OptionTimes:
    """Seconds are medians of calls one behind the other, with the chip as warm as in training.

    On a GPU the device's time is what the GPU is busy with a call, the host's what it takes to issue it; on the CPU they are the same.
    Workspace is what a call needs at once beyond what it is given and what it leaves: for the forward its results and what it saves, for
    the backward the gradients, with everything saved still there.
    """

    forward_device_seconds: float
    forward_host_seconds: float
    backward_device_seconds: float
    backward_host_seconds: float
    workspace_forward_bytes: int
    workspace_backward_bytes: int
    saved_bytes: int  # beyond inputs, parameters and results, as the allocator counts them

    @property
    def forward_seconds(self) -> float:
        """What a forward adds to a step: the GPU works, or waits for the host."""
        return max(self.forward_device_seconds, self.forward_host_seconds)

    @property
    def backward_seconds(self) -> float:
        return max(self.backward_device_seconds, self.backward_host_seconds)


IN_PASSING = ", in passing"  # behind the key of what was timed before the clocks had settled
Forward = Callable[..., Any]
"""forward(module, *args, **kwargs), such as a CompiledOption or Block.forward."""


def option_times(
    forward: Forward,
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    option: Any = None,
    cache: Path | None = None,
    settle: bool = True,
) -> OptionTimes:
    """`time_option`, or what it said the last time. `option` is the regions.Option, if `forward` does not carry it."""
    option = option if option is not None else getattr(forward, "option", None)
    if option is None:
        raise BadInput("which option is timed is not known, so it cannot be remembered; pass option=, or call time_option")
    remembered = TimingCache(cache or cache_folder() / "options.json")
    key = option_key(option, module, args, kwargs or {})
    if key not in remembered and not settle:
        key += IN_PASSING
    if key not in remembered:
        remembered[key] = astuple(time_option(forward, module, args, kwargs, settle=settle))
        remembered.save()
    numbers = remembered[key]
    return OptionTimes(*numbers[:4], *map(int, numbers[4:]))  # type: ignore[call-arg,arg-type]


def is_timed(
    option: Any, module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, cache: Path | None = None,
    settle: bool = True,
) -> bool:  # fmt: skip
    """Whether `option_times` has its answer already."""
    remembered, key = TimingCache(cache or cache_folder() / "options.json"), option_key(option, module, args, kwargs or {})
    return key in remembered or (not settle and key + IN_PASSING in remembered)


def first_run(forward: Forward, module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Whatever happens only once: compilation, and kernels choosing among their variants. Options that had theirs can be timed one behind the other,
    and the clocks settle once for all."""
    device = _device_of(module, args, kwargs or {})
    with random_state_kept(device), _buffers_kept(module), torch.enable_grad(), quickly_tuned():
        call = _Call(forward, module, args, kwargs or {}, device)
        call.forward()
        call.backward_and_forget()
        del call
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_option(
    forward: Forward, module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, settle: bool = True
) -> OptionTimes:
    """Run the option on its module and on copies of its arguments until the clocks have settled; fake or meta arguments become random numbers.

    settle    wait for the clocks; for what is a small share of a step a second of that is too much
    Takes about a third of a second and, in memory, one call at a time: a copy of the arguments, what the call saves, and its gradients.
    Call it inside the torch.autocast the step runs under, if any.
    """
    device = _device_of(module, args, kwargs or {})
    with random_state_kept(device), _buffers_kept(module), torch.enable_grad():
        call = _Call(forward, module, args, kwargs or {}, device)
        call.forward()
        call.backward_and_forget()  # compiles, and lets libraries allocate what they keep: no workspace of a call
        forward_bytes = measured_bytes(call.forward, device)
        result_bytes = _storage_bytes(call.results, call.given, device)
        backward_bytes = measured_bytes(call.backward, device)
        gradient_bytes = _storage_bytes(call.gradients, call.given, device)
        call.forget()
        forwards, backwards = sustained((call.forward, call.backward_and_forget), device, settle=settle)
        del call
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return OptionTimes(
        forward_device_seconds=forwards.device_seconds,
        forward_host_seconds=forwards.host_seconds,
        backward_device_seconds=backwards.device_seconds,
        backward_host_seconds=backwards.host_seconds,
        workspace_forward_bytes=max(0, forward_bytes.peak - forward_bytes.left),
        workspace_backward_bytes=max(0, backward_bytes.peak - gradient_bytes),
        saved_bytes=max(0, forward_bytes.left - result_bytes),
    )


def option_key(option: Any, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Everything the times depend on: the graph, what is saved, shapes and types of what goes in, autocast, torch and the processor."""
    device = next((tensor.device for tensor in _tensors_of(module, args, kwargs)), torch.device("cpu"))  # parameters may be away just now
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    given = [_spec(tensor) for tensor in (*module.parameters(), *module.buffers())], tree_map(_spec, (tuple(args), dict(kwargs)))
    digest = hashlib.sha256(repr((option.saved, given)).encode()).hexdigest()[:16]
    return f"{option.name} of {option.graph} {digest}, autocast {cast}, on {where}, torch {torch.__version__}"


def _spec(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
    return f"{value.dtype}{list(value.shape)}/{list(value.stride())}{'+grad' if value.requires_grad else ''}"


class _Call:
    """The option called on arguments of our own; results stay until backward or `forget`."""

    def __init__(self, forward: Forward, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> None:
        own = _Copies(device)
        self._forward, self._module = forward, module
        self._args, self._kwargs = tree_map(own.of, tuple(args)), tree_map(own.of, dict(kwargs))
        parameters = list(module.parameters())
        self._wanted = [tensor for tensor in (*own.made, *parameters) if tensor.requires_grad]
        self._tangents: list[torch.Tensor] = []
        self._autocast_off = torch.autocast(device.type, enabled=False)
        self.results: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self._lasting = [*own.made, *parameters, *module.buffers()]

    @property
    def given(self) -> list[torch.Tensor]:
        return [*self._lasting, *self._tangents]

    def forward(self) -> None:
        self.results = list(tensors_in(self._forward(self._module, *self._args, **self._kwargs)))
        if not self._tangents:  # numbers as random as gradients are: on equal ones a chip draws less power and runs faster than it ever does
            self._tangents = [torch.randn_like(result) for result in self.results if result.requires_grad]

    def backward(self) -> None:
        roots = [result for result in self.results if result.requires_grad]
        if roots and self._wanted:
            with self._autocast_off:
                found = torch.autograd.grad(roots, self._wanted, self._tangents, allow_unused=True)
            self.gradients = [gradient for gradient in found if gradient is not None]

    def backward_and_forget(self) -> None:
        self.backward()
        self.forget()

    def forget(self) -> None:
        self.results, self.gradients = [], []


class _Copies:
    """Tensors of our own like those given, the same for the same; numbers where there were none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: list[torch.Tensor] = []
        self._known: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            copied = self._copied(value).requires_grad_(value.requires_grad)
            self._known[id(value)] = copied
            self.made.append(copied)
        return self._known[id(value)]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        once = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]  # expanded: one in memory
        with torch.no_grad():
            made = torch.empty_strided(once, tensor.stride(), dtype=tensor.dtype, device=self.device)
            if has_data(tensor):
                made.copy_(tensor.detach()[tuple(slice(size) for size in once)])
            elif tensor.is_floating_point():
                made.normal_()
            else:
                made.fill_(tensor.dtype is torch.bool)  # indices that are valid whatever they index
            return made.expand(tensor.shape)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a module takes or returns, containers of any kind opened."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def _device_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    for tensor in _tensors_of(module, args, kwargs):
        if not has_data(tensor) or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise BadInput(f"a {type(module).__name__} whose parameters hold no data cannot be timed; move it to the device it will run on")
        return tensor.device
    return torch.device("cpu")


def _tensors_of(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    given = (*module.parameters(), *module.buffers(), *tree_leaves((tuple(args), dict(kwargs))))
    return (tensor for tensor in given if isinstance(tensor, torch.Tensor))


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    owners = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items() if buffer is not None]
    before = [buffer.clone() for _, _, buffer in owners]
    with version_kept(tuple(buffer for _, _, buffer in owners)):
        try:
            yield
        finally:
            with torch.no_grad():
                for (owner, name, buffer), kept in zip(owners, before, strict=True):
                    owner._buffers[name] = buffer.copy_(kept)


def _storage_bytes(tensors: Sequence[torch.Tensor], known: Sequence[torch.Tensor], device: torch.device) -> int:
    """Of the distinct storages of tensors, without those of others."""
    others = {tensor.untyped_storage().data_ptr() for tensor in known}
    found = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(allocated_bytes(nbytes, device) for place, nbytes in found.items() if place not in others)
