"""A model and one call of it become a Menu: the step captured, the choices of each region class compiled and timed on this device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..capture import capture_step, region_examples
from ..errors import BadInput, CannotCapture, CaptureError
from ..execute.device import Device
from ..ir import Choice, Graph, Machine, Menu, Phase, Problem, SavedValue
from ..profile.options import is_timed, option_times
from ..profile.roofline import fused_costs, roofline_costs
from ..regions import JointGraph, Option, options
from ..regions.compiled import CompiledOption, compile_option
from ..regions.joint import describe

MOST_CHOICES = 6
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RegionCode:
    """One region class as it can run: its choices as code, by name."""

    example: str  # module path
    joint: JointGraph
    options: Mapping[str, Option]
    code: Mapping[str, CompiledOption]
    call: tuple[Any, Any]  # arguments of an example call, tensors without data


@dataclass(frozen=True, slots=True)
class PreparedMenu:
    menu: Menu
    regions: Mapping[int, RegionCode]
    notes: tuple[str, ...]


def prepare_menu(
    model: nn.Module,
    call: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    machine: Machine,
    device: Device,
    *,
    compile: bool,
    progress: Progress = lambda what: None,
) -> PreparedMenu:
    """Everything the planner needs to know of `model(**call)` and its backward."""
    kind = device.torch_device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    progress("tracing one step")
    captured = _captured(model, call, optimizer, autocast)
    graph = captured.graph
    costs = fused_costs(graph, machine) if compile else roofline_costs(graph, machine)
    notes = list(captured.notes)
    examples = _example_calls(model, call, graph, autocast)
    regions: dict[int, RegionCode] = {}
    choices: dict[int, tuple[Choice, ...]] = {}
    for region in graph.regions:
        if region.id not in examples or not _worth_it(graph, region.id):
            continue
        module = model.get_submodule(region.example)
        args, kwargs = with_numbers(examples[region.id], device)
        progress(f"{region.kind}: what it can save and recompute")
        try:
            code = _region_code(module, region.example, args, kwargs, examples[region.id], compile)
        except CannotCapture as error:
            notes.append(f"{region.example} ({region.kind}) runs as it is: {error.reason}")
            continue
        if not code.options:
            continue
        found = timed_choices(code, module, args, kwargs, device, progress)
        regions[region.id] = code
        choices[region.id] = with_estimates(graph, region.id, found, machine, costs.op_seconds)
    return PreparedMenu(Menu(Problem(graph, machine, costs), choices), regions, tuple(dict.fromkeys(notes)))


def as_keywords(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    signature = inspect.signature(type(model).forward)
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError as error:
        raise BadInput(f"{type(model).__name__} cannot be called like this: {error}") from None
    named: dict[str, Any] = {}
    for (name, value), is_self in zip(bound.items(), [True, *[False] * len(bound)], strict=False):
        parameter = signature.parameters[name]
        if is_self:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise BadInput(f"{type(model).__name__}.forward takes {name} by position only; name its parameters so that a step can be traced")
        else:
            named[name] = value
    return named


def _captured(model: nn.Module, call: Mapping[str, Any], optimizer: Any, autocast: Any) -> Any:
    options = {"optimizer": optimizer if optimizer is not None else "sgd", "autocast": autocast}
    try:
        return capture_step(model, dict(call), **options)
    except CaptureError as error:
        if "no loss" not in str(error):
            raise
    return capture_step(model, dict(call), loss=_stand_in_loss, **options)


def _stand_in_loss(output: Any) -> torch.Tensor:
    """Where the loss is computed outside of the model: anything that sends a gradient to everything it returned."""
    from ..profile.options import tensors_in

    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise CaptureError("the model returned nothing that depends on a trainable parameter; check requires_grad and torch.no_grad")
    return torch.stack([tensor.float().sum() for tensor in found]).sum()


def _example_calls(model: nn.Module, call: Mapping[str, Any], graph: Graph, autocast: Any) -> dict[int, tuple[Any, Any]]:
    """What each region class is called with, as tensors without data."""
    with region_examples(model, dict(call), graph, autocast=autocast) as examples:
        fakes = {region: (example.args, example.kwargs) for region, example in examples.items()}
    return {region: (tree_map(_spec, args), tree_map(_spec, kwargs)) for region, (args, kwargs) in fakes.items()}


def _spec(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return made.requires_grad_(value.requires_grad)


def _region_code(module: nn.Module, name: str, args: Any, kwargs: Any, call: tuple[Any, Any], compile: bool) -> RegionCode:
    if "forward" in module.__dict__:
        raise CannotCapture("another tool gave this module a forward of its own")
    forward = type(module).forward
    joint = describe(forward, module, args, kwargs, compile=compile)
    if not joint.values:
        return RegionCode(name, joint, {}, {}, call)
    found = {option.name: option for option in options(joint, most=MOST_CHOICES)}
    code = {option.name: compile_option(forward, option, compile=compile, donate=False) for option in found.values()}
    return RegionCode(name, joint, found, code, call)


def with_numbers(call: tuple[Any, Any], device: Device) -> tuple[Any, Any]:
    """Arguments on the device, random; what was one tensor is one."""
    made: dict[int, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = _with_data(value, device.torch_device)
        return made[id(value)]

    args, kwargs = call
    return tree_map(real, args), tree_map(real, kwargs)


def _with_data(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        once = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
        made = torch.empty_strided(once, value.stride(), dtype=value.dtype, device=device)
        made = (made.normal_() if made.is_floating_point() else made.fill_(made.dtype is torch.bool)).expand(value.shape)
    return made.requires_grad_(value.requires_grad)


def timed_choices(code: RegionCode, module: nn.Module, args: Any, kwargs: Any, device: Device, progress: Progress) -> tuple[Choice, ...]:
    """Every option as a choice; on a GPU compiled and timed."""
    measure = device.torch_device.type == "cuda"
    untimed = [name for name, option in code.options.items() if measure and not is_timed(option, module, args, kwargs)]
    for name in untimed:
        progress(f"compiling '{name}'")
        code.code[name](module, *args, **kwargs)
    if untimed:  # all in a row, so that the device stays warm
        progress(f"timing {len(untimed)} choices")
    return tuple(_choice(code, name, option, module, args, kwargs, measure) for name, option in code.options.items())


def _choice(code: RegionCode, name: str, option: Option, module: nn.Module, args: Any, kwargs: Any, measure: bool) -> Choice:
    saved = tuple(SavedValue(value, code.joint.named[value].nbytes) for value in option.saved if not code.joint.named[value].is_output)
    choice = Choice(name, saved, option.input_bytes > 0, option.output_bytes > 0)
    if not measure:
        return choice
    times = option_times(code.code[name], module, args, kwargs)
    return replace(
        choice,
        forward_seconds=times.forward_seconds,
        backward_seconds=times.backward_seconds,
        forward_workspace_bytes=times.workspace_forward_bytes,
        backward_workspace_bytes=times.workspace_backward_bytes,
        measured=True,
    )


def with_estimates(
    graph: Graph,
    region: int,
    choices: tuple[Choice, ...],
    machine: Machine,
    seconds: Mapping[tuple[int, str], float],
    most_bytes: int | None = None,
) -> tuple[Choice, ...]:
    """Where nothing was measured: the ops' own seconds, and for what is recomputed the share of the forward that its bytes were."""
    if all(choice.measured for choice in choices):
        return choices
    call = next(call.id for call in graph.calls if call.region == region)
    spent = {phase: sum(seconds[op.id, machine.device.name] for op in graph.ops if op.region == call and op.phase is phase) for phase in Phase}
    most = max(1, most_bytes or 0, *(choice.saved_bytes for choice in choices))
    again = [spent[Phase.FORWARD] * (1 - choice.saved_bytes / most) for choice in choices]
    return tuple(
        replace(choice, forward_seconds=spent[Phase.FORWARD], backward_seconds=spent[Phase.BACKWARD] + extra)
        for choice, extra in zip(choices, again, strict=True)
    )


def _worth_it(graph: Graph, region: int) -> bool:
    """A single op has nothing to fuse and nothing to choose."""
    call = next((call.id for call in graph.calls if call.region == region), None)
    ops = [op for op in graph.ops if op.region == call and op.kind != "release"]
    return len([op for op in ops if op.phase is Phase.FORWARD]) > 1 and any(op.phase is Phase.BACKWARD for op in ops)
