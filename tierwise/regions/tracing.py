"""A function through torch.compile as exactly one graph, with a code object of its own; what stands in the way said in one sentence."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import CannotCapture
from .torch_compat import CAPTURE_ERRORS, Backend, inner_error

__all__ = ["as_one_graph", "capture_errors_explained", "cause_of"]


def as_one_graph(forward: Callable[..., Any], backend: Backend, name: str) -> Callable[..., Any]:
    """`forward(module, *args, **kwargs)` compiled with the backend: one graph per set of shapes, or an error.

    torch.compile keeps what it compiled with the code object of a function. A new one for every option keeps options apart, keeps each
    within the limit on recompilations, leaves alone what the user compiled, and is freed with the option.
    """

    def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    own = types.FunctionType(code, call.__globals__, name, call.__defaults__, call.__closure__)
    return torch.compile(own, backend=backend, fullgraph=True, dynamic=False)


@contextlib.contextmanager
def capture_errors_explained() -> Iterator[None]:
    try:
        yield
    except CAPTURE_ERRORS as error:
        cause = cause_of(error)
        if isinstance(cause, (CannotCapture, torch.OutOfMemoryError)):
            raise cause from None
        raise CannotCapture(_first_words(cause)) from error


def cause_of(error: BaseException) -> BaseException:
    """What went wrong inside a backend, rather than the compiler's report of it."""
    while (inner := inner_error(error)) is not None:
        error = inner
    return error


def _first_words(error: BaseException) -> str:
    """What the compiler says, without its hints and its stack: the headline and the explanation where it has them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    explained = [line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")]
    said = f"{lines[0]}. {explained[0]}" if explained else f"{type(error).__name__}: {lines[0]}"
    return said.rstrip(".")
