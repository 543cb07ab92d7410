import numpy as np

from tierwise.ir import Link
from tierwise.policies._buckets import Buckets

OUT = Link("hbm", "dram", {"out": 10.0})
DISK = Link("hbm", "nvme", {"out": 10.0, "disk": 2.0})
SECONDS = [1.0, 1.0, 1.0, 1.0]  # 10 bytes over OUT during each op, 2 over DISK


def test_a_copy_ends_in_the_bucket_that_takes_its_last_byte():
    buckets = Buckets(SECONDS, [OUT])
    assert [buckets.end_op(OUT, 0, 10), buckets.end_op(OUT, 0, 11), buckets.end_op(OUT, 1, 30)] == [0, 1, 3]
    assert buckets.end_op(OUT, 1, 31) == 4  # not in this step


def test_a_fetch_starts_in_the_latest_bucket_that_is_early_enough():
    buckets = Buckets(SECONDS, [OUT])
    assert [buckets.start_op(OUT, 4, 10), buckets.start_op(OUT, 4, 11), buckets.start_op(OUT, 2, 20)] == [3, 2, 0]
    assert buckets.start_op(OUT, 1, 11) == -1  # the step begins too late


def test_what_is_filled_is_not_there_for_others():
    buckets = Buckets(SECONDS, [OUT])
    assert buckets.fill_from(OUT, 0, 15) == 0  # ops 0 and half of 1
    assert buckets.end_op(OUT, 0, 5) == 1
    assert buckets.end_op(OUT, 0, 6) == 2
    assert buckets.fill_until(OUT, 4, 12) == 0  # all of op 3 and two bytes of op 2
    assert buckets.spare_bytes(OUT, 0, 4) == 40 - 15 - 12
    assert buckets.spare_bytes(OUT, 2, 3) == 8
    assert buckets.start_op(OUT, 4, 8) == 2
    assert buckets.start_op(OUT, 4, 9) == 1


def test_what_does_not_fit_is_left_over():
    buckets = Buckets(SECONDS, [OUT])
    assert buckets.fill_from(OUT, 3, 25) == 15
    assert buckets.fill_until(OUT, 1, 25) == 15
    assert buckets.spare_bytes(OUT, 0, 1) == buckets.spare_bytes(OUT, 3, 4) == 0


def test_links_that_share_a_lane_share_its_time():
    buckets = Buckets(SECONDS, [OUT, DISK])
    assert buckets.end_op(DISK, 0, 4) == 1  # the disk is the slower of its two lanes
    buckets.fill_from(DISK, 0, 4)  # a fifth of a second of "out" in each of two ops
    assert [buckets.spare_bytes(OUT, op, op + 1) for op in range(4)] == [8, 8, 10, 10]
    buckets.fill_from(OUT, 2, 20)  # "out" is full from op 2 on, and with it the disk behind it
    assert buckets.spare_bytes(DISK, 2, 4) == 0
    assert buckets.end_op(DISK, 0, 1) == 4


def test_many_at_a_time_are_each_as_if_alone():
    buckets = Buckets([0.5, 2.0, 0.0, 1.0], [OUT])  # 5, 20, 0 and 10 bytes
    buckets.fill_from(OUT, 1, 7)
    starts, ends, nbytes = np.array([0, 1, 3, 0]), np.array([4, 2, 3, 1]), np.array([6.0, 13.0, 11.0, 5.0])
    assert buckets.end_ops(OUT, starts, nbytes).tolist() == [buckets.end_op(OUT, *pair) for pair in zip(starts, nbytes, strict=True)] == [1, 1, 4, 0]
    assert buckets.start_ops(OUT, ends, nbytes).tolist() == [buckets.start_op(OUT, *pair) for pair in zip(ends, nbytes, strict=True)] == [3, 1, 1, 0]
