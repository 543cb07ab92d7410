"""Parameters that move and are updated together: those of one region in one place, of one type, one after the other in flat arrays.

Every array of a unit (parameters, gradients, master, moments) has the same order and the same offsets. A unit is cut into chunks, the pieces in
which its state travels and is updated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...errors import BadInput, UnknownName
from ...ir.placement import owner, region_of
from ..offsets import round_up
from .placement import ON_DEVICE, Placement

ALIGNMENT_ELEMENTS = 256  # 512 bytes of bf16; and torch's vectorised loops end alike in a chunk and in the whole
STREAM_CHUNK_BYTES = 48 << 20  # of state at a time: the link's full rate, few kernels, and small staging
MASTERED_BYTES = 12  # state of an element with an fp32 master and moments
STREAM_CHUNK_ELEMENTS = STREAM_CHUNK_BYTES // MASTERED_BYTES
CPU_CHUNK_ELEMENTS = 16 << 20  # 4 ms at 4 G parameters a second: waking threads costs nothing beside it


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter's place in its unit."""

    parameter: nn.Parameter
    name: str
    offset: int  # in elements
    numel: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    group: int = -1  # of the optimizer; -1: it is not trained
    steps: int = 0  # updates so far

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a flat tensor of the whole unit, with the parameter's shape."""
        return flat.as_strided(self.size, self.stride, int(flat.storage_offset()) + self.offset)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape, its elements in the order the parameter has them in memory; not copied if it has them so."""
        if tensor.stride() != self.stride and tensor.numel() > 1:
            laid = torch.empty_strided(self.size, self.stride, dtype=tensor.dtype, device=tensor.device)
            laid.copy_(tensor)
            tensor = laid
        return tensor.as_strided((self.numel,), (1,))


@dataclass(eq=False, slots=True)
class Unit:
    name: str
    regions: tuple[str, ...]  # module paths; more than one where they share a parameter
    placement: Placement
    dtype: torch.dtype
    trained: bool
    slots: list[Slot] = field(default_factory=list)
    numel: int = 0  # with the gaps between parameters
    chunk_elements: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def chunks(self) -> list[slice]:
        size = self.chunk_elements
        return [slice(start, min(start + size, self.numel)) for start in range(0, self.numel, size)]

    def pieces(self, chunk: slice) -> Iterator[tuple[Slot, slice]]:
        """The parameters of a chunk, and which part of the unit each has in it."""
        for slot in self.slots:
            start, stop = max(slot.offset, chunk.start), min(slot.stop, chunk.stop)
            if start < stop:
                yield slot, slice(start, stop)


@dataclass(frozen=True, slots=True)
class Known:
    """A model's modules, all names of its parameters, and the optimizer's groups that have them."""

    modules: Collection[str]
    names: Mapping[nn.Parameter, Sequence[str]]
    groups: Mapping[nn.Parameter, int]

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Known:
        groups = {} if optimizer is None else {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        names = names_of(model)
        strangers = sum(1 for parameter in groups if parameter not in names)
        if strangers:
            raise BadInput(
                f"the optimizer has {strangers} parameters that are not the model's; give it model.parameters() of the model that is fitted"
            )
        return cls(dict(model.named_modules()).keys(), names, groups)


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Of each parameter, more than one where modules share it."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def units_of(
    known: Known,
    placements: Mapping[str, Placement],
    *,
    regions: Collection[str] = (),
    apart: bool = False,
    stream_chunk_elements: int = STREAM_CHUNK_ELEMENTS,
    cpu_chunk_elements: int = CPU_CHUNK_ELEMENTS,
) -> list[Unit]:
    """The model's parameters by path; those of no path are "", the model itself. A path within one of the `regions` is needed when that runs, others
    when their modules do. `apart`: those of no path are a unit for each region, whose gradients need not wait for each other's."""
    for path in placements:
        if path not in known.modules:
            raise UnknownName("submodule", path, known.modules)
    found: dict[tuple[tuple[str, ...], Placement, torch.dtype, bool, str | None], Unit] = {}
    announced = {path: region_of(path, regions) for path in ("", *placements)}
    for parameter, known_as in known.names.items():
        paths = tuple(dict.fromkeys(owner(name, placements) or "" for name in known_as))
        trained = parameter in known.groups
        needed, placement = tuple(dict.fromkeys(announced[path] for path in paths)), _placement(paths, placements, trained)
        own = owner(known_as[0], regions) if apart and paths == ("",) and trained and len(known_as) == 1 else None
        key = (needed, placement, parameter.dtype, trained, own)
        if key not in found:
            label = own or "+".join(region or "(model)" for region in needed) + ("" if trained else " (frozen)")
            found[key] = Unit(f"{label} {str(parameter.dtype).removeprefix('torch.')}", needed, placement, parameter.dtype, trained)
        found[key].slots.append(_slot(parameter, known_as[0], known.groups.get(parameter, -1)))
    for unit in found.values():
        unit.slots.sort(key=lambda slot: slot.group)
        for slot in unit.slots:
            slot.offset = unit.numel
            unit.numel = round_up(slot.stop, ALIGNMENT_ELEMENTS)
        whole = unit.placement.update == "device" and unit.placement.parameters != "nvme"
        size = cpu_chunk_elements if unit.placement.update == "cpu" and unit.placement.state == "host" else stream_chunk_elements
        unit.chunk_elements = max(unit.numel, 1) if whole else round_up(size, ALIGNMENT_ELEMENTS)
    return list(found.values())


def _slot(parameter: nn.Parameter, name: str, group: int) -> Slot:
    size, stride = tuple(parameter.shape), parameter.stride()
    used = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) if parameter.numel() else 0
    if used != parameter.numel():
        raise BadInput(f"{name} has strides {stride} for shape {size}, with gaps or overlaps; make it contiguous first")
    return Slot(parameter, name, 0, parameter.numel(), size, stride, group)


def _placement(paths: tuple[str, ...], placements: Mapping[str, Placement], trained: bool) -> Placement:
    """That of the first path. A parameter stays on the device if one of the paths that share it wants it there, or if it is updated there."""
    chosen = placements.get(paths[0], ON_DEVICE)
    stays = any(placements.get(path, ON_DEVICE).parameters == "device" for path in paths)
    if stays or (trained and chosen.update == "device"):
        chosen = Placement(chosen.state, chosen.update, "device", chosen.gradients)
    return chosen
