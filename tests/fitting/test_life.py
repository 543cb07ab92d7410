"""A fitted model in a loop as people write them: everything is, bit for bit, what it is without a budget."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from fitting.training import BLOCKS, Block, Tower, batch, equal, fitting, forced, gradients, same, sgd, three_steps, tower, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierwise.errors import BadInput, CopyFault
from tierwise.execute.null_device import NullDevice
from tierwise.fitting import fit, fitted_of, plan_of, release

TIGHT = "800KiB"  # keeping everything takes 1.34 MiB: some blocks recompute, some send


def sends(plan) -> int:
    return sum(bool(call.sent) for call in plan.program.calls.values())


def test_the_plan_of_these_tests_recomputes_and_sends():
    model = tower()
    with fitting(model, budget=TIGHT) as found:
        plan = found.prepare((), batch(0))
        assert sends(plan) > 0 and any(call.choice != "keep" for call in plan.program.calls.values())


def test_steps():
    same(three_steps, tower(dropout=0.1), budget=TIGHT)


def test_evaluation_between_steps():
    def loop(model, optimizer):
        for number in range(3):
            loss = model(**batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                yield model(**batch(9, rows=40))
            with torch.inference_mode():
                yield model(batch(8)["x"]).sum()
            model.train()
            yield loss

    found = same(loop, tower(dropout=0.1), budget=TIGHT)
    assert found.session.passes == 3


def test_evaluation_within_a_step():
    def loop(model, optimizer):
        for number in range(2):
            loss = model(**batch(number))
            with torch.no_grad():
                yield model(**batch(5))
            loss.backward()
            yield gradients(model)
            optimizer.zero_grad()

    same(loop, tower(), budget=TIGHT)


def test_several_forwards_before_one_backward(monkeypatch):
    """Host memory was taken for one forward; a second one gets a slab of its own."""

    def loop(model, optimizer):
        for number in range(2):
            one, other = model(**batch(number)), model(**batch(number + 10))
            third = model(**batch(number + 20))
            (one + 2 * other).backward()
            yield gradients(model)
            del third  # never had a backward
            optimizer.step()
            optimizer.zero_grad()

    with forced(monkeypatch, "keep", send=True):
        found = same(loop, tower(), budget="64MiB")
    assert any("plans are for one at a time" in sentence for sentence in found.session.events.said)


def test_gradients_accumulate_and_are_counted():
    def loop(model, optimizer):
        for number in range(4):
            loss = model(**batch(number)) / 2
            loss.backward()
            yield loss
            if number % 2:
                yield gradients(model)
                optimizer.step()
                optimizer.zero_grad()

    found = same(loop, tower(), budget=TIGHT)
    with_gradients = [plan.peak_bytes for key, plan in found.plans.items() if key[-1]]
    without = [plan.keep_all_bytes for key, plan in found.plans.items() if not key[-1]]
    assert len(with_gradients) == len(without) == 1


def test_a_changed_shape_is_planned_once_and_remembered():
    def loop(model, optimizer):
        for rows in (512, 512, 300, 512, 300):
            loss = model(**batch(rows, rows=rows))
            loss.backward()
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    found = same(loop, tower(dropout=0.1), budget=TIGHT)
    assert len(found.plans) == 2


class Broken(nn.Module):
    """A tower with something in the middle that can be made to fail, in forward or in backward."""

    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            if model.fails == "forward":
                raise ZeroDivisionError("in forward")
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            if ctx.model.fails == "backward":
                raise ZeroDivisionError("in backward")
            return gradient, None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.enter = nn.Linear(8, 16)
        self.fails = ""

    def forward(self, x, target):
        x = self.enter(x)
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 2:
                x = x * 1 if torch.compiler.is_compiling() or isinstance(x, torch._subclasses.FakeTensor) else Broken.Trap.apply(x, self)
        return F.mse_loss(x[:, :4], target)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(where, monkeypatch):
    def loop(model, optimizer):
        for number in range(4):
            model.fails = where if number == 1 else ""
            try:
                loss = model(**batch(number))
                loss.backward()
            except ZeroDivisionError:
                optimizer.zero_grad()
                loss = None
                continue
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = Broken()
    expected = trained(loop, copy.deepcopy(model))
    device = NullDevice(1 << 30, max_delay_seconds=0.003)
    with forced(monkeypatch, "keep", send=True, release=2, fetch=2), fitting(model, budget="64MiB", device=device) as found:
        assert equal(trained(loop, model), expected)
        assert found.below.used_bytes == 0
        assert found.session._current is None
        assert device.memory().allocated_bytes == sum(p.nbytes for p in model.parameters())


def test_a_graph_can_be_used_twice(monkeypatch):
    def loop(model, optimizer):
        for number in range(2):
            loss = model(**batch(number))
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            yield gradients(model)
            loss.backward()
            yield gradients(model)
            optimizer.zero_grad()

    with forced(monkeypatch, "cheap", send=True):
        found = same(loop, tower(dropout=0.1), budget="64MiB")
    counts = found.below.copies.counts()
    assert counts.fetched_bytes == 3 * counts.sent_bytes > 0


def test_gradients_in_evaluation_mode():
    def loop(model, optimizer):
        model.eval()
        yield from three_steps(model, optimizer)

    same(loop, tower(dropout=0.5), budget=TIGHT)


def test_a_loss_outside_of_the_model():
    def loop(model, optimizer):
        for number in range(3):
            given = batch(number)
            loss = F.smooth_l1_loss(model(given["x"]), given["target"])
            loss.backward()
            yield loss
            yield gradients(model)
            optimizer.step()
            optimizer.zero_grad()

    found = same(loop, tower(dropout=0.1), budget=TIGHT)
    assert sends(found.current) or any(call.choice != "keep" for call in found.current.program.calls.values())


class Shared(Tower):
    """One block called again and again, in the manner of ALBERT, under several names."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList([self.blocks[0]] * BLOCKS)


