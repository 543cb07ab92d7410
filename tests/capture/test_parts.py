"""Parameters that lie side by side in one storage are captured as they would be apart; those that overlap are not."""

from __future__ import annotations

import torch
from torch import nn

from tierwise.capture.fakes import Fakes
from tierwise.capture.torch_compat import new_fake_mode


def faked(*views: torch.Tensor) -> list[torch.Tensor]:
    model = nn.ParameterList(nn.Parameter(view) for view in views)
    mode = new_fake_mode()
    with mode:
        return list(Fakes(mode).of_module(model).parameters())


def test_side_by_side():
    flat = torch.zeros(20)
    first, second = faked(flat[:6].view(2, 3), flat[8:20].view(4, 3).t())
    assert [p.untyped_storage().nbytes() for p in (first, second)] == [24, 48]
    assert (first.storage_offset(), second.storage_offset(), second.stride()) == (0, 0, (1, 3))


def test_the_same_part_is_one_storage_and_so_are_parts_that_overlap():
    flat = torch.zeros(20)
    one, same, other = faked(flat[:6], flat[:6].view(2, 3), flat[6:])
    assert one.untyped_storage()._cdata == same.untyped_storage()._cdata != other.untyped_storage()._cdata
    one, over = faked(flat[:6], flat[4:10])
    assert one.untyped_storage()._cdata == over.untyped_storage()._cdata and one.untyped_storage().nbytes() == 80
