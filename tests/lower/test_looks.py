"""Quick looks at splits: four blocks of 5 bytes of parameters and 20 of moments each, updated on the cpu where their state is away."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_blocks import IN_HOST, menu_with_moments

from tierwise.ir import ON_DEVICE, Placement, When, peak_bytes
from tierwise.lower import image, with_budget
from tierwise.lower.choose import recompute_everything
from tierwise.lower.looks import Looks
from tierwise.lower.splits import Split, Splits
from tierwise.lower.states import state_units
from tierwise.simulate import simulate

STATE_ALONE = Placement("host", "cpu", "device", "host")
MENU = replace(menu_with_moments(4), homes={f"block{n}": (ON_DEVICE, STATE_ALONE, IN_HOST) for n in range(4)})
UNITS = state_units(MENU.problem.graph, MENU.homes)


def looks(budget: int, passing: int = 0) -> Looks:
    within = with_budget(MENU, budget)
    return Looks(within, UNITS, Splits(within, UNITS, {}, "backward"), When("backward"), lambda states: (passing, 0))


def image_of(split: Split):
    states = Splits(MENU, UNITS, {}, "backward").states(split)
    return image(MENU, replace(recompute_everything(MENU), states=states, update="backward"))


def needed(split: Split) -> int:
    made = image_of(split)
    return peak_bytes(made.problem, made.schedule)["hbm"]


def test_what_fits_is_looked_at_as_it_is():
    split = Split(4, 0)
    found = looks(needed(split))
    assert found.at(split) == split
    made = image_of(split)
    assert found.seconds[split] == simulate(made.problem, made.schedule).seconds, "with no room left nothing is saved"


def test_what_does_not_fit_gives_parameters_away_as_few_as_it_takes():
    wanted = next(Split(4, count) for count in range(1, 5) if needed(Split(4, count)) < needed(Split(4, 0)))
    found = looks(needed(Split(4, 0)) - 1)
    assert found.at(Split(4, 0)) == wanted
    assert list(found.seconds) == [wanted]


def test_what_updates_hold_all_the_time_counts():
    assert looks(needed(Split(4, 0)), passing=1).at(Split(4, 0)) != Split(4, 0)


def test_what_never_fits_is_none():
    found = looks(needed(Split(4, 4)) - 1)
    assert found.at(Split(4, 0)) is None
    assert found.best() == []


def test_more_room_saves_recomputation():
    """Keeping all of h takes 30 bytes a block and saves a second; half of what the room would save is taken off."""
    split = Split(4, 0)
    tight, roomy = looks(needed(split)), looks(needed(split) + 60)
    tight.at(split), roomy.at(split)
    assert tight.seconds[split] - roomy.seconds[split] == pytest.approx(1.0)


def test_resident_bytes():
    assert looks(1000).resident_bytes({}) == 4 * (5 + 20)
    assert looks(1000).resident_bytes({"block3": STATE_ALONE, "block2": IN_HOST}) == 2 * 25 + 5
