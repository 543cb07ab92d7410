"""A model and one call of it become a Menu: the step captured, the choices of each region class compiled and timed on this device."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..capture import capture_step, region_examples
from ..errors import BadInput, CannotCapture, CaptureError
from ..execute.device import Device
from ..execute.torch_compat import without_hooks
from ..ir import Choice, Graph, Machine, Menu, Op, Phase, Problem, SavedValue
from ..lower.coarse import RegionBorder
from ..profile.options import OptionTimes, first_run, is_timed, option_times
from ..profile.roofline import SMALL_SHARE, fused_costs, region_shares, roofline_costs
from ..regions import JointGraph, Option, option_saving, options
from ..regions.compiled import CompiledOption, compile_option, compiled_together
from ..regions.elsewhere import Elsewhere
from ..regions.held import workspace_of
from ..regions.joint import Look, look_at
from .apart import adds_in_another_order, hook_inside, set_apart
from .ops_outside import with_ops_outside

MOST_CHOICES = 6
MANY_CLASSES = 5  # to compile: processes that help take ten seconds to start
SMALLEST_SHARE = 0.001  # of the bytes that forward makes
Progress = Callable[[str], None]
AtHand = Callable[[str], contextlib.AbstractContextManager[None]]
"""A module's parameters are on the device, for whoever runs it by itself."""


@dataclass(frozen=True, slots=True)
class RegionCode:
    """One region class as it can run: its choices as code, by name."""

    example: str  # module path
    joint: JointGraph
    options: Mapping[str, Option]
    code: Mapping[str, CompiledOption]
    call: tuple[Any, Any]  # arguments of an example call, tensors without data
    look: Look


@dataclass(frozen=True, slots=True)
class PreparedMenu:
    menu: Menu
    regions: Mapping[int, RegionCode]
    notes: tuple[str, ...]
    at_hand: AtHand = lambda path: contextlib.nullcontext()
    elsewhere: Elsewhere | None = None  # where choices are compiled, for as long as it is open


def prepare_menu(
    model: nn.Module,
    call: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    machine: Machine,
    device: Device,
    *,
    compile: bool,
    accumulation: bool = False,
    masters: str | None = None,
    hold_output: bool = True,
    codes: dict[Any, RegionCode] | None = None,
    at_hand: AtHand = lambda path: contextlib.nullcontext(),
    elsewhere: Elsewhere | None = None,
    progress: Progress = lambda what: None,
) -> PreparedMenu:
    """Everything the planner needs to know of `model(**call)` and its backward. What `codes` has of earlier calls is not made again."""
    kind = device.torch_device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    progress("tracing one step")
    with without_hooks(model):
        captured = _captured(model, call, optimizer, autocast, accumulation, masters, hold_output)
    hooked = {call.id: reason for call in captured.graph.calls if (reason := hook_inside(model.get_submodule(call.module)))}
    graph, apart = set_apart(captured.graph, hooked)
    costs = fused_costs(graph, machine) if compile else roofline_costs(graph, machine)
    notes = list(captured.notes)
    with without_hooks(model):
        examples = _example_calls(model, call, graph, autocast)
    regions: dict[int, RegionCode] = {}
    choices: dict[int, tuple[Choice, ...]] = {}
    classes = [region for region in graph.regions if region.id in examples and region.id not in apart and _worth_it(graph, region.id)]
    if elsewhere is not None and kind == "cuda" and compile and not codes and len(classes) >= MANY_CLASSES:
        elsewhere.start(device.torch_device)  # ready by the time that something is to be compiled
    for region in classes:
        module = model.get_submodule(region.example)
        args, kwargs = with_numbers(examples[region.id], device)
        progress(f"{region.kind}: what it can save and recompute")
        try:
            with at_hand(region.example):
                code = _known_code(codes if codes is not None else {}, module, region.example, args, kwargs, examples[region.id], compile)
        except CannotCapture as error:
            notes.append(f"{region.example} ({region.kind}) runs as it is: {error.reason}")
            continue
        if not code.options:
            continue
        regions[region.id] = code
        choices[region.id] = estimated_choices(code, region.id, Problem(graph, machine, costs))
    if not compile:
        inexact = {call.id: adds_in_another_order(graph, call.id, regions[call.region].look) for call in graph.calls if call.region in regions}
        graph, more = set_apart(graph, {call: reason for call, reason in inexact.items() if reason})
        apart |= more
    notes += [f"{graph.regions[region].example} ({graph.regions[region].kind}) runs as it is: {reason}" for region, reason in apart.items()]
    used = {call.region for call in graph.calls}
    choices = {region: found for region, found in choices.items() if region in used}
    regions = {region: code for region, code in regions.items() if region in used}
    menu = Menu(Problem(graph, machine, costs), choices)
    if kind == "cuda":
        menu = with_ops_outside(menu, captured.recipes, device.torch_device, progress)
    return PreparedMenu(menu, regions, tuple(dict.fromkeys(notes)), at_hand, elsewhere)


