"""A module and a batch become a Graph: trace one step, find its regions, add the update of each parameter.

The step is the ordinary loop's, so `out`, `loss` and the batch are held while backward runs:

    out = model(**batch); loss = out.loss; loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)

Byte sizes are those of the storages; CUDA's allocator rounds each up to a multiple of 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UnknownName
from ..ir import Graph, check_graph
from .assembly import assemble
from .fake_step import FakeStep, loss_of
from .recipes import Recipe
from .regions import find_regions
from .updates import plan_updates

_VIEWS = ("eager",)


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured step, and what there is to say about it."""

    graph: Graph
    notes: tuple[str, ...]
    recipes: Mapping[int, Recipe] = field(default_factory=dict, compare=False)  # by op: how to call it again by itself, to time it


def capture(model: nn.Module, batch: Any, **options: Any) -> Graph:
    """One training step of the model on the batch as a Graph. Takes the options of `capture_step`."""
    return capture_step(model, batch, **options).graph


def capture_step(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: str | torch.optim.Optimizer = "adamw",
    autocast: torch.dtype | str | None = None,
    masters: str | None = None,
    accumulation: bool = False,
    view: str = "eager",
    loss: Callable[[Any], torch.Tensor] | None = None,
    hold_output: bool = True,
) -> Capture:
    """One training step of the model on the batch, traced without a GPU and without memory.

    model         on any device, on fake or on meta tensors; it is copied, not touched
    batch         a mapping, called as model(**batch), a tuple or list, model(*batch), or one tensor
    optimizer     adamw, adam, sgd, sgd-momentum, adafactor, adamw8bit, or a torch.optim.Optimizer
    autocast      the dtype of torch.autocast around the forward, if any
    masters       "fp32" adds fp32 copies of parameters of lower precision
    accumulation  gradients are there before the step and are added to
    view          "eager", the only one of a whole step; joint.py has the joint graphs of its regions
    loss          finds the loss in what the model returns, where that is neither a scalar itself nor has one as .loss, ["loss"] or its first part
    hold_output   whether the loop keeps what the model returned until the step ends; `out = model(**batch)` does, `model(**batch).loss` does not
    """
    if view not in _VIEWS:
        raise UnknownName("view", view, _VIEWS)
    step = FakeStep(model, batch, autocast)
    with step.mode:
        step.run(loss or loss_of, accumulation=accumulation, hold_output=hold_output)
        parameters = dict(step.model.named_parameters())
        trained = {name: parameters[name] for name in step.grads}
        plan = plan_updates(optimizer, masters, dict(model.named_parameters()), trained)
    regions = find_regions(step.calls.calls, step.recorder.records, step.storages.blocks)
    graph, recipes = assemble(step, regions, plan)
    check_graph(graph)
    notes = [*step.notes(), *_notes_on_parameters(model, parameters, trained), *regions.notes]
    return Capture(graph, tuple(dict.fromkeys(notes)), recipes)


def _notes_on_parameters(model: nn.Module, parameters: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> Iterator[str]:
    if not model.training:
        yield "the model is in eval mode: dropout is off and batch norm keeps its statistics; call model.train() before capture for a training step"
    unused = [name for name, parameter in parameters.items() if parameter.requires_grad and name not in trained]
    if unused:
        others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        yield f"{unused[0]}{others} got no gradient: no update and no optimizer state is counted, as torch does"
