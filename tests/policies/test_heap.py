from tierwise.policies._heap import TwoEndedHeap


def test_first_fit_from_either_end():
    heap = TwoEndedHeap(100)
    assert [heap.take_low(30), heap.take_high(20), heap.take_low(10)] == [0, 80, 30]
    heap.give_back(0, 30)
    assert heap.take_low(31) == 40  # the hole of 30 below is too small
    assert heap.take_high(25) == 5  # from above: 9 are left between 71 and 80, so the hole at 0 serves, at its upper end
    assert heap.largest_hole_bytes() == 9


def test_what_does_not_fit_takes_nothing():
    heap = TwoEndedHeap(10)
    assert heap.take_low(4) == 0
    assert heap.take_low(7) is None
    assert heap.take_high(7) is None
    assert heap.take_high(6) == 4


def test_neighbours_become_one_hole_again():
    heap = TwoEndedHeap(30)
    offsets = [heap.take_low(10) for _ in range(3)]
    heap.give_back(offsets[0], 10)
    heap.give_back(offsets[2], 10)
    assert heap.largest_hole_bytes() == 10
    heap.give_back(offsets[1], 10)
    assert heap.largest_hole_bytes() == 30


def test_whole_pages():
    heap = TwoEndedHeap(20, page_bytes=8)  # two pages, and four bytes nobody gets
    assert heap.take_high(5) == 8
    assert heap.take_low(1) == 0
    assert heap.take_low(1) is None
    heap.give_back(8, 5)
    assert heap.largest_hole_bytes() == 8


def test_no_bytes_need_no_room():
    heap = TwoEndedHeap(10)
    assert heap.take_low(10) == 0
    assert heap.take_low(0) is not None
    assert heap.take_high(0) is not None
    heap.give_back(0, 0)
    assert heap.largest_hole_bytes() == 0
