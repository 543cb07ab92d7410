"""Options of a region class: what a repeated block saves for backward, and what it computes again instead.

values.py, cut.py, options.py     which choices there are, in plain types: no torch
joint.py                          the joint graph of a module call, described for them
partition.py, compiled.py         a choice made into code: one compilation for all layers of the class
lowering.py, elsewhere.py         most of the work of a compilation, done by other processes where choices are many

joint = describe(Block.forward, block, (x,))        # from joint.py
keep, cheap, *dear, checkpoint = options(joint)
forward = compile_option(Block.forward, cheap)      # from compiled.py
y = forward(block, x)
"""

from __future__ import annotations

from .options import Option, option_saving, options
from .values import Handover, JointGraph, JointValue, Kind

__all__ = ["Handover", "JointGraph", "JointValue", "Kind", "Option", "option_saving", "options"]
