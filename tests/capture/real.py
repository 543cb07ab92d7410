"""A real step on the CPU, watched from outside: what autograd saves, and how many bytes are held at most.

Nothing here uses a dispatch mode or a tensor subclass, which would change what autograd does: saved tensors come from saved_tensors_hooks, and
allocations from torch's own profiler. Scratch that a CPU kernel takes and gives back inside one op is not counted: the CPU's kernels are not CUDA's.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

HOST_SCALAR_BYTES = 8  # a Python number in `x * 0.5`, which autograd keeps on the host as a tensor of one double, on any device


def storages_of(tensors) -> dict[int, int]:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def saved_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[int]:
    """The bytes of each storage that autograd saves in a forward, without parameters, buffers and the batch, smallest first."""
    known = storages_of([*model.parameters(), *model.buffers(), *batch.values()])
    found: dict[int, int] = {}
    keep = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        found.update(storages_of([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(**batch)
    del out
    return sorted(nbytes for address, nbytes in found.items() if address not in known and nbytes)


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes held at once in the step beyond those held before it."""
    step()  # what is made once, on first use, is not the step's
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    finally:
        gc.enable()
    changes: list[int] = []
    open_at: dict[int, tuple[int, list[tuple[int, str]]]] = {}  # address -> (place in changes, the calls it was allocated in)
    for allocation, calls in _allocations(profiled.profiler.kineto_results.experimental_event_tree()):
        if allocation.alloc_size > 0:
            open_at[allocation.ptr] = (len(changes), calls)
            changes.append(allocation.alloc_size)
        elif allocation.ptr in open_at:
            place, before = open_at.pop(allocation.ptr)
            if any(call in before and is_one_op(call[1]) for call in calls):
                changes[place] = 0
            else:
                changes.append(allocation.alloc_size)
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def _allocations(roots):
    found = []

    def walk(event, calls):
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields, calls))
        for child in event.children:
            walk(child, [*calls, (event.id, event.name)])

    for root in roots:
        walk(root, [])
    found.sort(key=lambda entry: entry[0])
    return [(allocation, calls) for _, allocation, calls in found]


@functools.cache
def _one_ops() -> set[str]:
    """Aten ops that autograd calls as one, rather than as the smaller ops they are made of."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return {name.partition(".")[0] for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")}


def is_one_op(name: str) -> bool:
    return name in _one_ops()
