"""A policy that places as it goes tells the clock where, one step at a time."""

from problems import BACKWARD, FORWARD, GraphBuilder, machine

from tierwise.ir import Compute, Copy, Free, Role, Schedule
from tierwise.simulate import Clock, simulate


def test_a_placement_waits_for_the_very_range_it_takes():
    b = GraphBuilder()
    a, c, d = (b.storage(name, 10, Role.ACTIVATION) for name in ("a", "c", "d"))
    b.op("make a", FORWARD, [], [a])
    b.op("make c", FORWARD, [], [c])
    b.op("use a", BACKWARD, [a, c], [d])
    problem = b.problem(machine(hbm=100), cyclic=False)  # ten bytes take 5 s to the disk

    def play(offset: int) -> Clock:
        clock = Clock(problem, Schedule((), {}))
        clock.begin_period()
        clock.advance(Compute(0), {a: 0})
        assert clock.advance(Copy(a, "hbm", "nvme")) == 6
        clock.advance(Free(a, "hbm"))
        clock.advance(Compute(1), {c: offset})
        return clock

    assert play(50).now() == 2  # elsewhere nobody waits
    clock = play(5)  # there a's last bytes are still being read
    assert clock.now() == 7
    assert clock.advance(Copy(a, "nvme", "hbm"), {a: 20}) == 12
    steps = (Compute(0), Copy(a, "hbm", "nvme"), Free(a, "hbm"), Compute(1), Copy(a, "nvme", "hbm"), Free(a, "nvme"), Compute(2))
    whole = Schedule(steps, {}, {(0, a): 0, (3, c): 5, (4, a): 20, (6, d): 40})
    clock.advance(Free(a, "nvme"))
    clock.advance(Compute(2), {d: 40})
    assert simulate(problem, whole).seconds == clock.now() == 13
