"""One option of a region class as something to call in place of the module's forward, shared by all layers of the class.

    option_forward = compile_option(Block.forward, option)
    y = option_forward(block, x)            # any block of the class: parameters are inputs of the graph, so there is one compilation

Hooks of `torch.autograd.graph.saved_tensors_hooks` placed around the call see every tensor it saves, parameters and inputs as themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .elsewhere import Elsewhere, Job
from .lowering import TracedCall
from .options import Option
from .partition import OptionPartitioner
from .torch_compat import aot_with_partition, inductor_with_partition, kernels_together
from .tracing import as_one_graph, capture_errors_explained

__all__ = ["CompiledOption", "compile_option", "compiled_together"]

SECONDS_ELSEWHERE = 60.0  # of waiting for another process: none takes so long, and what one did not do is done here


class CompiledOption:
    """`forward(module, *args, **kwargs)` with the option's choice of saved values. Compiled at the first call, again for other shapes."""

    def __init__(self, forward: Callable[..., Any], option: Option, *, compile: bool, precision_casts: bool, donate: bool) -> None:
        self.option = option
        self.compilations = 0
        partitioner = OptionPartitioner(option, compiled=compile)

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.compilations += 1
            if compile:
                later = self._traced.compiler if self._traced is not None else None
                made = inductor_with_partition(gm, inputs, partitioner, precision_casts=precision_casts, donate=donate, compiler=later)
            else:
                made = aot_with_partition(gm, inputs, partitioner)

            def run(*args: Any) -> Any:
                if self._only_compiles:
                    raise _Compiled
                return made(*args)

            return run

        self._only_compiles = False
        self._traced: TracedCall | None = None
        self.can_wait = compile and precision_casts and not donate  # for code that TracedCall makes later
        self._plain = forward
        self._one_graph = as_one_graph(forward, backend, f"option_{option.name}".replace("-", "_"))

    def __call__(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Without gradients nothing is saved, and the module's own forward runs: an evaluation should not wait for a compiler."""
        if not torch.is_grad_enabled():
            return self._plain(module, *args, **kwargs)
        with capture_errors_explained():
            return self._one_graph(module, *args, **kwargs)

    def compile_for(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, traced: TracedCall | None = None) -> None:
        """Compile for such a call, which is not run; with `traced` only trace it, for code that is made later."""
        self._only_compiles, self._traced = True, traced
        try:
            with torch.enable_grad():
                self(module, *args, **kwargs)
        except _Compiled:
            pass
        finally:
            self._only_compiles, self._traced = False, None


class _Compiled(Exception):
    """Raised in place of running what was compiled."""


class Together:
    """Several options compiled at once: their graphs by other processes, where there are some, and their kernels while the next is traced.
    Nothing may run before the end of `compiled_together`."""

    def __init__(self, elsewhere: Elsewhere | None) -> None:
        self._elsewhere = elsewhere
        self._waiting: list[tuple[TracedCall, Job | None]] = []

    def compile(self, option: CompiledOption, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._elsewhere is None or not self._elsewhere.is_running or not option.can_wait:
            option.compile_for(module, args, kwargs)
            return
        traced = TracedCall()
        option.compile_for(module, args, kwargs, traced=traced)
        if traced.graphs:
            self._waiting.append((traced, self._elsewhere.lower_later(traced)))

    def finish(self) -> None:
        taken = []
        for traced, job in reversed(self._waiting):  # processes take the first ones first; what none has taken is done here
            if job is None or job.claim():
                _lower(traced)
            else:
                taken.append((traced, job))
        for traced, job in reversed(taken):
            job.wait(SECONDS_ELSEWHERE)
            _lower(traced)


def _lower(traced: TracedCall) -> None:
    with capture_errors_explained():
        traced.lower()


@contextlib.contextmanager
def compiled_together(elsewhere: Elsewhere | None = None) -> Iterator[Together]:
    with kernels_together():
        together = Together(elsewhere)
        yield together
        together.finish()


def compile_option(
    forward: Callable[..., Any], option: Option, *, compile: bool = True, precision_casts: bool = True, donate: bool = True
) -> CompiledOption:
    """The option of `describe(forward, ...)` with the same switches, ready to call.

    `forward` takes the module first, like `Block.forward`. With `compile` False the graphs run op by op, with the bits of eager
    (of a module that uses every random number it draws: torch does not draw the others).
    `precision_casts` rounds to 16 bits where eager would, even between fused ops: what is recomputed then has the bits of what was not saved.
    `donate` lets compiled code overwrite saved tensors once it has read them, which rules out a second backward through the same graph.
    """
    return CompiledOption(forward, option, compile=compile, precision_casts=precision_casts, donate=donate)
