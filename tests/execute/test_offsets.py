from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierwise.execute.lanes import Signal, already
from tierwise.execute.offsets import Offsets


def test_first_fit_with_alignment():
    offsets = Offsets(0, 100)
    held = [offsets.take(10, 8), offsets.take(20, 16), offsets.take(1, 8)]  # 16, 32 and 8 bytes
    assert [place.offset for place in held] == [0, 16, 48]
    offsets.give(held[0])
    held += [offsets.take(17, 8), offsets.take(16, 8)]
    assert [place.offset for place in held[3:]] == [56, 0]  # the hole of 16 is too small for 17
    assert offsets.take(24, 8) is None
    assert offsets.free_bytes == offsets.largest_bytes == 20


def test_an_aligned_request_leaves_the_bytes_before_it_free():
    offsets = Offsets(8, 100)
    place = offsets.take(32, 32)
    assert place.offset == 32
    assert offsets.free_bytes == 92 - 32
    assert offsets.take(24, 8).offset == 8


def test_a_place_still_in_use_is_given_with_the_events_to_come_after():
    offsets, copy = Offsets(0, 64), Signal()
    offsets.give(offsets.take(32, 8), [copy, already()])
    lower, upper = offsets.take(16, 8), offsets.take(32, 8)
    assert [lower.offset, len(lower.after)] == [0, 1]
    assert [upper.offset, len(upper.after)] == [16, 1]
    assert not lower.after[0].done()
    offsets.give(lower)
    copy.fire(ValueError())
    assert offsets.take(16, 8).after == ()
    lower.after[0].wait()  # how the earlier copy ended is nothing to the next owner


def test_what_nobody_holds_and_nobody_gave_back_is_recovered():
    """Of three places of 16 in 64 bytes one is given back and one forgotten."""
    offsets = Offsets(0, 64)
    given, forgotten, held = offsets.take(16, 8), offsets.take(16, 8), offsets.take(16, 8)
    offsets.give(given)
    assert offsets.lost_bytes == 0
    del forgotten
    assert (offsets.lost_bytes, offsets.free_bytes) == (16, 32)
    offsets.recover()
    assert (offsets.lost_bytes, offsets.free_bytes, offsets.largest_bytes) == (0, 48, 32)
    assert held.offset == 32 and offsets.take(32, 8).offset == 0


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([8, 64])), max_size=60), st.randoms(use_true_random=False))
def test_places_never_overlap_and_everything_comes_back(requests, order):
    offsets, held = Offsets(64, 2048), []
    for nbytes, alignment in requests:
        place = offsets.take(nbytes, alignment)
        if place is None:
            if held:
                offsets.give(held.pop(order.randrange(len(held))))
            continue
        assert place.offset % alignment == 0 and place.offset >= 64 and place.offset + nbytes <= 2048
        assert all(place.offset + nbytes <= other.offset or other.offset + other.span_bytes <= place.offset for other in held)
        held.append(place)
        assert offsets.lost_bytes == 0
    for one in held:
        offsets.give(one)
    assert offsets.free_bytes == offsets.largest_bytes == 2048 - 64
