"""The bound over menus, on the chain of toy_blocks.py: forward takes 2 seconds a block, backward 1 and 1 more for the loss."""

from __future__ import annotations

import pytest
from toy_blocks import menu, menu_with_moments

from tierwise.lower import choose_jointly
from tierwise.lower.bound import Bound, least_seconds


def test_with_room_for_everything_it_is_the_compute():
    assert least_seconds(menu(4, 1000)) == pytest.approx(4 * 2 + 1 + 4)


def test_bytes_that_have_no_room_cost_a_share_of_a_call():
    # At the loss: weights 20, inputs of blocks 50, a gradient 10, and 120 saved. Of these 20 too many: two thirds of one h, made again in a second.
    assert least_seconds(menu(4, 180, bytes_per_second=1e-9)) == pytest.approx(13 + 2 / 3)


def test_what_forward_has_time_to_carry_is_free():
    # 20 bytes in the 8 seconds of forward, and back in the 5 of backward.
    assert least_seconds(menu(4, 180, bytes_per_second=4.0)) == pytest.approx(13)
    # At 2 bytes a second backward brings back 10, and 2 more in each second that it makes 30 others again.
    assert least_seconds(menu(4, 180, bytes_per_second=2.0)) == pytest.approx(13 + 10 / 32)


def test_no_plan_where_nothing_can_leave_and_nothing_fits():
    assert least_seconds(menu(4, 20, bytes_per_second=1e-9)) == float("inf")


def test_what_shares_of_state_it_would_move():
    """Four updates, a second each on the device; forward takes eight. A cpu that takes a second, too, does all of them under that. One with ten is
    busy until the rest is done, 40 x = 8 + 4 (1 - x)."""
    assert Bound(menu_with_moments(4), "after").best_shares() == pytest.approx((1.0, 0.0, 0.0))
    assert Bound(menu_with_moments(4, cpu_seconds=10.0), "after").best_shares() == pytest.approx((3 / 11, 0.0, 0.0))
    assert Bound(menu(4, 20, bytes_per_second=1e-9), "after").best_shares() is None


def test_a_plan_says_how_far_above_it_is():
    chosen = choose_jointly(menu(4, 180, bytes_per_second=1e-9))  # one call makes its h again, whole: 14 seconds for 13 2/3
    assert chosen.program.words == ("at most 2.4% above what no plan of these regions could beat in this memory",)
