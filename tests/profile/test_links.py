"""Rates of a disk in both directions at once, worked by hand: it writes 3 bytes a second and reads 6, each alone."""

from __future__ import annotations

import pytest

from tierwise.ir import Link
from tierwise.profile.links import DiskRates, measure_disk

TO_DISK, FROM_DISK = Link("hbm", "nvme", {"out": 9.0}), Link("nvme", "dram", {})


def test_a_disk_that_does_one_thing_at_a_time():
    """A byte written and a byte read take 1/3 + 1/6 s one after the other: 4 bytes a second."""
    rates = DiskRates(3.0, 6.0, both=4.0)
    assert rates.applied(TO_DISK).lanes == {"out": 9.0, "disk write": 3.0, "disk": 3.0}
    assert rates.applied(FROM_DISK).lanes == {"disk read": 6.0, "disk": 6.0}


def test_a_disk_that_does_half_as_much_again_when_both_are_asked():
    """12 bytes each way at 6 bytes a second together take 4 s: of what they share, 12 / 4.5 and 12 / 9."""
    rates = DiskRates(3.0, 6.0, both=6.0)
    shared = [rates.applied(link).lanes["disk"] for link in (TO_DISK, FROM_DISK)]
    assert shared == [4.5, 9.0] and sum(12 / rate for rate in shared) == pytest.approx(4.0)
    assert rates.applied(TO_DISK).bytes_per_second == 3.0  # alone it is as fast as it was alone


def test_both_at_once_are_not_slower_than_one_after_the_other():
    """What a short test says of that is noise, and copies that are alone must not pay for it."""
    assert DiskRates(3.0, 6.0, both=2.0).applied(FROM_DISK).lanes == {"disk read": 6.0, "disk": 6.0}


def test_links_that_do_not_touch_the_disk_stay():
    link = Link("hbm", "dram", {"out": 9.0})
    assert DiskRates(3.0, 6.0, 4.0).applied(link) == link


def test_all_three_are_measured(tmp_path):
    rates = measure_disk(tmp_path, 64 << 20)
    assert min(rates.write, rates.read, rates.both) > 0 and not list(tmp_path.iterdir())
