from __future__ import annotations

from problems import chain

from tierwise.ir import Compute, Copy, Free, Schedule
from tierwise.ir.text import graph_lines, schedule_lines


def test_one_line_for_each_op():
    assert list(graph_lines(chain(1, weight_bytes=4, state_bytes=8).graph)) == [
        "0 forward fwd0: batch, w0 -> a0",
        "1 backward loss: a0 -> d0",
        "2 backward bwd0: d0, batch, w0 -> g0",
        "3 update step0: g0, w0, s0 -> w0!, s0!",
    ]


def test_one_line_for_each_step():
    graph = chain(2).graph
    batch, a0 = 0, 1
    steps = (
        Compute(0),
        Copy(a0, "hbm", "dram"),
        Free(a0, "hbm", join=True),
        Compute(1, on="cpu", iteration=-1),
        Copy(a0, "dram", "hbm", iteration=-1),
        Free(batch, "dram", iteration=-1),
        Compute(0),
        Compute(1, variant="fft"),
        Copy(a0, "hbm", "hbm", dst_form="zvc"),
        Copy(a0, "hbm", "dram", src_form="zvc", dst_form="zvc"),
        Copy(a0, "dram", "hbm", src_form="zvc"),
        Copy(a0, "hbm", "hbm", src_form="zvc"),
        Free(a0, "hbm", form="zvc"),
    )
    assert list(schedule_lines(graph, Schedule(steps, {}))) == [
        "compute fwd0",
        "copy a0 hbm -> dram",
        "free a0 hbm join",
        "compute fwd1 on cpu @-1",
        "copy a0 dram -> hbm @-1",
        "free batch dram @-1",
        "recompute fwd0",
        "compute fwd1 by fft",
        "encode a0 in hbm as zvc",
        "copy a0 hbm as zvc -> dram as zvc",
        "copy a0 dram as zvc -> hbm",
        "decode a0 in hbm as zvc",
        "free a0 hbm as zvc",
    ]
