from __future__ import annotations

import dataclasses

import pytest
from problems import machine, relu_net, with_engines

from tierwise import policies
from tierwise.errors import BadInput
from tierwise.ir import Copy, Processor
from tierwise.policies import cdma
from tierwise.simulate import simulate


def copies(problem, **options) -> list[tuple[str, str, str, str]]:
    """What is copied from where to where, and as what."""
    prepared, schedule = policies.planned(problem, "cdma", **options)
    steps = [step for step in schedule.steps if isinstance(step, Copy)]
    return [(prepared.graph.storages[s.storage].name, s.src, s.dst, s.src_form or s.dst_form) for s in steps]


def fast_gpu(bytes_per_second: float = 1000.0):
    """The toy machine, with a gpu that says how fast its memory is."""
    return dataclasses.replace(machine(), processors=(Processor("gpu", "hbm", bytes_per_second=bytes_per_second), Processor("cpu", "dram")))


def test_the_engine_compresses_what_relus_made_and_sends_the_rest_as_it_is():
    assert copies(relu_net(on=fast_gpu()), mode="all") == [
        ("x", "hbm", "dram", ""), ("r0", "hbm", "dram", "zvc"), ("p0", "hbm", "dram", ""),
        ("p0", "dram", "hbm", ""), ("r0", "dram", "hbm", "zvc"), ("x", "dram", "hbm", ""),
    ]  # fmt: skip


def test_the_engine_passes_a_share_of_the_memorys_bandwidth():
    prepared = cdma.prepare(relu_net(on=fast_gpu(100.0)))
    assert [link.codecs for link in prepared.machine.links[:3]] == [{"zvc": 60.0}, {"zvc": 60.0}, {}]
    brought = cdma.prepare(relu_net(on=with_engines(fast_gpu(100.0))))
    assert brought.machine.links[0].codecs == {"zvc": 60.0, "half": 15.0}
    assert cdma.prepare(relu_net(on=fast_gpu()), engine=False).machine == fast_gpu()


def test_without_an_engine_the_device_packs_where_it_pays():
    # r0: 64 bytes at 10 a second are 6.4 s; packed 34 bytes are 3.4 s, and packing 64 bytes at 64 a second 1 s.
    assert ("r0", "hbm", "hbm", "zvc") in copies(relu_net(on=machine()), mode="all", engine=False)
    slow = relu_net(on=machine())
    codecs = tuple(dataclasses.replace(c, encode_bytes_per_second={"gpu": 20.0}) if c.name == "zvc" else c for c in slow.costs.codecs)
    slow = dataclasses.replace(slow, costs=dataclasses.replace(slow.costs, codecs=codecs))
    assert ("r0", "hbm", "dram", "") in copies(slow, mode="all", engine=False)  # 3.2 s of packing are more than the 3 s it saves


def test_it_is_vdnn_but_for_the_zeros():
    problem = relu_net(on=fast_gpu())
    prepared, schedule = policies.planned(problem, "cdma", mode="all")
    plain = policies.plan(problem, "vdnn", mode="all")
    assert [dataclasses.replace(s, src_form="", dst_form="") if isinstance(s, Copy) else dataclasses.replace(s, form="") if hasattr(s, "form") else s
            for s in schedule.steps] == list(plain.steps)  # fmt: skip
    # Each way r0 waits 3 s less: 64 bytes against 34, at 10 a second.
    assert simulate(problem, plain).seconds - simulate(prepared, schedule).seconds == pytest.approx(6.0)


def test_unknown_mode():
    with pytest.raises(BadInput, match="mode is 'most'; cdma knows none, conv, all and dyn"):
        policies.plan(relu_net(), "cdma", mode="most")
