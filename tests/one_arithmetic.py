"""Torch turns oneDNN off for the whole process at the first bf16 product that a CPU cannot do with it: bits before and after differ.

So that no comparison of bits has this moment in its middle, importing this module is that moment.
"""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _square = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.nn.functional.linear(_square, _square)
