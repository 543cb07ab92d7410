from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierwise.execute.lanes import Signal, already
from tierwise.execute.offsets import Offsets


def test_first_fit_with_alignment():
    offsets = Offsets(0, 100)
    assert offsets.take(10, 8).offset == 0  # 16 bytes
    assert offsets.take(20, 16).offset == 16  # 32 bytes
    assert offsets.take(1, 8).offset == 48
    offsets.give(0, 10, 8)
    assert offsets.take(17, 8).offset == 56  # the hole of 16 is too small
    assert offsets.take(16, 8).offset == 0
    assert offsets.take(24, 8) is None
    assert offsets.free_bytes == offsets.largest_bytes == 20


def test_an_aligned_request_leaves_the_bytes_before_it_free():
    offsets = Offsets(8, 100)
    assert offsets.take(32, 32).offset == 32
    assert offsets.free_bytes == 92 - 32
    assert offsets.take(24, 8).offset == 8


def test_a_place_still_in_use_is_given_with_the_events_to_come_after():
    offsets, copy = Offsets(0, 64), Signal()
    offsets.take(32, 8)
    offsets.give(0, 32, 8, [copy, already()])
    lower, upper = offsets.take(16, 8), offsets.take(32, 8)
    assert [lower.offset, len(lower.after)] == [0, 1]
    assert [upper.offset, len(upper.after)] == [16, 1]
    assert not lower.after[0].done()
    offsets.give(0, 16, 8)
    copy.fire(ValueError())
    assert offsets.take(16, 8).after == ()
    lower.after[0].wait()  # how the earlier copy ended is nothing to the next owner


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([8, 64])), max_size=60), st.randoms(use_true_random=False))
def test_places_never_overlap_and_everything_comes_back(requests, order):
    offsets, held = Offsets(64, 2048), []
    for nbytes, alignment in requests:
        place = offsets.take(nbytes, alignment)
        if place is None:
            if held:
                offsets.give(*held.pop(order.randrange(len(held))))
            continue
        assert place.offset % alignment == 0 and place.offset >= 64 and place.offset + nbytes <= 2048
        assert all(place.offset + nbytes <= low or low + size <= place.offset for low, size, _ in held)
        held.append((place.offset, nbytes, alignment))
    for one in held:
        offsets.give(*one)
    assert offsets.free_bytes == offsets.largest_bytes == 2048 - 64
