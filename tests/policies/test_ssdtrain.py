from problems import machine
from reading import copied, copied_before
from transformer import kept_for_backward, transformer

from tierwise.policies import plan
from tierwise.simulate import simulate

LAYER_SECONDS, LAYER_BYTES = 16.25, 34 + 5 * 4


def step(layers: int = 4, *, disk_rate: float = 100.0, **options):
    problem = transformer(layers, on=machine(rate=1000.0, disk_rate=disk_rate))
    return problem, plan(problem, "ssdtrain", min_bytes=1, **options)


def layers_of(problem, schedule) -> set[str]:
    return {"0" if name == "x" else name.partition(".")[2] for name in copied(problem, schedule)}


def test_a_fast_disk_takes_all_layers_but_the_last():
    problem, schedule = step()
    assert layers_of(problem, schedule) == {"0", "1", "2"}
    # What stays: all of the last layer, and what the layer before it hands to it, which is the last layer's own.
    assert kept_for_backward(problem, schedule) == LAYER_BYTES
    assert simulate(problem, schedule).seconds == simulate(problem, plan(problem, "keep_all")).seconds


def test_the_rule_says_where_to_stop():
    # Per layer 54 bytes and 16.25 s; F = 65 s. Layer n stays if (54·n + 108) / (195 − 32.5·n) > B: 0.554, 0.997, 1.662 for n = 0, 1, 2.
    # With B = 0.9 layer 1 is the first to stay.
    problem, schedule = step(disk_rate=0.9)
    assert layers_of(problem, schedule) == {"0"}
    problem, schedule = step(disk_rate=0.5)
    assert copied(problem, schedule) == []
    problem, schedule = step(disk_rate=1.1)
    assert layers_of(problem, schedule) == {"0", "1"}


def test_layers_come_back_while_the_one_behind_runs():
    problem, schedule = step()
    fetched = copied_before(problem, schedule, "nvme")
    assert fetched["g.2"] == "drop2'.3" and fetched["g.1"] == "drop2'.2" and fetched["x"] == "drop2'.1"


def test_what_is_still_being_written_stays():
    # Without the rule three layers of 54 bytes at 0.9 a second take 180 s to write; backward reaches the last of them after 65 s.
    problem, schedule = step(disk_rate=0.9, adaptive=False)
    out = copied(problem, schedule)
    assert out and len(out) < len(copied(*step(adaptive=False)))


def test_small_tensors_stay():
    problem = transformer(4, on=machine(rate=1000.0, disk_rate=100.0))
    names = copied(problem, plan(problem, "ssdtrain", min_bytes=8))
    assert {name.partition(".")[0] for name in names} == {"p", "pd", "u", "g"}
