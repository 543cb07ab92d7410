"""A traced call's two graphs as code: at once, or later, when another process has done the work.

Lowering a graph is most of what a compilation takes. It is Python, so a second thread would not help; a second process does, and leaves what it has
made in torch's cache on disk, under the key by which this one looks for it.
"""

from __future__ import annotations

import contextlib
import copyreg
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .torch_compat import (
    CODE_SETTINGS,
    AsyncCompile,
    FakeTensorMode,
    FxGraphCache,
    GraphPickler,
    Options,
    ShapeEnv,
    TracingContext,
    compile_fx_inner,
    forget_donations,
    inductor_config,
    replaced,
    tracing,
)

__all__ = ["TracedCall", "as_bytes", "lower_from_bytes", "warm_up"]

ORIGINS = frozenset({"nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "fwd_source_fn_stack", "from_node", "stack_trace"})

OF_THE_USERS_OWN = (
    "inductor_choices_class", "post_grad_custom_post_pass", "post_grad_custom_pre_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
    "pre_grad_custom_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass",
)  # fmt: skip


class _Code:
    """A graph's code, once it is there."""

    call: Callable[[list[Any]], Any]


@dataclass(slots=True)
class _Graph:
    """What Inductor's compiler is given, where its code will be, and the code's key in the cache."""

    module: fx.GraphModule
    inputs: list[Any]
    settings: dict[str, Any]
    key: str = ""
    code: _Code = field(default_factory=_Code)

    def lower(self) -> None:
        self.code.call = compile_fx_inner(self.module, self.inputs, **self.settings)  # type: ignore[assignment]


@dataclass(slots=True)
class TracedCall:
    """The graphs of one call that are not lowered yet, forward first. What the cache on disk has already is no work."""

    graphs: list[_Graph] = field(default_factory=list)
    context: Any = None

    def compiler(self, module: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[[list[Any]], Any]:
        """In place of Inductor's: remembers the graph, and returns what will run once it is lowered."""
        forget_donations()
        graph = _Graph(module, list(inputs), settings)
        try:
            with _only_looking():
                graph.lower()
        except _NotThere as wanted:
            graph.key = wanted.key
            self.context = TracingContext.try_get()
            self.graphs.append(graph)
        code = graph.code  # and not the graph, which nobody needs afterwards

        def run(arguments: list[Any]) -> Any:
            return code.call(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def lower(self) -> None:
        """Code for all graphs, from the cache on disk where it is there by now."""
        with inductor_config.patch(CODE_SETTINGS), tracing(self.context):
            for graph, inputs in _in_turn(self.graphs):
                with contextlib.nullcontext() if inputs is not graph.inputs else _known_as(graph.key):
                    graph.inputs = inputs
                    graph.lower()
        self.graphs = []


def _in_turn(graphs: Sequence[_Graph]) -> Iterator[tuple[_Graph, list[Any]]]:
    """Each graph, to be lowered before the next, and its inputs: of what is not a forward's result the compiler chooses the strides, and a backward's
    inputs are as its forward leaves them."""
    strides: dict[str, Any] = {}
    for graph in graphs:
        names, inputs = _output_names(graph.module), _laid_out(graph.module, graph.inputs, strides)  # lowering changes the graph
        with TracingContext.report_output_strides() as found:
            yield graph, inputs
        strides = dict(zip(names, found or (), strict=False))


def _output_names(module: fx.GraphModule) -> list[str]:
    (output,) = module.graph.find_nodes(op="output")
    return [getattr(node, "name", "") for node in output.args[0]]


def _laid_out(module: fx.GraphModule, inputs: list[Any], strides: Mapping[str, Any]) -> list[Any]:
    """Inputs with these strides; the list itself if they have them."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    found = [strides.get(name) for name in names]
    laid_out = [
        value
        if stride is None or not isinstance(value, torch.Tensor) or tuple(value.stride()) == tuple(stride)
        else value.as_strided(value.size(), stride)
        for value, stride in zip(inputs, found, strict=True)
    ]
    return inputs if all(map(operator.is_, laid_out, inputs)) else laid_out


class _NotThere(BaseException):
    """Raised in place of lowering a graph that the cache does not have."""

    def __init__(self, key: str) -> None:
        self.key = key


@contextlib.contextmanager
def _only_looking() -> Iterator[None]:
    load = FxGraphCache.load_with_key

    def look(key: str, *args: Any, **kwargs: Any) -> Any:
        found, info = load(key, *args, **kwargs)
        if found is None:
            raise _NotThere(key)
        return found, info

    with replaced(FxGraphCache, load_with_key=staticmethod(look)):
        yield


@contextlib.contextmanager
def _known_as(key: str) -> Iterator[None]:
    """What is lowered inside is kept under this key. Another process would find another: keys depend on which parts of a graph are one object."""
    prepare = FxGraphCache.prepare_key

    def prepared(*args: Any, **kwargs: Any) -> Any:
        own, info = prepare(*args, **kwargs)
        return (key, own[1]) if own is not None else None, info

    with replaced(FxGraphCache, prepare_key=staticmethod(prepared)):
        yield


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Kernels are named and not compiled: whoever loads the code does that."""
    makers = [name for name in ("wait", "triton", "cpp", "cpp_pybinding") if hasattr(AsyncCompile, name)]
    with replaced(AsyncCompile, **dict.fromkeys(makers, lambda self, *args, **kwargs: None)):
        yield


def as_bytes(call: TracedCall) -> bytes:
    """A call for `lower_from_bytes` in another process, with the switches of this one that code depends on."""
    switches = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), _config()
    graphs = [(graph.module, graph.inputs, graph.settings, graph.key) for graph in call.graphs]
    with _formats_by_name(), _without_origins([graph.module for graph in call.graphs]):
        return GraphPickler.dumps((switches, graphs), Options(ops_filter=None))  # type: ignore[no-any-return]


def _config() -> dict[str, Any]:
    """Inductor's settings in this process, its user's among them. What has no form that another process understands is no other process's work."""
    if own := [name for name in OF_THE_USERS_OWN if getattr(inductor_config, name, None)]:
        raise NotImplementedError(f"torch._inductor.config has {own[0]}")
    return dict(inductor_config.save_config_portable()) | CODE_SETTINGS


def lower_from_bytes(data: bytes) -> None:
    """Leaves the code in the cache on disk, and nothing else."""
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    given: Any = GraphPickler.loads(data, fakes)
    (precision, deterministic, threads, config), graphs = given
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    with _without_kernels(), inductor_config.patch(config), tracing(TracingContext(fakes)):
        for graph, inputs in _in_turn([_Graph(*graph) for graph in graphs]):
            if inputs is not graph.inputs:  # another graph than the one whose key this is
                break
            with _known_as(graph.key):
                graph.lower()


def warm_up() -> None:
    """Lower something small, so that the first graph does not pay for what torch does once."""
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    with fakes:
        value = torch.empty(64, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    graph = fx.Graph()
    given = graph.placeholder("given")
    result = graph.call_function(torch.ops.aten.sigmoid.default, (given,))
    graph.output((result,))
    given.meta["val"] = result.meta["val"] = value
    with _without_kernels(), inductor_config.patch(fx_graph_cache=False), tracing(TracingContext(fakes)):
        _Graph(fx.GraphModule({}, graph), [value], {}).lower()


@contextlib.contextmanager
def _formats_by_name() -> Iterator[None]:
    """Memory formats are pickled as torch's. By default pickle looks for them in every module that has imported torch, the user's own among them, and
    names the first, which another process may not have."""
    kept = copyreg.dispatch_table.get(torch.memory_format)
    copyreg.pickle(torch.memory_format, lambda value: (_memory_format, (str(value).removeprefix("torch."),)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        del copyreg.dispatch_table[torch.memory_format]
        if kept is not None:
            copyreg.dispatch_table[torch.memory_format] = kept


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_origins(modules: Sequence[fx.GraphModule]) -> Iterator[None]:
    """Where nodes come from is told in classes of the user's, which another process does not have; code does not depend on it."""
    kept = [(node, node.meta) for module in modules for node in module.graph.nodes]
    for node, meta in kept:
        node.meta = {name: value for name, value in meta.items() if name not in ORIGINS}
    try:
        yield
    finally:
        for node, meta in kept:
            node.meta = meta
