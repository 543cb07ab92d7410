"""Placements from four numbers, worked by hand: four units of ten bytes of state, two of parameters and two of gradients."""

from __future__ import annotations

from types import SimpleNamespace

from tierwise.ir import ON_DEVICE, Placement, Tier
from tierwise.lower.splits import Split, Splits
from tierwise.lower.states import StateUnit

UNITS = [StateUnit(path, (), (), parameter_bytes=2, state_bytes=10, gradient_bytes=2) for path in "abcd"]
CPU, CPU_AWAY = Placement("host", "cpu", "device", "host"), Placement("host", "cpu", "host", "host")
STREAMED, STREAMED_AWAY = Placement("host", "streamed", "device", "host"), Placement("host", "streamed", "host", "host")


def splits(host_bytes=1000, options=(ON_DEVICE, CPU, CPU_AWAY, STREAMED, STREAMED_AWAY), update="after", disk_bytes=0):
    tiers = {"dram": Tier("dram", host_bytes)} | ({"nvme": Tier("nvme", disk_bytes)} if disk_bytes else {})
    machine = SimpleNamespace(capacity=lambda tier: tiers[tier].capacity_bytes, tier_named=tiers)
    return Splits(SimpleNamespace(homes=dict.fromkeys("abcd", options), problem=SimpleNamespace(machine=machine)), UNITS, {}, update)


def test_nothing_leaves():
    assert splits().states(Split()) == {}


def test_a_part_that_stays_is_named_where_the_rest_of_its_region_leaves():
    units = [StateUnit(path, (), (), 2, 10, 2) for path in ("a.first", "a", "a.second", "b")]
    found = Splits(SimpleNamespace(homes=dict.fromkeys((unit.path for unit in units), (ON_DEVICE, CPU)), problem=splits().menu.problem), units, {})
    assert found.states(Split(3)) == {"a.first": ON_DEVICE, "a": CPU, "a.second": CPU, "b": CPU}
    assert found.states(Split(2)) == {"a.second": CPU, "b": CPU}


def test_state_leaves_from_the_end_and_every_other_update_is_streamed():
    assert splits().states(Split(4, 0, 0.5)) == {"a": CPU, "b": STREAMED, "c": CPU, "d": STREAMED}
    assert splits().states(Split(2, 0, 0.0)) == {"c": CPU, "d": CPU}


def test_parameters_leave_first_where_the_cpu_updates_them():
    assert splits().states(Split(4, 1, 0.5)) == {"a": CPU, "b": STREAMED, "c": CPU_AWAY, "d": STREAMED}
    assert splits().states(Split(4, 3, 0.5)) == {"a": CPU_AWAY, "b": STREAMED, "c": CPU_AWAY, "d": STREAMED_AWAY}


def test_parameters_of_early_layers_leave_but_not_the_first_and_not_what_is_used_again_and_again():
    units = [StateUnit(path, (), (), 2, 10, 2, uses=9 if path == "d" else 2) for path in "abcde"]
    found = Splits(SimpleNamespace(homes=dict.fromkeys("abcde", (ON_DEVICE, CPU, CPU_AWAY)), problem=splits().menu.problem), units, {})

    def away(count):
        return [path for path, place in found.states(Split(5, count, 0.0)).items() if place == CPU_AWAY]

    assert [away(count) for count in (1, 2, 3, 5)] == [["c"], ["c", "e"], ["a", "c", "e"], ["a", "b", "c", "d", "e"]]


def test_in_backward_the_first_unit_is_streamed():
    assert splits(update="backward").states(Split(4, 0, 0.5)) == {"a": STREAMED, "b": CPU, "c": STREAMED, "d": CPU}
    assert splits(update="backward").states(Split(2, 0, 0.5)) == {"c": STREAMED, "d": CPU}  # the first that leaves


def test_gradients_wait_on_the_device_for_the_first_updates_that_come_there():
    held = Placement("host", "streamed", "device", "device")
    found = splits(options=(ON_DEVICE, CPU, held, STREAMED))
    assert found.states(Split(4, 0, 1.0, held=0.5)) == {"a": held, "b": held, "c": STREAMED, "d": STREAMED}
    assert found.states(Split(4, 0, 0.5, held=1.0)) == {"a": CPU, "b": held, "c": CPU, "d": held}


def test_who_has_one_way_goes_that_way():
    assert splits(options=(ON_DEVICE, STREAMED)).states(Split(2, 0, 0.0)) == {"c": STREAMED, "d": STREAMED}


def test_what_has_no_room_in_host_memory_stays():
    """Nine tenths of so many bytes: an update takes ten of state, and two of gradients if they wait until backward is over."""
    found = splits(host_bytes=34)
    assert found.states(Split(4, 0, 0.0)) == {"a": CPU, "b": CPU}
    assert found.lacks == {"dram": 4 * 12}
    assert splits(host_bytes=34, update="backward").states(Split(4, 0, 0.0)) == {"a": CPU, "b": CPU, "c": CPU}


def test_parameters_have_host_memory_before_state_that_may_be_on_disk():
    """13 bytes: all parameters, 8, and then no state, rather than one unit's state and parameters, 12, and the others' parameters on disk."""
    on_disk, all_on_disk = Placement("nvme", "cpu", "host", "host"), Placement("nvme", "cpu", "nvme", "host")
    found = splits(host_bytes=15, options=(ON_DEVICE, CPU_AWAY, on_disk, all_on_disk), update="backward", disk_bytes=1000)
    assert found.states(Split(4, 4, 0.0)) == dict.fromkeys("abcd", on_disk)
    assert found.states(Split(4, 4, 0.0), short_bytes=6) == {"a": on_disk, "b": on_disk, "c": on_disk, "d": all_on_disk}


def test_shares_of_a_split():
    assert Split(state=3, parameters=1, streamed=0.25).shares_of(4) == (0.5625, 0.1875, 0.25)


def test_which_splits_leave_less_room():
    tried = Split(state=20, parameters=10, streamed=0.5)
    assert Split(20, 4, 0.5).leaves_less_room_than(tried) and Split(12, 10, 0.25).leaves_less_room_than(tried)
    assert not Split(21, 10, 0.5).leaves_less_room_than(tried) and not Split(20, 11, 0.5).leaves_less_room_than(tried), "more is away"
    assert not Split(20, 10, 0.0).leaves_less_room_than(tried), "nothing passes through the device"
    assert Split(20, 10, 0.5, held=1.0).leaves_less_room_than(tried) and not tried.leaves_less_room_than(Split(20, 10, 0.5, held=1.0))
