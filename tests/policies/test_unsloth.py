import pytest
from problems import chain, machine
from reading import copied, copied_before, recomputed
from transformer import kept_for_backward, transformer

from tierwise.errors import BadInput
from tierwise.policies import plan
from tierwise.simulate import simulate

FORWARD_SECONDS = 16.25  # of one layer
AGAIN_SECONDS = 16.0  # of one layer without its last addition, which nobody reads again


def step(layers: int = 4, rate: float = 10.0, **options):
    problem = transformer(layers, on=machine(rate=rate))
    return problem, plan(problem, "unsloth", min_bytes=1, **options)


def test_only_the_last_input_stays():
    problem, schedule = step()
    assert copied(problem, schedule) == ["x", "z.0", "z.1"]
    assert kept_for_backward(problem, schedule) == 2  # z.2, the input of the last layer
    assert simulate(problem, schedule).seconds == simulate(problem, plan(problem, "keep_all")).seconds + 4 * AGAIN_SECONDS


def test_an_input_leaves_under_its_layer_and_comes_back_under_the_next():
    problem, schedule = step()
    assert copied_before(problem, schedule) == {"x": "norm1.0", "z.0": "norm1.1", "z.1": "norm1.2"}
    assert copied_before(problem, schedule, "dram") == {"z.1": "norm1.3", "z.0": "norm1.2", "x": "norm1.1"}  # layer 3 begins with norm1.3, again


def test_one_buffer_is_filled_when_its_layer_is_due():
    problem, schedule = step(double_buffer=False)
    assert copied_before(problem, schedule, "dram") == {"z.1": "norm1.2", "z.0": "norm1.1", "x": "norm1.0"}


def test_the_device_waits_for_slow_copies():
    # Two bytes at 0.1 a second take 20 s, 3.75 more than a layer; a layer's backward and second run take longer than that.
    problem, schedule = step(rate=0.1)
    hidden = simulate(problem, plan(problem, "keep_all")).seconds + 4 * AGAIN_SECONDS
    assert simulate(problem, schedule).seconds == pytest.approx(hidden + 3 * (20 - FORWARD_SECONDS))
    problem, schedule = step(rate=0.1, double_buffer=False)
    assert simulate(problem, schedule).seconds == pytest.approx(hidden + 3 * (20 - FORWARD_SECONDS) + 3 * 20)


def test_small_inputs_stay():
    problem = transformer(4)
    schedule = plan(problem, "unsloth", min_bytes=2)
    assert not copied(problem, schedule)
    assert kept_for_backward(problem, schedule) == 4 * 2
    assert len(recomputed(problem, schedule)) == 4 * 14


def test_layers_in_pairs():
    problem, schedule = step(layers=6, layers_per_checkpoint=2)
    assert copied(problem, schedule) == ["x", "z.1"]
    assert kept_for_backward(problem, schedule) == 2  # z.3
    with pytest.raises(BadInput, match="layers_per_checkpoint is 0; give at least 1"):
        plan(chain(2), "unsloth", layers_per_checkpoint=0)
