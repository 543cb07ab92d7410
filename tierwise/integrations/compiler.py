"""torch.compile(model, backend="tierwise"): Inductor, with a choice of what each graph saves for backward.

    torch.compile(model, backend="tierwise")                                  the fewest bytes that passes over the data can make up for
    torch.compile(model, backend="tierwise", options={"saved": "2GiB"})       at most so many, in each graph, for the least work
    torch.compile(model, backend="tierwise", options={"saved": 0.5})          the same, as a share of what Inductor would save
    torch.compile(model, backend="tierwise", options={"saved": "checkpoint"}) by name: keep, cheap or checkpoint

This bounds what graphs save, and that only: nothing is copied away, and parameters, optimizer state, workspace and what runs between graphs are
not looked at. To hold a budget of the device, use tierwise.fit. Shapes must be known: with dynamic=False every shape has its own graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..errors import BadInput, CannotCapture, InfeasibleBudget, UnknownName
from ..regions import JointGraph, Option, options
from ..regions.joint import prepared
from ..regions.partition import fingerprint, split_prepared
from ..regions.torch_compat import CustomPartitionerFn, inductor_with_partition
from ..units import exact_bytes, format_bytes, parse_bytes

__all__ = ["tierwise"]

NAMES = ("keep", "cheap", "checkpoint")
MOST_OPTIONS = 64  # none is compiled before it is chosen
_log = logging.getLogger("tierwise")


def tierwise(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None) -> Callable[..., Any]:
    """The backend, as torch.compile calls it."""
    if mode is not None:
        raise BadInput(f"mode={mode!r} is for Inductor alone; with backend='tierwise' give options={{'saved': ...}} instead")
    given = dict(options or {})
    saved = given.pop("saved", "cheap")
    if given:
        raise UnknownName("option of backend='tierwise'", next(iter(given)), ["saved"])
    return inductor_with_partition(gm, example_inputs, Chooser(saved), precision_casts=True, donate=True)


class Chooser(CustomPartitionerFn):  # type: ignore[misc]
    """A partition function that looks at the joint graph, chooses, and splits it."""

    def __init__(self, saved: str | int | float) -> None:
        self.saved = saved
        if saved not in NAMES:
            parse_bytes(saved, of=1 << 40)  # a mistake is found before anything is traced

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward_outputs, static = kwargs["num_fwd_outputs"], kwargs.get("static_lifetime_input_indices") or ()
        try:
            graph = prepared(gm, forward_outputs=forward_outputs, static_inputs=static, compiled=True)
        except CannotCapture as error:
            raise BadInput(f"what this graph saves cannot be chosen, because {error.reason}; use torch.compile(..., dynamic=False)") from None
        option, most = choose(graph, self.saved)
        _log.info("a graph saves %s for backward where it could save %s (%s)", format_bytes(option.saved_bytes), format_bytes(most), option.name)
        return split_prepared(gm, graph, option, forward_outputs=forward_outputs)

    def uuid(self) -> str:
        return fingerprint(f"Chooser({self.saved!r})")


def choose(graph: JointGraph, saved: str | int | float) -> tuple[Option, int]:
    """The option that was asked for, and what the one that keeps everything saves."""
    found = options(graph, most=MOST_OPTIONS)
    keep, checkpoint = found[0], found[-1]
    if saved == "keep" or len(found) == 1:
        return keep, keep.saved_bytes
    if saved in NAMES:  # where nothing can be had by passes over the data, the first option is the cheap one
        return (checkpoint if saved == "checkpoint" else next((o for o in found if o.name == "cheap"), found[0])), keep.saved_bytes
    limit = parse_bytes(saved, of=max(1, keep.saved_bytes))
    for option in found:  # from the least work to the most
        if option.saved_bytes <= limit:
            return option, keep.saved_bytes
    raise InfeasibleBudget(
        f"a graph cannot save less than {format_bytes(checkpoint.saved_bytes)} for backward, and options={{'saved': {saved!r}}} allows "
        f"{format_bytes(limit)}; allow {exact_bytes(checkpoint.saved_bytes)}, or compile smaller parts",
        least_bytes=checkpoint.saved_bytes,
    )
