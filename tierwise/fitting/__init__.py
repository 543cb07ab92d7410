"""`tierwise.fit`: capture, choose, compile, install. The loop stays as it is.

model, optimizer = tierwise.fit(model, optimizer, budget="24GiB")
...
print(tierwise.plan_of(model).summary())
tierwise.release(model)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import BadInput, UnknownName
from ..execute.device import Device
from ..execute.session import session_of
from ..integrations.progress import Teller
from ..ir import Machine
from ..units import parse_bytes, parse_store
from .closures import closures_first
from .fitted import Fitted
from .here import device_of, machine_of
from .measured_here import with_disk
from .plan import Plan
from .programs import PLAN_SECONDS
from .settings import Settings, log_level_from_environment
from .wrapped import inside, plain_optimizer, set_aside

__all__ = ["Plan", "fit", "fitted_of", "plan_of", "release", "stats"]

MARGIN_BYTES = 1 << 30  # of a whole card: its context and what libraries take past the allocator


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: str | int | float | None = None,
    host: str | int | None = None,
    pinned: str | int | None = None,
    nvme: str | None = None,
    policy: str = "auto",
    compile: bool | None = None,
    verify: bool = False,
    masters: str | None = None,
    update: str = "after",
    example: Any = None,
    weights: str | os.PathLike[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
    plan_seconds: float = PLAN_SECONDS,
    device: Device | torch.device | str | None = None,
    machine: Machine | None = None,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Make training of `model` hold a budget of device memory. The model is changed in place and returned, with the optimizer if one was given.

    budget    bytes, "24GiB", or a share of the card such as 0.8; what is free on the card if not given
    host      how much host memory may be used; pinned: how much of that may be locked
    nvme      "DIR:200GiB": a directory for scratch files and how much of it may be used
    policy    "auto", or a policy of the zoo that runs at the borders of blocks; "keep_all" changes nothing but compile
    compile   whether regions are compiled by Inductor; by default on a GPU
    verify    run the first step of each shape twice more, planned and under plain checkpointing, and compare loss and gradients
    masters   "fp32": the optimizer works on fp32 copies of bf16 or fp16 parameters, with fp32 state; by default on the parameters as they are
    update    when state that does not fit on the card is updated: "after" backward and under the next forward, exact whatever the loop does in
              between; "backward": as gradients arrive, for loops that do nothing between backward and step
    weights   a .safetensors file or a folder of them: values for parameters, read module by module as they go to where they live
    device    "cuda" for a model that is still on the CPU, or on the meta device with weights=: it is never whole on the card unless it fits
    plan      a file that plan_of(model).save(path) wrote, to run by it again rather than plan; it is refused for anything but the same step
    plan_seconds  how long to look for the fastest plan, 10 if not given, not counting what is compiled and timed for it; less where the CPU
              stands in for a GPU, whose times are guesses
    machine   what to plan for, as tierwise.machines.load gives it; if not given, what ships for this card with this machine's own links, disk and
              speed of updates on the CPU, or else all of it measured here
    progress  is called with a sentence when a piece of work begins; by default a bar on stderr, where that is a terminal
    example   a batch (a mapping for model(**batch), a tuple for model(*batch)) to plan with now rather than at the first step
    """
    log_level_from_environment()
    if not isinstance(model, nn.Module):
        raise BadInput(f"fit takes a torch.nn.Module, not a {type(model).__name__}")
    trained = inside(model)
    if session_of(trained) is not None:
        raise BadInput("the model is already under tierwise.fit; call tierwise.release(model) first")
    here = device if isinstance(device, Device) else device_of(trained, device)
    settings = Settings(
        budget_bytes=_free_bytes(here) if budget is None else parse_bytes(budget, of=here.capacity_bytes),
        host_bytes=None if host is None else parse_bytes(host),
        pinned_bytes=None if pinned is None else parse_bytes(pinned),
        nvme=None if nvme is None else parse_store(nvme),
        policy=policy,
        compile=here.torch_device.type == "cuda" if compile is None else compile,
        verify=verify,
        masters=masters,
        update=_one_of("update", update, ("after", "backward")),
        weights=weights,
        plan=plan,
        plan_seconds=_positive("plan_seconds", plan_seconds),
    )
    on = machine or machine_of(here)
    if machine is None and settings.nvme is not None and here.torch_device.type == "cuda":
        on = with_disk(on, settings.nvme[0])
    with set_aside(model) as aside:
        if optimizer is not None:
            aside.take(closures_first(plain_optimizer(optimizer)))
        fitted = Fitted(
            trained, plain_optimizer(optimizer), here, on, settings, progress or Teller(),
            closes_device=here is not device, machine_is_given=machine is not None,
        )  # fmt: skip
        aside.belongs_to(fitted)
    if example is not None:
        try:
            fitted.prepare(*_call_of(example))
        except BaseException:
            release(model)
            raise
        finally:
            fitted.tell()
    return model if optimizer is None else (model, optimizer)


def release(model: nn.Module) -> nn.Module:
    """Give the model back as it was before `fit`."""
    session = session_of(inside(model))
    if session is None:
        raise BadInput("the model is not under tierwise.fit, so there is nothing to release")
    session.owner.close()
    return model


def plan_of(model: nn.Module) -> Plan:
    """The plan the model runs by now."""
    plan = fitted_of(model).current
    if plan is None:
        raise BadInput("there is no plan yet: it is made at the first training step, or by fit(..., example=batch)")
    return plan


def stats(model: nn.Module) -> dict[str, float | int]:
    """Numbers of the last step, and what was predicted for it, to be logged: `wandb.log(tierwise.stats(model))`."""
    return fitted_of(model).meter.stats()


def fitted_of(model: nn.Module) -> Fitted:
    session = session_of(inside(model))
    if session is None:
        raise BadInput("the model is not under tierwise.fit; call tierwise.fit(model, optimizer, budget=...) first")
    found: Fitted = session.owner
    return found


def _call_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UnknownName(name, value, known)
    return value


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise BadInput(f"{name}={value!r} is no number of seconds; use one above 0, such as {name}=10")
    return float(value)


def _free_bytes(device: Device) -> int:
    if device.torch_device.type != "cuda":
        return device.capacity_bytes
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    return max(1, free + device.memory().reserved_bytes - MARGIN_BYTES)
