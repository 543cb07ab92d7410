"""Lightning: the callback, and the same module in an unmodified script."""

from __future__ import annotations

import pytest
from integrations.examples import example, printed

from tierwise.errors import BadInput, TierwiseError

pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def training():
    return example("lightning_module")


def test_the_callback(training, monkeypatch, capsys):
    untouched = [f"step {step}: loss {loss:.6f}" for step, loss in enumerate(training.train(4).losses)]
    assert printed(training, monkeypatch, capsys, "--steps", "4") == untouched


def test_the_model_is_given_back(training, capsys):
    from tierwise.integrations.lightning import FitCallback

    module = training.train(1, FitCallback(budget="8MiB"))
    assert "tierwise: GPT2 with AdamW: budget 8.00 MiB" in capsys.readouterr().err
    assert not [part for part in module.modules() if "forward" in part.__dict__]


def test_a_budget_that_is_too_small_ends_the_training_and_leaves_the_model(training):
    from tierwise.integrations.lightning import FitCallback

    callback = FitCallback(budget="200KiB")
    with pytest.raises(TierwiseError, match="too small"):
        training.train(1, callback)
    assert callback._lookout is None


def test_several_processes_are_refused():
    from types import SimpleNamespace

    from tierwise.integrations.lightning import FitCallback

    with pytest.raises(BadInput, match=r"2 processes .* Trainer\(devices=1\)"):
        FitCallback(budget="1GiB").on_train_start(SimpleNamespace(world_size=2, optimizers=[]), None)
