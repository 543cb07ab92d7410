"""Loops that other tools' users could not run, or ran to wrong results; here they give what they give without a budget, bit for bit.

The names of the tests say what people asked for; the threads they come from are public issues of DeepSpeed, torchao, accelerate, PyTorch and others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from fitting.training import BLOCKS, Tower, batch, fitting, gradients, same, sgd, tower, trained
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from tierwise.errors import BadInput
from tierwise.fitting import fit, release

TIGHT = "0.9MiB"


def step(model: nn.Module, optimizer: Optimizer, number: int) -> Tensor:
    loss: Tensor = model(**batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=4),  # changes momentum, too
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[1]),
}


def test_schedulers_take_the_optimizer_that_fit_returns():
    """They refuse what is not an Optimizer, read its defaults and change its groups."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        for make in SCHEDULERS.values():
            scheduler = make(optimizer)
            assert isinstance(optimizer, Optimizer) and optimizer.defaults["lr"] == 0.05
            for number in range(2):
                loss = step(model, optimizer, number)
                scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
                yield loss, optimizer.param_groups[0]["lr"]

    same(loop, tower(), budget=TIGHT)


def test_clipping_by_norm_and_by_value_with_accumulation():
    """Clipping is where offloaded optimizers drop to a slow path, fail, or switch it off."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        for number in range(4):
            loss = model(**batch(number)) / 2
            loss.backward()
            if number % 2:
                yield nn.utils.clip_grad_norm_(model.parameters(), 0.1), gradients(model)
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                optimizer.step()
                optimizer.zero_grad(set_to_none=number < 2)
            yield loss

    same(loop, tower(), budget=TIGHT)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_mixed_precision_with_a_scaler_that_skips_steps():
    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for number in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch(number)) * (math.inf if number == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield scaler.get_scale()

    same(loop, tower(), budget="0.6MiB")


def test_rollouts_without_gradients_between_steps():
    """As in reinforcement learning: log-probabilities without gradients, in other shapes, in the middle of training; a forward without a
    backward must leave nothing behind for the next one."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        for number in range(3):
            rows = batch(number)["x"]
            model.eval()
            with torch.no_grad():
                for length in (1, 7, 512):
                    before = F.log_softmax(model(rows[:length]), -1)
            with torch.inference_mode():
                yield model(rows[:3]).sum()
            model.train()
            for _ in range(2):  # several passes over the same rollouts
                ratio = (F.log_softmax(model(rows), -1) - before).exp()
                loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    same(loop, tower(dropout=0.1), budget=TIGHT)


def test_a_frozen_reference_beside_the_policy():
    """As in preference training: a copy made before fit, and the trained model called on two halves at once."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        for number in range(2):
            rows = batch(number)["x"]
            with torch.no_grad():
                chosen, rejected = reference(rows).mean(-1).chunk(2)
            policy_chosen, policy_rejected = model(rows).mean(-1).chunk(2)
            loss = -F.logsigmoid(policy_chosen - policy_rejected - (chosen - rejected)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    reference = tower().requires_grad_(False).eval()
    same(loop, tower(), budget=TIGHT)


def test_an_optimizer_that_calls_a_closure():
    """LBFGS runs forward and backward many times in one step."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        solver = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            solver.zero_grad()
            loss: Tensor = model(**batch(0))
            loss.backward()
            return loss

        for _ in range(2):
            yield solver.step(closure)

    same(loop, tower(), budget=TIGHT)


