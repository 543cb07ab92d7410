"""ssdtrain: write the saved tensors of the first layers to the disk, as many layers as it can write and read back without being waited for.

Paper    Wu, Park, Zhang, Hidayetoğlu, Mailthody, Huang, Lumetta, Hwu, DAC 2025, arXiv:2408.10013; the rule as in the authors' FlashTrain.
Idea     the first layers' tensors have the whole step to go out and come back; the last ones would only be in the way.
Rule     with v_i bytes saved and t_i seconds of forward in layer i, F seconds of forward in all and B bytes a second to the disk: the first layer
         n with  (Σ_{i<n} v_i + 2·v_n) / (3·F − 2·Σ_{i<n} t_i) > B,  and all behind it, stay on the device; so do the last layer, what is outside of
         layers and what is smaller than min_bytes. A tensor is written once when it is saved; in backward a layer's tensors are fetched while the
         layer behind it runs, and what is still being written is taken from the device.
Differs  B is the link's rate, not measured. Whether a tensor is still being written is told from the times of ops with everything on the device.
         A layer is a repeated block of the model (_blocks.py). min_bytes is 8 Mi elements of two bytes. There is no budget in it.
"""

from __future__ import annotations

from ..ir import Phase, Problem, Schedule
from ._blocks import Block, blocks
from ._gaps import Swap, build
from ._layers import saved_for_backward
from ._stash import leaves_at

DECIDES = "which layers' activations go to disk"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"nvme"}


def plan(problem: Problem, *, adaptive: bool = True, min_bytes: int = 16 << 20, tier: str = "nvme") -> Schedule:
    """adaptive: keep what the rule says; otherwise all layers but the last go out."""
    found = blocks(problem.graph)
    saved = _saved_in(problem, found, min_bytes)
    going = _first_kept(problem, found, saved, tier) if adaptive else len(found)
    return build(problem, _swaps(problem, found, saved[: max(0, min(going, len(found) - 1))], tier))


def _saved_in(problem: Problem, found: list[Block], min_bytes: int) -> list[list[tuple[int, int, int]]]:
    """For each layer, (storage, last forward use, first use after it) of what it saves; a storage belongs to the last layer that reads it."""
    block_of = {op: place for place, block in enumerate(found) for op in block.ops}
    saved: list[list[tuple[int, int, int]]] = [[] for _ in found]
    for entry in saved_for_backward(problem.graph):
        if entry[1] in block_of and problem.graph.storages[entry[0]].nbytes >= min_bytes:
            saved[block_of[entry[1]]].append(entry)
    return saved


def _first_kept(problem: Problem, found: list[Block], saved: list[list[tuple[int, int, int]]], tier: str) -> int:
    rate = problem.machine.link_between[problem.device_tier, tier].bytes_per_second
    seconds = problem.device_seconds
    forward = sum(seconds[op.id] for op in problem.graph.ops if op.phase is Phase.FORWARD)
    out_bytes, passed = 0, 0.0
    for place, block in enumerate(found):
        volume = sum(problem.graph.storages[storage].nbytes for storage, _, _ in saved[place])
        if out_bytes + 2 * volume > rate * (3 * forward - 2 * passed):
            return place
        out_bytes += volume
        passed += sum(seconds[op] for op in block.ops)
    return len(found)


def _swaps(problem: Problem, found: list[Block], saved: list[list[tuple[int, int, int]]], tier: str) -> list[Swap]:
    starts, machine, device = problem.op_starts, problem.machine, problem.device_tier
    swaps = []
    written = 0.0  # when the disk has written all so far
    for place, entries in enumerate(saved):
        for storage, last, needed in entries:
            in_at = min(found[place + 1].backward, needed)
            if in_at <= last + 1:
                continue
            out_at = leaves_at(problem.graph, storage, last)
            done = max(written, starts[out_at]) + machine.copy_seconds(problem.graph.storages[storage].nbytes, device, tier)
            if done <= starts[in_at]:
                written = done
                swaps.append(Swap(storage, tier, out_at, free_at=last + 1, in_at=in_at))
    return swaps
