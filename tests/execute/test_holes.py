"""What the allocator keeps in pieces is given back where that is cheap, once it was in the way."""

from __future__ import annotations

import pytest

from tierwise.execute.device import MemoryUse
from tierwise.execute.holes import Holes
from tierwise.execute.null_device import NullDevice


class Kept(NullDevice):
    """An allocator that keeps `kept` bytes besides `used` until it is told to give them back."""

    used, kept = 700, 100

    def memory(self) -> MemoryUse:
        return MemoryUse(self.used, self.used + self.kept, self.used, self.used + self.kept)

    def give_back(self) -> None:
        self.kept = 0


@pytest.mark.parametrize(
    ("used", "kept", "between", "within"),
    [
        (700, 100, True, False),  # three quarters are taken, and a thirty-second part is kept
        (600, 140, False, False),  # there is room
        (780, 20, False, False),  # hardly anything is kept
        (830, 120, True, False),
        (800, 140, True, True),  # a sixteenth part is left, and an eighth is kept
    ],
)
def test_pieces_are_given_back_where_memory_is_short_and_much_of_it_is_kept(used, kept, between, within):
    for close, expected in ((Holes.close_between_passes, between), (Holes.close_within_forward, within)):
        device = Kept(1 << 30)
        device.used, device.kept = used, kept
        holes = Holes(device, 1000)
        close(holes)
        assert device.kept == kept, "nobody had to wait for them yet"
        holes.are_in_the_way = True
        close(holes)
        assert (device.kept == 0) is expected
