"""One training step run on fake tensors, every op written down as it passes below autograd: what it reads, what it writes, when bytes go.

Ops that only return views cost nothing and are left out. Fake tensors make autograd avoid a few in-place ops that it uses on real ones (it adds up
the gradients of a tensor with several users in place); those are put back, under the same conditions as autograd's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..ir import Phase, Role
from . import kinds
from .calls import ROOT, CallTree
from .cuda_semantics import ESTIMATED_RESERVE_NOTE, RULES
from .recipes import Recipe, recipe_of
from .storages import NOWHERE, StorageTable
from .torch_compat import DEVICE_QUERY, current_node_name, current_node_sequence, next_sequence
from .values import UNKNOWN, Values

_CPU = torch.device("cpu")
# In these backward formulas torch works in place on a tensor of its own, except for tensor subclasses: node, op.
_IN_PLACE_ON_REAL_TENSORS = {
    ("IndexBackward0", "index_put"),
    ("GatherBackward0", "scatter_add"),
    ("IndexSelectBackward0", "index_add"),
    ("BinaryCrossEntropyWithLogitsBackward0", "sub"),
    ("BinaryCrossEntropyWithLogitsBackward0", "mul"),
}


@dataclass(slots=True)
class Record:
    """What becomes an Op of the graph; numbers are blocks (storages.py) and calls (calls.py)."""

    name: str
    phase: Phase
    kind: str
    call: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    in_place: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    flops: int = 0
    precision: str = "fp32"
    is_replayable: bool = True
    is_empty: bool = False
    recipe: Recipe | None = None  # how to call it again by itself
    may_reuse: int | None = None  # the block whose bytes a real tensor would be written into, if nobody else holds it


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every aten op of the step after autograd has seen it."""

    def __init__(self, storages: StorageTable, calls: CallTree, values: Values) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages, self.calls, self.values = storages, calls, values
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.phase = Phase.FORWARD
        self.node_is_done = False
        self._node_origin: dict[int, tuple[int, str]] = {}  # autograd node -> (call, name) of the op that made it
        self._next_sequence = next_sequence()
        self._last_origin: tuple[int, str] = (ROOT, "")
        self._times_named: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is DEVICE_QUERY:
            return _CPU
        kwargs = kwargs or {}
        if self.phase is Phase.BACKWARD:
            self._follow_node()
        traits = kinds.traits(func)
        out = self._run(func, traits, args, kwargs)
        origin = self._origin(traits.base)
        if not traits.is_view:
            self._record(func, traits, origin, args, kwargs, out)
        return out

    def _run(self, func: Any, traits: kinds.Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.values.answer(func, args, kwargs) if traits.depends_on_values else UNKNOWN
        if out is UNKNOWN:
            rule = RULES.get(func)
            out = func(*args, **kwargs) if rule is None else rule(func, args, kwargs)
            self.values.follow(func, traits, args, kwargs, out)
        return out

    # -- where an op comes from ---------------------------------------------------------------------------------------------------

    def _follow_node(self) -> None:
        sequence = current_node_sequence()
        if sequence is not None:
            self._last_origin = self._node_origin.get(sequence, self._last_origin)
        self.calls.standing_for = self._last_origin[0]

    @property
    def _is_recomputing(self) -> bool:
        """Backward runs modules again: the model uses checkpointing."""
        return self.phase is Phase.BACKWARD and self.calls.current != ROOT

    def _origin(self, base: str) -> tuple[int, str]:
        """The call and the name of this op; autograd nodes made since the last op are this op's."""
        if self.phase is Phase.FORWARD or self._is_recomputing:
            call = self.calls.current
            module = self.calls.calls[call].module
            name = f"{module}.{_label(base)}" if module else _label(base)
        else:
            call, forward = self._last_origin
            name = f"{forward}.backward" if forward else "backward"
            name += "" if base.endswith("_backward") else f".{_label(base)}"
        upcoming = next_sequence()
        for sequence in range(self._next_sequence, upcoming):
            self._node_origin[sequence] = (call, name)
        self._next_sequence = upcoming
        return call, name

    def _numbered(self, name: str) -> str:
        times = self._times_named[name] = self._times_named.get(name, 0) + 1
        return name if times == 1 else f"{name}.{times}"

    # -- what an op does ----------------------------------------------------------------------------------------------------------

    def _record(self, func: Any, traits: kinds.Traits, origin: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = list(kinds.tensors_in(args, tuple(kwargs.values())))
        outputs = list(kinds.tensors_in(out))
        if any(tensor.layout is not torch.strided for tensor in outputs):
            raise CaptureError(f"{origin[1]} makes a sparse tensor, and capture knows dense ones only; use sparse=False in embeddings")
        overwritten = kinds.written_tensors(traits, args, kwargs) if traits.written_names or traits.base == "native_batch_norm" else []
        reads = list(dict.fromkeys(block for block in map(self._block_of, inputs) if block != NOWHERE)) if traits.reads_content else []
        writes, mutates, in_place = self._overwrite(overwritten, reads)
        for tensor in outputs:
            if self.storages.find(tensor) is None:
                writes.append(self.storages.add(tensor, Role.ACTIVATION))
        if not writes and not mutates:
            return
        is_backward = self.phase is Phase.BACKWARD and not self._is_recomputing
        grown = [block for block in mutates if self.storages.blocks[block].role is Role.GRAD]
        name = self._numbered(f"{self.storages.blocks[grown[0]].name}.add" if grown else origin[1])
        kind = kinds.kind(traits, args, is_backward=is_backward)
        record = Record(
            name=name,
            phase=self.phase,
            kind=kind,
            call=origin[0],
            reads=tuple(block for block in reads if block not in mutates),
            writes=tuple(writes),
            mutates=tuple(mutates),
            in_place=tuple(in_place),
            workspace_bytes=kinds.workspace_bytes(traits, args),
            flops=kinds.flops(func, traits, args, kwargs, out, inputs, outputs),
            precision=kinds.arithmetic(kind, kinds.precision(inputs, outputs)),
            is_replayable=traits.is_replayable,
            is_empty=traits.is_empty,
            may_reuse=self._reusable(traits.base, is_backward, reads),
            recipe=recipe_of(func, args, kwargs),
        )
        for place, block in enumerate(writes):
            self.storages.blocks[block].name = name if len(writes) == 1 else f"{name}:{place}"
        if traits.base == "_cudnn_rnn":
            self.notes.append(ESTIMATED_RESERVE_NOTE)
        self._append(record)
        if traits.base == "native_batch_norm" and mutates:
            # The kernel does both at once, but normalising again is harmless and moving the averages again is not.
            record.mutates = ()
            self._append(Record(f"{name}.running", self.phase, "running_statistics", origin[0], tuple(writes[1:]), (), tuple(mutates)))

    def _append(self, record: Record) -> None:
        self.records.append(record)
        self.storages.now = len(self.records)

    def _block_of(self, tensor: torch.Tensor) -> int:
        block = self.storages.find(tensor)
        if block is None:  # neither the module's nor the batch's nor made by an op: a constant the code holds on to
            block = self.storages.add(tensor, Role.BUFFER, f"constant.{len(self.storages.blocks)}", lasting=True)
        return block

    def _overwrite(self, tensors: list[torch.Tensor], reads: list[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        writes: list[int] = []
        mutates: list[int] = []
        in_place: list[tuple[int, int]] = []
        done: set[int] = set()
        for tensor in tensors:
            old = self._block_of(tensor)
            if old == NOWHERE or old in done:
                continue
            if self.storages.blocks[old].lasting:
                mutates.append(old)
                done.add(old)
            elif self._was_only_allocated(old):
                self.records.pop()
                self.storages.now = len(self.records)
                reads[:] = [block for block in reads if block != old]
                writes.append(old)
                done.add(old)
            else:
                new = self.storages.overwrite(tensor)
                writes.append(new)
                done.update((old, new))
                if old not in reads:
                    reads.append(old)
                if self.storages.blocks[new].nbytes == self.storages.blocks[old].nbytes:
                    in_place.append((old, new))
        return writes, mutates, in_place

    def _was_only_allocated(self, block: int) -> bool:
        """The op just before did nothing but allocate this block: it and the op that fills it are one."""
        return bool(self.records) and self.records[-1].is_empty and self.records[-1].writes == (block,)

    def _reusable(self, base: str, is_backward: bool, reads: list[int]) -> int | None:
        if not is_backward or not reads or torch.is_grad_enabled():
            return None
        is_summing = self.node_is_done and base == "add" and len(reads) == 2
        if is_summing or (current_node_name(), base) in _IN_PLACE_ON_REAL_TENSORS:
            return reads[0]
        return None

    # -- the autograd engine ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching_backward(self) -> Iterator[None]:
        """Know, inside backward, when a node is done and the engine itself adds up gradients; nested backwards (checkpointing) too."""
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._watch_nodes(tensors)
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = watched  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.backward = backward

    def _watch_nodes(self, tensors: Any) -> None:
        roots = [tensor.grad_fn for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)]
        pending, seen = [node for node in roots if node is not None], set(roots)
        while pending:
            node = pending.pop()
            node.register_prehook(self._on_node_start)
            node.register_hook(self._on_node_done)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)

    def _on_node_start(self, *_: Any) -> None:
        self.node_is_done = False

    def _on_node_done(self, *_: Any) -> None:
        self.node_is_done = True


def _label(base: str) -> str:
    """The name of an aten op as people would say it."""
    return base.strip("_").removeprefix("native_").removeprefix("scaled_dot_product_")


class SaysCudaMeansHere(TorchFunctionMode):
    """Code that names a device, as in x.to("cuda"), means the one the step runs on, and here that is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, int, torch.device)):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))
