"""How many bytes placements take, in every tier, before anything is placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..host_pool import ALIGNMENT, PAGE_BYTES
from ..offsets import round_up
from .gradients import LEAVING_BYTES
from .placement import Needs
from .updates import STAGING_BUFFERS, Stored, ring_bytes, staging_bytes

SLACK_BYTES = 1 << 20  # factors of gradients, and holes between blocks


def shelf_bytes(stored: Sequence[Stored], in_turn: int | None) -> list[int]:
    """Blocks of host memory for gradients: one for each unit, or so many of the largest for all units that are updated as soon as they can be.
    Parameters that several regions share are not: they wait for step()."""
    wanted = [home.unit for home in stored if home.wants_gradients and home.unit.numel]
    alone = [unit.nbytes for unit in wanted if len(unit.regions) > 1]
    others = [unit.nbytes for unit in wanted if len(unit.regions) == 1]
    if in_turn is None or in_turn >= len(others):
        return alone + others
    return alone + [max(others)] * in_turn


def needs_of(
    stored: Sequence[Stored],
    by_region: Mapping[str, Sequence[Stored]],
    order: Sequence[str],
    ahead: int,
    blocks: int | None,
    update: str,
    leaving_bytes: int = LEAVING_BYTES,
) -> Needs:
    """`order` is the one in which regions run; so many regions `ahead` their parameters come; so many `blocks` of host memory have
    gradients in turn, None for each its own. Gradients that wait on the device for their updates are in the plan itself."""
    device = host = parameters = disk = written = 0
    for home in stored:
        unit, place = home.unit, home.unit.placement
        size = home.dtype.itemsize
        if unit.trained and place.state == "device":
            device += home.row_count * unit.numel * size
        for chunk in unit.chunks():
            count = chunk.stop - chunk.start
            if unit.trained and place.state == "host":
                host += round_up(max(1, home.row_count * count * size), ALIGNMENT)  # a block is a block, also of no bytes
            elif unit.trained and place.state == "nvme":
                disk += round_up(home.row_count * count * size, PAGE_BYTES)
                written += round_up(home.row_count * count * size, PAGE_BYTES)
            if place.parameters == "nvme":
                disk += round_up(count * unit.dtype.itemsize, PAGE_BYTES)
                written += round_up(count * unit.dtype.itemsize, PAGE_BYTES) * unit.trained
        if place.parameters == "host":
            parameters += round_up(unit.nbytes, PAGE_BYTES)
        elif place.parameters == "nvme" and (place.update == "device" or not unit.trained):
            host += 2 * round_up(min(unit.chunk_elements, unit.numel) * unit.dtype.itemsize, PAGE_BYTES)
    host += sum(round_up(nbytes, ALIGNMENT) for nbytes in shelf_bytes(stored, blocks))
    host += sum(count * round_up(nbytes, PAGE_BYTES) for nbytes, count in ring_bytes(stored).values())
    largest = [slot.numel * home.unit.dtype.itemsize for home in stored if home.unit.placement.gradients == "host" for slot in home.unit.slots]
    host += 2 * round_up(max(largest, default=0), ALIGNMENT)  # gradients of another batch, on their way to be added
    leaving = sum(home.unit.nbytes for home in stored if home.unit.trained and home.unit.placement.gradients == "host")
    leaving = min(leaving, leaving_bytes)
    if update == "after":  # a unit's gradients are laid together
        leaving += max((home.unit.nbytes for home in stored if home.gradients_wait), default=0)
    window = [sum(home.unit.nbytes for home in by_region.get(path, ()) if home.unit.placement.parameters != "device") for path in order]
    # In backward one region is done when the next has begun, and the one after that is already coming.
    span = ahead + 2
    return Needs(
        device_bytes=device + STAGING_BUFFERS * staging_bytes(stored),
        leaving_bytes=leaving,
        host_bytes=host + (SLACK_BYTES if host else 0),
        parameter_host_bytes=parameters,
        nvme_bytes=disk,
        written_bytes_per_step=written,
        staging_bytes=STAGING_BUFFERS * staging_bytes(stored),
        window_bytes=max((sum(window[place : place + span]) for place in range(len(window))), default=0),
    )