def measured(prepared: PreparedMenu, model: nn.Module, wanted: Mapping[int, set[str]], device: Device, progress: Progress) -> PreparedMenu:
    """The menu with these choices compiled and timed on the device, and the others of their classes estimated from them."""
    choices = dict(prepared.menu.choices)
    calls, untimed = {}, set()
    settle = {region: share >= SMALL_SHARE for region, share in region_shares(prepared.menu.problem.graph, prepared.menu.problem.machine).items()}
    with compiled_together(prepared.elsewhere) as together:
        for region, names in wanted.items():
            code = prepared.regions[region]
            module = model.get_submodule(code.example)
            for name in sorted(names):
                args, kwargs = with_numbers(code.call, device)
                if not is_timed(code.options[name], module, args, kwargs, settle=settle[region]):
                    untimed.add((region, name))
                    progress(f"{type(module).__name__}: compiling '{name}'")
                    with prepared.at_hand(code.example):
                        together.compile(code.code[name], module, args, kwargs)
                calls[region, name] = code, module
        if untimed:
            progress("compiling kernels")
    for region, name in sorted(untimed):
        code, module = calls[region, name]
        progress(f"{type(module).__name__}: tuning '{name}'")
        with prepared.at_hand(code.example):
            first_run(code.code[name], module, *with_numbers(code.call, device))
    for (region, name), (code, module) in calls.items():  # all in a row, so that the device stays warm
        if (region, name) in untimed:
            progress(f"{type(module).__name__}: timing '{name}'")
        args, kwargs = with_numbers(code.call, device)
        with prepared.at_hand(code.example):
            times = option_times(code.code[name], module, args, kwargs, settle=settle[region])
        choices[region] = tuple(_with_times(choice, times) if choice.name == name else choice for choice in choices[region])
    for region in wanted:
        known = next((choice for choice in choices[region] if choice.measured), None)
        if known is not None:
            code = prepared.regions[region]
            choices[region] = tuple(choice if choice.measured else _from_known(choice, known, code) for choice in choices[region])
    return replace(prepared, menu=replace(prepared.menu, choices=choices))


def _with_times(choice: Choice, times: OptionTimes) -> Choice:
    return replace(
        choice,
        forward_seconds=times.forward_seconds,
        backward_seconds=times.backward_seconds,
        forward_workspace_bytes=times.workspace_forward_bytes,
        backward_workspace_bytes=times.workspace_backward_bytes,
        measured=True,
    )


def estimated_choices(code: RegionCode, region: int, problem: Problem) -> tuple[Choice, ...]:
    """Every option of a class as a choice, from the seconds of the step's ops and the sizes of its storages; nothing is run."""
    graph, device = problem.graph, problem.machine.device
    call = next(call.id for call in graph.calls if call.region == region)
    ops = {phase: [op for op in graph.ops if op.region == call and op.phase is phase] for phase in Phase}
    seconds = {phase: sum(problem.costs.op_seconds[op.id, device.name] for op in ops[phase]) for phase in Phase}
    border = RegionBorder(graph, ops[Phase.FORWARD], ops[Phase.BACKWARD])
    choices = [
        Choice(
            name,
            tuple(SavedValue(value, code.joint.named[value].nbytes) for value in option.saved if not code.joint.named[value].is_output),
            option.input_bytes > 0,
            option.output_bytes > 0,
        )
        for name, option in code.options.items()
    ]
    kept = option_saving(code.joint, code.joint.keep)
    most = replace(
        choices[0],
        saved=(SavedValue("", kept.saved_bytes),),
        forward_seconds=seconds[Phase.FORWARD],
        backward_seconds=seconds[Phase.BACKWARD],
        forward_workspace_bytes=max(0, border.forward_workspace() - kept.saved_bytes),
        backward_workspace_bytes=border.backward_workspace(),
    )
    found = [_from_known(choice, most, code) for choice in choices]
    if code.joint.compiled:
        return tuple(found)
    needs = [workspace_of(code.look, code.options[choice.name]) for choice in found]  # op by op it can be read from the graph
    return tuple(
        replace(choice, forward_workspace_bytes=need.forward_bytes, backward_workspace_bytes=need.backward_bytes)
        for choice, need in zip(found, needs, strict=True)
    )