def test_one_block_called_many_times(monkeypatch):
    torch.manual_seed(0)
    with forced(monkeypatch, "cheap", send=True):
        found = same(three_steps, Shared(), budget="64MiB")
    assert len(found.current.plans) == BLOCKS


def test_a_frozen_backbone_with_a_trainable_head():
    class Headed(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.enter.requires_grad_(False)
            self.blocks[:2].requires_grad_(False)

    torch.manual_seed(0)
    found = same(three_steps, Headed(), budget="0.7MiB")
    assert {module for module, _ in found.current.plans} == {"blocks.2", "blocks.3"}


def test_nothing_to_train_is_nothing_to_plan():
    model = tower().requires_grad_(False)
    with fitting(model) as found:
        expected = model.blocks[0](model.enter(batch(0)["x"]))
        assert not expected.requires_grad
        model(**batch(0))
        assert found.current is None


def test_an_input_that_wants_a_gradient():
    def loop(model, optimizer):
        given = batch(0)
        given["x"].requires_grad_()
        model(**given).backward()
        yield given["x"].grad

    same(loop, tower().requires_grad_(False), budget=TIGHT)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_the_user_stay_the_user_s(use_reentrant):
    class Checkpointing(Tower):
        def forward(self, x, target):
            x = self.enter(x).requires_grad_()
            for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
                x = checkpoint(lambda x, one=one, other=other: other(one(x).sin()), x, use_reentrant=use_reentrant)
            return F.mse_loss(self.leave(x), target)

    torch.manual_seed(0)
    same(three_steps, Checkpointing(), budget="64MiB")


def test_hooks_are_called():
    def loop(model, optimizer):
        seen = []
        handles = [
            module.register_forward_hook(lambda module, args, out: seen.append(out.detach().sum()))
            for module in (model, model.blocks[1], model.blocks[2].up)  # the model, a region, and a part of a region
        ]
        handles.append(model.blocks[3].down.register_full_backward_hook(lambda module, given, got: seen.append(got[0].sum())))
        yield from three_steps(model, optimizer)
        yield list(seen)
        for handle in handles:
            handle.remove()
        yield from three_steps(model, optimizer)
        yield len(seen)

    found = same(loop, tower(), budget="64MiB")
    assert len(found.plans) == 2  # with the hooks on parts of regions, and without them
    assert {len(plan.plans) for plan in found.plans.values()} == {2, 4}


def test_it_can_be_neither_copied_nor_pickled():
    model = tower()
    with fitting(model):
        model(**batch(0)).backward()
        for refused in (
            copy.deepcopy,
            copy.copy,
            pickle.dumps,
            lambda model: torch.save(model, io.BytesIO()),
            lambda model: copy.deepcopy(model.blocks),
        ):
            with pytest.raises(BadInput, match=r"cannot be copied or pickled whole.*save model.state_dict\(\)"):
                refused(model)
    assert equal(copy.deepcopy(model).state_dict(), pickle.loads(pickle.dumps(model)).state_dict())


def test_its_state_is_saved_and_loaded_as_before():
    model, other = tower(), tower(dropout=0.1)
    before = copy.deepcopy(model.state_dict())
    with fitting(model):
        model(**batch(0)).backward()
        assert equal(dict(model.state_dict()), dict(before)) and list(model.state_dict()) == list(before)
        changed = {name: value + 1 for name, value in before.items()}
        assert not model.load_state_dict(changed).missing_keys
        other.load_state_dict(changed)
        assert equal(model(**batch(0)), other.eval()(**batch(0)))


def test_release_gives_the_model_back():
    model = tower()
    plain = {name: dict(module.__dict__) for name, module in model.named_modules()}
    fit(model, budget=TIGHT, compile=False, progress=lambda _: None)
    loss = model(**batch(0))
    assert release(model) is model
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == {name: set(before) for name, before in plain.items()}
    with pytest.raises(BadInput, match="nothing to release"):
        release(model)
    with pytest.raises(BadInput, match=r"not under tierwise.fit"):
        plan_of(model)
    with pytest.raises(CopyFault, match=r"call backward before tierwise.release"):
        loss.backward()
    model.zero_grad()
    same(three_steps, model, budget=TIGHT)  # and it can be fitted again


def test_a_model_is_fitted_once():
    model = tower()
    with fitting(model) as found:
        with pytest.raises(BadInput, match=r"already under tierwise.fit; call tierwise.release\(model\) first"):
            fit(model, budget=TIGHT)
        assert fitted_of(model) is found
        with pytest.raises(BadInput, match="there is no plan yet"):
            plan_of(model)


def test_a_model_nobody_released_is_collected(tmp_path):
    import gc
    import threading
    import weakref

    def use() -> weakref.ref:
        model = tower()
        fit(model, budget=TIGHT, compile=False, progress=lambda _: None)
        model(**batch(0)).backward()
        return weakref.ref(model)

    gone = use()
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierwise")]


def test_optimizer_comes_back_with_the_model():
    model = tower()
    optimizer = sgd(model)
    assert fit(model, optimizer, budget=TIGHT, compile=False) == (model, optimizer)
    release(model)


@pytest.mark.parametrize("send", [False, True])
def test_writing_to_what_backward_needs_is_an_error_as_ever(send, monkeypatch):
    class Writing(Tower):
        writes = False  # not in the step that is planned

        def forward(self, x, target):
            x = self.enter(x)
            for block in self.blocks:
                y = block(x)
                if self.writes:
                    x += 1  # what the block was given, and its backward reads
                x = y
            return (self.leave(x) - target).square().mean()

    torch.manual_seed(0)
    model = Writing()
    with forced(monkeypatch, "keep", send=send), fitting(model, budget="64MiB") as found:
        expected = gradients(model(**batch(0)).backward() or model)
        model.zero_grad()
        model.writes = True
        loss = model(**batch(0))
        with pytest.raises(RuntimeError, match=r"written to in place after its forward" if send else "modified by an inplace operation"):
            loss.backward()
        del loss
        assert found.below.used_bytes == 0
        model.zero_grad()
        model.writes = False
        assert equal(gradients(model(**batch(0)).backward() or model), expected)