def test_a_closure_that_plans_in_the_middle_of_a_step():
    """Torch, and so Lightning, runs forward and backward within optimizer.step; the plan made there takes the optimizer's state over."""

    def losses(**options: str) -> list[float]:
        model = tower()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if options:
            fit(model, optimizer, **options)

        def closure(number: int) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**batch(number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        found = [optimizer.step(lambda number=number: closure(number)).item() for number in range(4)]
        if options:
            release(model)
        return found

    assert losses(policy="zero_offload", budget="2MiB") == losses()


def test_fit_within_a_step_is_refused():
    model = tower()
    optimizer = sgd(model)
    with pytest.raises(BadInput, match=r"in the middle of optimizer\.step; call it before"):
        optimizer.step(lambda: fit(model, optimizer, budget=TIGHT))
    with pytest.raises(BadInput, match="nothing to release"):
        release(model)


def test_an_average_of_the_parameters_is_kept():
    """Read between steps, and swapped in for an evaluation."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        average = [weight.detach().clone() for weight in model.parameters()]
        for number in range(3):
            step(model, optimizer, number)
            torch._foreach_lerp_(average, [weight.detach() for weight in model.parameters()], 0.1)
        kept = [weight.detach().clone() for weight in model.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), average)
            yield model(**batch(9))
            torch._foreach_copy_(list(model.parameters()), kept)
        yield step(model, optimizer, 3)

    same(loop, tower(), budget=TIGHT)


def test_steps_taken_inside_of_backward():
    """One optimizer for each parameter, stepped as soon as its gradient is there."""

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        own = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}

        def update(weight: Tensor) -> None:
            own[weight].step()
            own[weight].zero_grad()

        handles = [weight.register_post_accumulate_grad_hook(update) for weight in model.parameters()]
        for number in range(3):
            loss = model(**batch(number))
            loss.backward()
            yield loss
        for handle in handles:
            handle.remove()

    same(loop, tower(), budget=TIGHT)


def test_layers_that_thaw_while_training():
    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        blocks = list(model.get_submodule("blocks").children())
        for block in blocks[:2]:
            block.requires_grad_(False)
        yield step(model, optimizer, 0)
        for block in blocks[:2]:
            block.requires_grad_(True)
        yield step(model, optimizer, 1)
        yield step(model, optimizer, 2)

    same(loop, tower(), budget=TIGHT)


class Adapted(nn.Module):
    """A frozen linear layer and a trained detour of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_adapters_on_a_frozen_model():
    """The first layers get no gradient at all; only the detours have optimizer state."""
    model: Tower = tower().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)

    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        for number in range(3):
            yield step(model, optimizer, number)
            yield [weight.grad is None for weight in model.parameters()]

    found = same(loop, model, budget=TIGHT)
    assert found.current is not None and len(found.current.program.calls) >= BLOCKS


def test_training_that_is_resumed_goes_on_as_if_it_had_not_stopped():
    """Model and optimizer saved under a budget, loaded into others, fitted again; and loaded into models that are not fitted."""

    def finish(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        return [step(model, optimizer, number).detach() for number in (2, 3)]

    whole = tower()
    optimizer = torch.optim.AdamW(whole.parameters())
    for number in range(2):
        step(whole, optimizer, number)
    expected = finish(whole, optimizer)

    first = tower()
    with fitting(first, optimizer=torch.optim.AdamW(first.parameters()), budget="1.1MiB") as fitted:
        for number in range(2):
            step(first, fitted.optimizer, number)
        saved = copy.deepcopy({"model": first.state_dict(), "optimizer": fitted.optimizer.state_dict()})
    for under_budget in (True, False):
        torch.manual_seed(7)
        second = Tower().train()
        optimizer = torch.optim.AdamW(second.parameters())
        if under_budget:
            fit(second, optimizer, budget="1.1MiB", progress=lambda what: None)
        second.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it takes the tensors it is given
        assert all(map(torch.equal, finish(second, optimizer), expected))
        if under_budget:
            release(second)


def test_anomaly_detection():
    def loop(model: nn.Module, optimizer: Optimizer) -> Iterator[object]:
        with torch.autograd.set_detect_anomaly(True):
            yield step(model, optimizer, 0)

    same(loop, tower(), budget=TIGHT)


def test_gradients_of_gradients_are_right_or_refused_in_words():
    """A penalty on the gradient, as some GANs have it."""

    def penalty(model: nn.Module) -> Tensor:
        rows = batch(0, rows=64)["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
        loss = (gradient.norm(dim=-1) - 1).square().mean()
        loss.backward()
        return loss

    model = tower()
    expected = penalty(copy.deepcopy(model))
    with fitting(model, budget="20MiB"):
        try:
            assert torch.equal(penalty(model), expected)
        except RuntimeError as error:
            assert "double backward" in str(error)


def test_functional_calls_do_not_see_the_plan_or_say_so():
    """torch.func on a fitted model: per-sample gradients with vmap."""
    model = tower()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).sum()

    def each() -> Tensor:
        rows = batch(0, rows=4)["x"]
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, rows)["leave.weight"]

    expected = each()
    with fitting(model, budget=TIGHT):
        assert torch.equal(each(), expected)


def test_the_loops_are_loops():
    """`same` runs what it is given: a loop that differs is seen."""
    count = iter(range(10))
    with pytest.raises(AssertionError):
        same(lambda model, optimizer: iter([next(count)]), tower(), budget=TIGHT)
    assert trained(lambda model, optimizer: iter([1]), tower())[0] == 1 and sgd(tower()).defaults["lr"] == 0.05
