"""The bound over menus, on the chain of toy_blocks.py: forward takes 2 seconds a block, backward 1 and 1 more for the loss."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from toy_blocks import CPU, IN_HOST, THROUGH, anything_anywhere, menu, menu_with_moments, with_compute_share

from tierwise.ir import Role
from tierwise.lower import choose_jointly
from tierwise.lower.bound import Bound, least_seconds, mix_between
from tierwise.lower.states import shares
from tierwise.simulate import simulate


def test_with_room_for_everything_it_is_the_compute():
    assert least_seconds(menu(4, 1000)) == pytest.approx(4 * 2 + 1 + 4)


def test_bytes_that_have_no_room_cost_a_share_of_a_call():
    # As the last block goes back: weights 20, inputs of blocks 40, a gradient that comes and two that it makes 25, and 120 saved. Of these 25 too
    # many: five sixths of one h, made again in a second.
    assert least_seconds(menu(4, 180, bytes_per_second=1e-9)) == pytest.approx(13 + 5 / 6)


def test_what_forward_has_time_to_carry_is_free():
    # 25 bytes in the 8 seconds of forward, and back in the 5 of backward.
    assert least_seconds(menu(4, 180, bytes_per_second=5.0)) == pytest.approx(13)
    # At 2 bytes a second backward brings back 10, and 2 more in each second that it makes 30 others again.
    assert least_seconds(menu(4, 180, bytes_per_second=2.0)) == pytest.approx(13 + 15 / 32)


def test_no_plan_where_nothing_can_leave_and_nothing_fits():
    assert least_seconds(menu(4, 20, bytes_per_second=1e-9)) == float("inf")


def test_what_the_first_block_that_goes_back_makes_again_takes_room():
    # 85 bytes besides, and 30 of that block, kept or made again; the three others make theirs again.
    assert least_seconds(menu(4, 115, bytes_per_second=1e-9)) == pytest.approx(13 + 3)
    assert least_seconds(menu(4, 114, bytes_per_second=1e-9)) == float("inf")


def test_what_shares_of_state_it_would_move():
    """Four updates, a second each on the device; forward takes eight. A cpu that takes a second, too, does all of them under that. One with ten is
    busy until the rest is done, 40 x = 8 + 4 (1 - x)."""
    assert Bound(menu_with_moments(4), "after").best()[1:4] == pytest.approx((1.0, 0.0, 0.0))
    assert Bound(menu_with_moments(4, cpu_seconds=10.0), "after").best()[1:4] == pytest.approx((3 / 11, 0.0, 0.0))
    assert Bound(menu(4, 20, bytes_per_second=1e-9), "after").best() is None


def test_a_plan_says_how_far_above_it_is():
    chosen = choose_jointly(menu(4, 180, bytes_per_second=1e-9))  # one call makes its h again, whole: 14 seconds for 13 5/6
    assert chosen.program.words == ("at most 1.2% above what no plan of these regions could beat in this memory",)


def test_what_host_memory_has_no_room_for_is_read_and_written_in_every_step():
    """In 85 bytes there are the batch, the weights of the block that goes back and of the next one, what it was given and makes again, and three
    gradients: by this count everything else has left. Of 80 bytes of moments and 10 of weights host memory has 60: 30 are read and written, a byte a
    second each way, at the same time or in turn."""
    question = with_disk(menu_with_moments(4, hbm=85, dram=60), {"disk read": 1.0}, {"disk write": 1.0})
    assert least_seconds(question, "backward") == pytest.approx(30)
    in_turn = with_disk(question, {"disk read": 1.0, "disk": 1.0}, {"disk write": 1.0, "disk": 1.0})
    assert least_seconds(in_turn, "backward") == pytest.approx(60)
    assert least_seconds(menu_with_moments(4, hbm=84, dram=60), "backward") == float("inf")  # the weight of the block that runs does not leave


def with_disk(question, read, written):
    machine = question.problem.machine
    lanes = {"nvme": read, "dram": written}
    links = [replace(link, lanes=lanes[link.src]) if {link.src, link.dst} == {"nvme", "dram"} else link for link in machine.links]
    return replace(question, problem=replace(question.problem, machine=replace(machine, links=tuple(links))))


def test_the_cpu_and_the_link_share_host_memory():
    """Four updates that take 10 seconds each on the cpu, or 8 for their state on the link, all of which must leave but for a few bytes. Alone they
    would be done in 40 x = 32 (1 - x), 17.8 seconds, but the cpu has nothing to do in the four from the last block's forward to its backward. The
    bound is below every mix on the machine that they share, and near the best."""
    question = with_heavy_state(menu_with_moments(4, hbm=115, cpu_seconds=10.0), 250.0, CPU, THROUGH)

    def with_both(x):
        rates = shares(40 * x, 32.08 * (1 - x), "backward")  # with 5 bytes of each gradient
        return max(40 * x / rates.cpu + 4, 32 * (1 - x) / rates.into)

    best = min(with_both(number / 1000) for number in range(1001))
    assert 0.97 * best < least_seconds(question, "backward") <= best
    assert Bound(question, "backward").least() < 20 < 0.8 * best


def test_streamed_updates_take_their_time_from_backward():
    """Thirteen seconds of forward, loss and backward, and four updates of a second each whose state must pass through the device, over a link that
    takes no time: beside backward they take their second from it, under the next forward none."""
    question = with_heavy_state(menu_with_moments(4, hbm=115), 1e9, THROUGH)
    assert least_seconds(question, "backward") == pytest.approx(17, abs=1e-3)
    assert least_seconds(question, "after") == pytest.approx(13, abs=1e-3)


def test_a_range_of_mixes_promises_no_less_than_any_in_it():
    for update in ("after", "backward"):
        for least, most in ((0.0, 1.0), (0.0, 1 / 16), (0.5, 0.625), (15 / 16, 1.0)):
            mix = mix_between(least, most, update)
            for number in range(1001):
                part = least + (most - least) * number / 1000
                rates = shares(part, 1 - part, update)
                assert rates.cpu <= mix.cpu and rates.out <= mix.out <= mix.others_out and rates.into <= mix.into <= mix.others_in


def test_nothing_is_updated_between_the_last_blocks_forward_and_its_backward():
    """All moments must leave but for a few bytes, for a cpu that takes 10 seconds for each: 40, and 4 in which the last block goes there, the loss is
    taken, and it comes back. Beside copies the cpu has 0.86 of its rate."""
    question = with_heavy_state(menu_with_moments(4, hbm=115, cpu_seconds=10.0), 1e9, CPU)
    assert least_seconds(question, "backward") == pytest.approx(40 / 0.86 + 4, rel=0.01)


def test_what_the_cpu_makes_comes_and_what_lives_elsewhere_comes_again():
    """Weights of 5 bytes that the cpu makes in no time, a byte a second: four come for forward, and three that live elsewhere once more."""
    question = with_heavy_state(menu_with_moments(4, hbm=10_000, cpu_seconds=1e-9), 1.0, IN_HOST)
    assert Bound(question, "backward").with_shares(1.0, 0.0, 0.0) == pytest.approx(4 * 5)
    assert Bound(question, "backward").with_shares(1.0, 0.0, 0.75) == pytest.approx(4 * 5 + 3 * 5)


def test_copies_take_their_part_of_what_compute_draws():
    """Thirteen seconds of compute. All that the cpu makes in no time, 20 bytes, comes once, and as many of gradients leave, five bytes a second: a
    quarter of eight seconds. With parameters elsewhere they come for backward, too."""
    question = with_compute_share(with_heavy_state(menu_with_moments(4, cpu_seconds=1e-9), 5.0, CPU, IN_HOST), 0.25)
    assert Bound(question, "backward").with_shares(1.0, 0.0, 0.0) == pytest.approx(13 + 8 / 4)
    assert Bound(question, "backward").with_shares(1.0, 0.0, 1.0) == pytest.approx(13 + 12 / 4)
    assert Bound(question, "after").with_shares(1.0, 0.0, 0.0) == pytest.approx(13)


def test_room_that_whoever_moves_state_leaves_is_taken_off():
    """As much is left as without it in so much less; but who moves none has it."""
    question = menu_with_moments(4, hbm=180)
    takes = lambda states: (30 if states else 0, 0)  # noqa: E731
    assert least_seconds(question, "backward", takes) == least_seconds(menu_with_moments(4, hbm=150), "backward")
    roomy = menu_with_moments(4, hbm=330)
    assert least_seconds(roomy, "backward", takes) == least_seconds(roomy, "backward")


def with_heavy_state(question, rate, *homes):
    """Moments of 2000 bytes, which have no room on the device, in one of these homes; a link of so many bytes a second."""
    graph = question.problem.graph
    heavy = replace(graph, storages=tuple(replace(s, nbytes=2000) if s.role is Role.OPTIMIZER_STATE else s for s in graph.storages))
    machine = question.problem.machine.with_rates(lambda link, lane, other: rate)
    return replace(question, problem=replace(question.problem, graph=heavy, machine=machine), homes=dict.fromkeys(question.homes, homes))


@pytest.mark.parametrize("update", ["after", "backward"])
def test_no_placement_is_faster(update):
    """Whatever is placed wherever, in as much memory as that takes."""
    rng = random.Random(0)
    for _ in range(60):
        made, within = anything_anywhere(rng, update)
        assert simulate(made.problem, made.schedule).seconds >= least_seconds(within, update) * (1 - 1e-6)
