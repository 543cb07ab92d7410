import gc
import weakref

import pytest

from tierwise.fitting.sweeping import old_ones_rest, swept


class Round:
    """Refers to itself: only a search for garbage finds it."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize(("long", "is_on", "is_gone"), [(-1.0, True, True), (60.0, True, False), (-1.0, False, False)])
def test_what_a_long_planning_leaves_behind_is_cleared_away_unless_the_user_does_that(long, is_on, is_gone):
    was_on = gc.isenabled()
    gc.disable()
    try:
        with swept(long):
            left = weakref.ref(Round())
            if is_on:
                gc.enable()
        assert (left() is None) == is_gone
    finally:
        gc.enable() if was_on else gc.disable()


def test_nothing_is_searched_for_after_a_failure():
    with pytest.raises(ValueError, match="no plan"), swept(-1.0):
        raise ValueError("no plan")


def test_what_was_there_before_is_not_searched_meanwhile_and_is_after():
    before = Round()
    with old_ones_rest():
        assert gc.get_freeze_count() > 0
        gone = weakref.ref(before)
        del before
        gc.collect()
        assert gone() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None
    gc.freeze()  # somebody else's
    try:
        with old_ones_rest():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
