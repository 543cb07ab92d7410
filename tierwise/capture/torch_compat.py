"""The only file of capture that touches private names of torch; all of them are in 2.11 and in 2.13.

Each name is wrapped in a function or re-exported under a plain one, so that when torch moves something there is one line to change.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils.flop_counter import flop_registry

UntypedStorage = torch.UntypedStorage
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
NO_FAKE_IMPLEMENTATION = (UnsupportedOperatorException,)
DEVICE_QUERY = torch.ops.prim.device.default  # a fake tensor asks its mode for its own device, several times an op

_CPU = torch.device("cpu")
_LEAF_SEQUENCE = 2**64 - 1  # what torch gives the nodes that add into .grad


def new_fake_mode() -> FakeTensorMode:
    # A real tensor that user code keeps in a global is turned into a fake one where it is used.
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_from_parts(
    mode: FakeTensorMode, storage: UntypedStorage, offset: int, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> FakeTensor:
    """A fake CPU tensor over a meta storage; tensors over one storage share it."""
    meta = torch.empty(0, dtype=dtype, device="meta")
    meta.set_(storage, offset, size, stride)  # type: ignore[call-overload]
    return FakeTensor(mode, meta, _CPU)


def meta_storage(nbytes: int) -> UntypedStorage:
    return UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]


def next_sequence() -> int:
    """The number the next autograd node of this thread will get; an op that made a node sees it one higher than the node's."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def current_node_sequence() -> int | None:
    """The sequence number of the autograd node whose backward is running; None outside backward and in nodes that add into .grad."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return None if number == _LEAF_SEQUENCE else number


def current_node_name() -> str:
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def formula_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """The multiplications and additions of a matmul, convolution or attention; None for every other op."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    if "scaled_dot_product" in str(func):  # torch 2.11's formula refuses fewer heads of keys than of queries
        is_backward = "backward" in str(func)
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, rows, head_size = query.shape
        products = 5 if is_backward else 2
        return int(products * 2 * batch * heads * rows * key.shape[2] * head_size)
    return int(formula(*args, **kwargs, out_val=out))


def default_composite(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """What the op does without our override: its own decomposition into smaller ops."""
    return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextlib.contextmanager
def no_dispatch() -> Iterator[None]:
    """Real tensors compute for real, whatever modes are on."""
    with torch._C._DisableTorchDispatch():
        yield


@contextlib.contextmanager
def quiet_about_failures() -> Iterator[None]:
    """The fake tensor module logs a traceback of every shape error; the error is raised as well, and that is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def transformers_asks_values(knows: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Hugging Face asks fake tensors nothing and builds masks that eager training does not have; where a value is known, let it ask."""
    utils = sys.modules.get("transformers.utils.import_utils")
    original = getattr(utils, "is_fake_tensor", None)
    if utils is None or original is None:
        yield
        return
    utils.is_fake_tensor = lambda tensor: original(tensor) and not knows(tensor)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.is_fake_tensor = original  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        yield


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether this torch has a kernel of an aten op for a dispatch key, whatever hardware is there."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", dispatch_key))


@contextlib.contextmanager
def overriding(kernels: dict[str, Callable[..., Any]], dispatch_key: str) -> Iterator[None]:
    """Replace kernels of aten ops, named as "softmax.int", for one dispatch key while the context lasts."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that a kernel was overridden; here it is meant, and undone
            for name, kernel in kernels.items():
                library.impl(name, kernel, dispatch_key)
        _forget_dispatch(kernels)
        yield
    finally:
        library._destroy()
        _forget_dispatch(kernels)


def _forget_dispatch(names: Iterable[str]) -> None:
    """Torch remembers in Python which kernel an op resolves to; a memory of ours would outlive the override and leave real ops without gradients."""
    for name in names:
        base, _, overload = name.partition(".")
        getattr(getattr(torch.ops.aten, base), overload or "default")._dispatch_cache.clear()


@contextlib.contextmanager
def autocast_for_cuda_runs_on_cpu() -> Iterator[None]:
    """While the context lasts, torch.autocast("cuda") in any code acts on CPU tensors, and who asks whether autocast is on hears yes.

    A build without CUDA turns such a context off with a warning, and a CUDA build leaves CPU tensors alone.
    """
    cls = torch.amp.autocast_mode.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__

    def new_init(self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        kind = torch.device(device_type).type
        if kind == "cuda" and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        init(self, "cpu" if kind == "cuda" else device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def mirror() -> None:
        torch.set_autocast_enabled("cuda", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else cuda_dtype)

    def new_enter(self: Any) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]
        mirror()
        return entered

    def new_leave(self: Any, *exception: Any) -> Any:
        left = leave(self, *exception)
        mirror()
        return left

    cuda_state, cuda_dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    cls.__init__, cls.__enter__, cls.__exit__ = new_init, new_enter, new_leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__, cls.__enter__, cls.__exit__ = init, enter, leave  # type: ignore[method-assign]
        torch.set_autocast_enabled("cuda", cuda_state)
        torch.set_autocast_dtype("cuda", cuda_dtype)


def aot_joint(stack: contextlib.ExitStack, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.GraphModule:
    """The forward and backward of a module as one aten graph; `described_input` and `described_output` say what its ends are."""
    return aot_export_joint_with_descriptors(stack, module, args, kwargs).graph_module


def described_input(node: torch.fx.Node) -> tuple[str, str]:
    """What a placeholder of a joint graph is (param, buffer, tangent, activation, or other), and its name in the module if it has one."""
    description = node.meta.get("desc")
    if isinstance(description, descriptors.ParamAOTInput):
        return "param", description.target
    if isinstance(description, descriptors.BufferAOTInput):
        return "buffer", description.target
    if isinstance(description, descriptors.TangentAOTInput):
        return "tangent", node.name
    return ("activation" if isinstance(description, descriptors.PlainAOTInput) else "other"), node.name


def described_outputs(output: torch.fx.Node) -> list[tuple[torch.fx.Node, str]]:
    """The outputs of a joint graph, each a gradient, the new value of an input that the module overwrites, or what the module returns."""
    found = []
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
        if isinstance(node, torch.fx.Node):
            kind = "grad" if isinstance(description, descriptors.GradAOTOutput) else "output"
            found.append((node, "mutation" if isinstance(description, descriptors.InputMutationAOTOutput) else kind))
    return found
