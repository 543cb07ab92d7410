"""The only file of regions that touches private names of torch; all of them are in 2.11 and in 2.13, with these arguments.

Each name is wrapped in a function or re-exported under a plain one, so that when torch moves something there is one line to change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    min_cut_rematerialization_partition,
    reordering_to_mimic_autograd_engine,
)
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CodeCacheFuture, FxGraphCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.utils.flop_counter import flop_registry

__all__ = [
    "CAPTURE_ERRORS", "CODE_SETTINGS", "AsyncCompile", "Backend", "CustomPartitionerFn", "FakeTensor", "FakeTensorMode", "FxGraphCache",
    "GraphPickler", "Options", "ShapeEnv", "TracingContext", "aot_with_partition", "compile_fx_inner", "flops_of", "forget_donations",
    "has_flop_formula", "inductor_config", "inductor_with_partition", "inner_error", "is_higher_order", "kernels_together", "min_cut_saved",
    "ordered_for_memory", "replaced", "split_graph", "tracing", "with_early_parts", "without_duplicates",
]  # fmt: skip

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

CODE_SETTINGS = {
    "emulate_precision_casts": True,
    "layout_optimization": False,  # would turn a convolution's input and weight into copies in another layout, and save those
}
CAPTURE_ERRORS: tuple[type[Exception], ...] = (TorchDynamoException, FailOnRecompileLimitHit)
"""What torch.compile raises when it cannot make one graph of a function, or cannot compile it."""


def inner_error(error: BaseException) -> BaseException | None:
    """What a backend raised, where this is torch's report of it."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


def inductor_with_partition(
    gm: fx.GraphModule, inputs: Sequence[Any], partitioner: CustomPartitionerFn, *, precision_casts: bool, donate: bool, compiler: Any = None
) -> Callable[..., Any]:
    patches = CODE_SETTINGS | {"custom_partitioner_fn": partitioner, "emulate_precision_casts": precision_casts}
    inner = compiler or (compile_fx_inner if donate else _compile_without_donation)
    # Backward is compiled at once rather than when it first runs: if it cannot be, there is still time to do something else.
    with functorch_config.patch(donated_buffer=donate, force_non_lazy_backward_lowering=True):
        compiled: Any = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches)
        return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def replaced(owner: type, **members: Any) -> Iterator[None]:
    """A class with other members for as long as it lasts."""
    kept = {name: owner.__dict__[name] for name in members}
    for name, member in members.items():
        setattr(owner, name, member)
    try:
        yield
    finally:
        for name, member in kept.items():
            setattr(owner, name, member)


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """Kernels of all graphs that are compiled inside are waited for at the end. Torch waits for those of each graph, and the processors that compile
    them rest while the next graph is lowered. Nothing that is compiled inside may run there."""
    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    wait, mine = AsyncCompile.wait, threading.get_ident()

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == mine:
            waiting.append((self, scope))
        else:
            wait(self, scope)

    try:
        with replaced(AsyncCompile, wait=later):
            yield
    finally:
        made: dict[int, Any] = {}  # graphs share kernels, and none may be made ready twice
        for compiling, scope in waiting:
            for name, found in list(scope.items()):
                if isinstance(found, (Future, CodeCacheFuture)):
                    if id(found) not in made:
                        made[id(found)] = found.result()
                    scope[name] = made[id(found)]
            wait(compiling, scope)


def aot_with_partition(gm: fx.GraphModule, inputs: Sequence[Any], partition: Partition, *, compiler: Any = None) -> Callable[..., Any]:
    """Forward and backward op by op. Nothing is overwritten: the same saved tensors can serve a second backward."""
    backend = aot_autograd(fw_compiler=compiler or _boxed, partition_fn=partition, keep_inference_input_mutations=True)
    with functorch_config.patch(donated_buffer=False):
        return backend(gm, inputs)  # type: ignore[no-any-return]


def _boxed(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Runs a graph op by op. It takes its arguments in a list and empties it, so that each is freed after its last use."""
    forget_donations()
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _compile_without_donation(*args: Any, **kwargs: Any) -> Any:
    forget_donations()
    return compile_fx_inner(*args, **kwargs)


def forget_donations() -> None:
    """Say that no saved tensor may be overwritten. When the setting is off while compiling and on later, as it is by default, torch takes the
    missing answer for a yes and refuses a second backward."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def without_duplicates(gm: fx.GraphModule) -> None:
    """Drop dead ops and merge equal ones, as torch's own partitioner does first."""
    gm.graph.eliminate_dead_code()
    gm.graph = fx_graph_cse(gm.graph)
    gm.recompile()


def min_cut_saved(gm: fx.GraphModule, static_inputs: Sequence[int], forward_outputs: int) -> list[str]:
    """The names of what torch's own partitioner would save. It works on a copy."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    forward, _ = min_cut_rematerialization_partition(
        fx.GraphModule(gm, graph), None, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=list(static_inputs)
    )
    (output,) = forward.graph.find_nodes(op="output")
    return [node.name for node in output.args[0][forward_outputs:] if isinstance(node, fx.Node)]


def split_graph(gm: fx.GraphModule, saved: list[fx.Node], forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, the saved nodes in between."""
    return _extract_fwd_bwd_modules(gm, saved, [], num_fwd_outputs=forward_outputs)  # type: ignore[no-any-return]


def ordered_for_memory(gm: fx.GraphModule) -> fx.GraphModule:
    """A backward graph in which what is computed again comes just before its first use, and nothing without a use is left, not even a random op."""
    return raise_getitems(reordering_to_mimic_autograd_engine(gm))  # type: ignore[no-any-return]


def with_early_parts(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph in which an op's several results are taken apart at once, so that those nobody needs are freed."""
    return raise_getitems(gm)  # type: ignore[no-any-return]


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Multiplications and additions of a matmul, convolution or attention; 0 for every other op."""
    packet = getattr(op, "overloadpacket", None)
    if "scaled_dot_product" in str(packet) and "math" not in str(packet):
        # By hand: torch 2.11's formula refuses fewer heads of keys than of queries, and the CPU's kernels have none.
        is_backward = "backward" in str(packet)
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, rows, head_size = query.shape
        return int((5 if is_backward else 2) * 2 * batch * heads * rows * key.shape[2] * head_size)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def has_flop_formula(op: Any) -> bool:
    return getattr(op, "overloadpacket", None) in flop_registry


def is_higher_order(op: Any) -> bool:
    """Ops over functions: what they do besides computing their result is not known here."""
    return isinstance(op, torch._ops.HigherOrderOperator)
