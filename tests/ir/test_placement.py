"""Places by module path: whose place a path has of which nothing is said."""

from __future__ import annotations

from tierwise.ir import ON_DEVICE, Placement
from tierwise.ir.placement import owner, stated

CPU, THROUGH = Placement("host", "cpu", "host", "host"), Placement("host", "streamed")


def test_a_path_belongs_to_the_longest_above_it():
    assert owner("block.mlp.up.weight", ("block", "block.mlp")) == "block.mlp"
    assert owner("head.weight", ("block",)) is None
    assert owner("block", ("block",)) is None  # above it, not the path itself


def test_what_stays_is_said_of_parts_of_what_is_elsewhere_only():
    """A part of which nothing is said is where the rest of its region is."""
    parts = {"block.attention": ON_DEVICE, "block.mlp": THROUGH, "block.mlp.up": ON_DEVICE}
    assert stated({"block": CPU, "head": ON_DEVICE, **parts}) == {"block": CPU, **parts}
    assert stated({"block": ON_DEVICE, "head": CPU, **parts}) == {"head": CPU, "block.mlp": THROUGH, "block.mlp.up": ON_DEVICE}
    assert stated({"block": ON_DEVICE, "block.attention": ON_DEVICE}) == {}
