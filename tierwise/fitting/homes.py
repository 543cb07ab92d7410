"""What the lasting state of each part of a model can choose from: whose state and parameters may leave the device, and where updates may run."""

from __future__ import annotations

import torch
from torch import nn

from ..execute.states.torchs import is_piecewise
from ..execute.states.units import names_of
from ..ir import ON_DEVICE, Graph, Placement
from ..ir.placement import owner

MOVABLE = (torch.float32, torch.bfloat16, torch.float16)
# Of a region's parameters: what is placed in parts. On an H200, of the step without a budget: in parts of regions of 411 MB (llama of 6.7 G) 1.21 to
# 1.26 in 24 GiB, whole 1.31 to 1.39, and in 40 GB 1.04, whole 1.03 to 1.17; of 231 MB (3.2 G) about as long either way.
LARGE_BYTES = 128 << 20
MOST_PARTS = 6  # of a region: what is smaller than that stays with others


def homes_of(
    model: nn.Module,
    graph: Graph,
    optimizer: torch.optim.Optimizer | None,
    *,
    masters: str | None,
    update: str,
    disk: bool,
    on_card: bool,
) -> dict[str, tuple[Placement, ...]]:
    """By module path, in the order they run. Without an optimizer of torch's nothing is known of updates, so nothing moves.

    Our own formula has the same bits everywhere. Torch's own updates have other last bits on the CPU than on a card, so there they run on the
    CPU only where they cannot pass through the card piece by piece."""
    if optimizer is None or not type(optimizer).__module__.startswith("torch.optim"):
        return {}
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = names_of(model)
    parts = {region: parts_of(model, region) for region in regions_of(graph)}
    found: dict[str, list[nn.Parameter]] = {path: [] for region in parts for path in (region, *parts[region])}
    for parameter, known_as in names.items():
        path = owner(known_as[0], found)
        if path is None:
            path = known_as[0].rpartition(".")[0]
            if not path:
                continue  # of the model itself: there is no module whose call would tell when it is needed
        found.setdefault(path, []).append(parameter)
    pieces = masters == "fp32" or is_piecewise(optimizer)
    on_cpu = masters == "fp32" or not on_card or not pieces
    homes = {}
    for path, parameters in found.items():
        if not parameters or any(parameter.dtype not in MOVABLE for parameter in parameters) or _is_sparse(model.get_submodule(path)):
            continue
        alone = all(len(names[parameter]) == 1 for parameter in parameters)
        homes[path] = _placements(any(parameter in trained for parameter in parameters), alone, pieces, on_cpu, update, disk)
    return homes


def regions_of(graph: Graph) -> list[str]:
    """Modules whose calls are planned, in the order they run."""
    return list(dict.fromkeys(call.module for call in graph.calls if call.module))


def parts_of(model: nn.Module, region: str) -> list[str]:
    """Of a large region, modules within it that each have a good part of its parameters: these move by themselves, so that the cpu and the link share
    the region's updates. What is left of it, or else the smallest of them, is the region's own."""
    module = model.get_submodule(region)
    whole = _parameter_bytes(module)
    if whole < LARGE_BYTES:
        return []
    sizes = {f"{region}.{name}": _parameter_bytes(part) for name, part in module.named_modules() if name}
    large = [path for path, nbytes in sizes.items() if nbytes * MOST_PARTS >= whole]
    found = [path for path in large if not any(other.startswith(f"{path}.") for other in large)]
    if found and (whole - sum(sizes[path] for path in found)) * MOST_PARTS < whole:
        found.remove(min(found, key=sizes.__getitem__))
    return found


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _placements(trained: bool, alone: bool, pieces: bool, on_cpu: bool, update: str, disk: bool) -> tuple[Placement, ...]:
    """From the most on the device to the least. Parameters that several modules share stay, since each needs them at its own time."""
    homes = ("device", *(("host",) if alone else ()))
    if not trained:
        return tuple(Placement(parameters=home) for home in homes)
    # What is updated after backward can wait for that in host memory: on the device all of it weighs as much as the parameters.
    waits = "host" if update == "after" else "device"
    found = [ON_DEVICE]
    for home in homes:
        if on_cpu:
            found.append(Placement("host", "cpu", home, "host"))
        if pieces:
            found += [Placement("host", "streamed", home, gradients) for gradients in dict.fromkeys(("device", waits))]
            if disk:
                found.append(Placement("nvme", "cpu", home, "host") if on_cpu else Placement("nvme", "streamed", home, waits))
    if pieces and disk and alone:
        found.append(Placement("nvme", "cpu" if on_cpu else "streamed", "nvme", "host" if on_cpu else waits))
    return tuple(found)


def _is_sparse(module: nn.Module) -> bool:
    return any(getattr(part, "sparse", False) for part in module.modules())
