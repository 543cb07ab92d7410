"""One step of a model run on fake tensors, with everything installed that makes it look like eager PyTorch on CUDA.

    out = model(**batch); loss = out.loss; loss.backward()

`out`, `loss` and the batch stay in the variables of the function that runs this, as they would in a training loop.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, CaptureError, TierwiseError, UnknownName
from ..ir import Phase, Role
from .autocast import cuda_autocast, cuda_autocast_lists
from .calls import CallTree
from .cuda_semantics import cuda_semantics
from .failures import explain
from .fakes import Fakes
from .storages import NOWHERE, StorageTable
from .torch_compat import new_fake_mode, quiet_about_failures, transformers_asks_values
from .trace import Recorder, SaysCudaMeansHere
from .values import Values

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}


class FakeStep:
    """A model and a batch on fake tensors, to be run with everything installed that makes it look like CUDA. To be used inside its `mode`."""

    def __init__(self, model: nn.Module, batch: Any, autocast: torch.dtype | str | None) -> None:
        self.autocast = _autocast_dtype(autocast)
        self.mode = new_fake_mode()
        fakes = Fakes(self.mode)
        self.model, self.batch = fakes.of_module(model), fakes.of_batch(batch)
        values = Values()
        for real, fake in fakes.made():
            values.remember(fake, real)
        self.storages = StorageTable()
        self._add_lasting()
        self._add_inputs(self.batch, "batch")
        self.calls = CallTree(self.model, self.storages)
        self.recorder = Recorder(self.storages, self.calls, values)
        self.grads: dict[str, int] = {}

    def notes(self) -> list[str]:
        return [*self.recorder.notes, *self.recorder.values.notes]

    def run(self, find_loss: Callable[[Any], torch.Tensor], *, accumulation: bool, hold_output: bool) -> None:
        """Forward and backward."""
        if accumulation:
            self._add_grads()
        with self._explained("forward"), self._installed():
            out = self._forward()
            loss = find_loss(out)
            _check_loss(loss)
            if not hold_output:
                del out
            with self._explained("backward"):
                self.recorder.phase = Phase.BACKWARD
                loss.backward()  # type: ignore[no-untyped-call]
            self.storages.stop()
        added_to = {block for record in self.recorder.records for block in record.mutates}
        for name, parameter in self.model.named_parameters():
            block = NOWHERE if parameter.grad is None else self.storages.find(parameter.grad)
            if block is not None and block != NOWHERE and (not accumulation or block in added_to):
                self.grads[name] = block

    def run_forward(self) -> None:
        with self._explained("forward"), self._installed():
            self._forward()

    @contextlib.contextmanager
    def _explained(self, during: str) -> Iterator[None]:
        try:
            yield
        except TierwiseError:
            raise
        except Exception as error:
            raise explain(error, self.batch, during=during) from error

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        was_collecting = gc.isenabled()
        gc.disable()  # when cycles are collected depends on everything else in the process
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(torch.enable_grad())
                stack.enter_context(quiet_about_failures())
                stack.enter_context(transformers_asks_values(lambda tensor: self.recorder.values.of(tensor) is not None))
                stack.enter_context(cuda_autocast_lists())
                stack.enter_context(cuda_semantics())
                stack.enter_context(self.calls.watching())
                stack.enter_context(self.recorder.watching_backward())
                stack.enter_context(torch.device("cpu"))  # a default device that the user has set is the GPU
                stack.enter_context(SaysCudaMeansHere())
                stack.enter_context(self.recorder)
                yield
        finally:
            if was_collecting:
                gc.enable()

    def _forward(self) -> Any:
        with cuda_autocast(self.autocast):
            if isinstance(self.batch, Mapping):
                return self.model(**self.batch)
            return self.model(*self.batch) if isinstance(self.batch, (tuple, list)) else self.model(self.batch)

    def _add_lasting(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.storages.find(parameter) is None:
                self.storages.add(parameter, Role.PARAM, name, lasting=True)
        for name, buffer in self.model.named_buffers():
            if self.storages.find(buffer) is None:
                self.storages.add(buffer, Role.BUFFER, name, lasting=True)

    def _add_inputs(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if self.storages.find(value) is None:
                self.storages.add(value, Role.INPUT, name)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self._add_inputs(part, f"{name}.{key}")
        elif isinstance(value, (tuple, list)):
            for place, part in enumerate(value):
                self._add_inputs(part, f"{name}.{place}")

    def _add_grads(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                self.storages.add(parameter.grad, Role.GRAD, f"{name}.grad", lasting=True)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar loss in what a model returned: itself, .loss, ["loss"], or its first part."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    elif isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
            return candidate
    raise CaptureError(
        f"the model returned {_what_it_is(output)} and no loss; let it return a scalar, an object with .loss or a mapping with 'loss' (Hugging Face "
        f"models do when the batch has labels), or pass loss=, a function from its output to the loss"
    )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise CaptureError(f"loss= returned {_what_it_is(loss)}; it must return the scalar that backward starts from")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss depends on no parameter that requires a gradient, so there is no step to capture; check requires_grad and torch.no_grad"
        )


def _what_it_is(output: Any) -> str:
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"


def _autocast_dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    if autocast is None or isinstance(autocast, torch.dtype):
        found = autocast
    elif autocast in _AUTOCAST_DTYPES:
        found = _AUTOCAST_DTYPES[autocast]
    else:
        raise UnknownName("autocast dtype", str(autocast), _AUTOCAST_DTYPES)
    if found not in (None, torch.bfloat16, torch.float16):
        raise BadInput(f"autocast={found}; torch.autocast on CUDA casts to torch.bfloat16 or torch.float16")
    return found