def _from_known(choice: Choice, known: Choice, code: RegionCode) -> Choice:
    """What a choice costs more than another of its class: its share of the forward's work again, and room for what it makes again."""
    flops = sum(value.flops for value in code.joint.values if value.in_forward)
    moved = sum(code.joint.moved_bytes(value.name) for value in code.joint.values if value.in_forward)
    option, other = code.options[choice.name], code.options.get(known.name)
    more_flops = option.recompute_flops - (other.recompute_flops if other else 0)
    more_moved = option.recompute_moved_bytes - (other.recompute_moved_bytes if other else 0)
    share = more_flops / flops if flops else more_moved / max(1, moved)
    if flops and not code.joint.compiled:  # op by op, passes over the data are not for nothing
        share = (more_flops / flops + more_moved / max(1, moved)) / 2
    freed = known.saved_bytes - choice.saved_bytes
    return replace(
        choice,
        forward_seconds=known.forward_seconds,
        backward_seconds=max(0.0, known.backward_seconds + share * known.forward_seconds),
        forward_workspace_bytes=max(0, (known.forward_workspace_bytes or 0) + freed // 2),
        backward_workspace_bytes=max(0, (known.backward_workspace_bytes or 0) + freed),
    )


def as_keywords(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    signature = inspect.signature(type(model).forward)
    try:
        bound = signature.bind(model, *args, **kwargs).arguments
    except TypeError as error:
        raise BadInput(f"{type(model).__name__} cannot be called like this: {error}") from None
    named: dict[str, Any] = {}
    for name, value in list(bound.items())[1:]:  # the first is the model itself
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise BadInput(f"{type(model).__name__}.forward takes {name} by position only; name its parameters so that a step can be traced")
        else:
            named[name] = value
    return named


def _captured(
    model: nn.Module, call: Mapping[str, Any], optimizer: Any, autocast: Any, accumulation: bool, masters: str | None, hold_output: bool
) -> Any:
    options = {
        "optimizer": optimizer if optimizer is not None else "sgd", "autocast": autocast, "accumulation": accumulation, "masters": masters,
        "hold_output": hold_output,
    }  # fmt: skip
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
    return {region: _specs(call) for region, call in fakes.items()}


def _specs(call: tuple[Any, Any]) -> tuple[Any, Any]:
    """A call with tensors without data in place of fake ones: the same for the same, parameters for parameters."""
    made: dict[int, torch.Tensor] = {}

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            made[id(value)] = _like(value, empty)
        return made[id(value)]

    args, kwargs = call
    return tree_map(spec, args), tree_map(spec, kwargs)


def _like(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made.requires_grad_(value.requires_grad)


def _known_code(
    codes: dict[Any, RegionCode], module: nn.Module, name: str, args: Any, kwargs: Any, call: tuple[Any, Any], compile: bool
) -> RegionCode:
    modes = tuple(part.training for part in module.modules()), tuple(weight.requires_grad for weight in module.parameters())
    kind = next((leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), "cpu")
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = name, str(tree_map(_as_text, (args, kwargs))), modes, cast
    if key not in codes:
        codes[key] = _region_code(module, name, args, kwargs, call, compile)
    return codes[key]


def _as_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.requires_grad}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"{type(value).__name__} {id(value)}"


def _region_code(module: nn.Module, name: str, args: Any, kwargs: Any, call: tuple[Any, Any], compile: bool) -> RegionCode:
    if "forward" in module.__dict__:
        raise CannotCapture("another tool gave this module a forward of its own")
    forward = type(module).forward
    look = look_at(forward, module, args, kwargs, compile=compile)
    if not look.seen.values:
        return RegionCode(name, look.seen, {}, {}, call, look)
    found = {option.name: option for option in options(look.seen, most=MOST_CHOICES)}
    code = {option.name: compile_option(forward, option, compile=compile, donate=False) for option in found.values()}
    return RegionCode(name, look.seen, found, code, call, look)


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
    return _like(value, made)


def _worth_it(graph: Graph, region: int) -> bool:
    """A single op has nothing to fuse and nothing to choose, and a compilation takes seconds: not for a thousandth of the memory."""
    calls = [call.id for call in graph.calls if call.region == region]
    ops = [op for op in graph.ops if calls and op.region == calls[0] and op.kind != "release"]
    made = [_made_bytes(graph, [op for op in ops if op.phase is Phase.FORWARD]) * len(calls), _made_bytes(graph, graph.ops)]
    is_large = made[0] > SMALLEST_SHARE * made[1]
    return is_large and len([op for op in ops if op.phase is Phase.FORWARD]) > 1 and any(op.phase is Phase.BACKWARD for op in ops)


def _made_bytes(graph: Graph, ops: Iterable[Op]) -> int:
    return sum(graph.storages[storage].nbytes for op in ops if op.phase is Phase.FORWARD for storage in op.writes)
