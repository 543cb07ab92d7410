"""What an optimizer keeps for each parameter, and its update: one op per parameter, whatever grouping a run uses.

    adamw, adam    two moments like the parameter (three with amsgrad)
    sgd            nothing; sgd-momentum one buffer like the parameter
    adafactor      one row and one column per matrix (torch.optim.Adafactor), one value per element of a vector
    adamw8bit      two moments of one byte per element and one fp32 scale per 256; parameters below 4096 elements in fp32 (bitsandbytes)

With fp32 masters, a parameter of lower precision has an fp32 copy, and its state is fp32 too. Any other torch.optim.Optimizer is asked by running one
step of it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BadInput, CaptureError, UnknownName
from ..ir import MASTER

_BLOCK_ELEMENTS = 256
_LEAST_8BIT_ELEMENTS = 4096


@dataclass(frozen=True, slots=True)
class State:
    name: str
    nbytes: int


StateRule = Callable[[torch.Tensor, int], list[State]]  # of a parameter, with so many bytes an element of state


def _like(*names: str) -> StateRule:
    return lambda parameter, element_bytes: [State(name, parameter.numel() * element_bytes) for name in names]


def _adafactor(parameter: torch.Tensor, element_bytes: int) -> list[State]:
    if parameter.dim() < 2:
        return [State("variance", parameter.numel() * element_bytes)]
    rows, columns = parameter.numel() // parameter.shape[-1], parameter.numel() // parameter.shape[-2]
    return [State("row_var", rows * element_bytes), State("col_var", columns * element_bytes)]


def _adamw8bit(parameter: torch.Tensor, _: int) -> list[State]:
    elements = parameter.numel()
    if elements < _LEAST_8BIT_ELEMENTS:
        return [State(name, 4 * elements) for name in ("state1", "state2")]
    scales = 4 * -(-elements // _BLOCK_ELEMENTS)
    return [State("state1", elements), State("state2", elements), State("absmax1", scales), State("absmax2", scales)]


_RULES: dict[str, StateRule] = {
    "adamw": _like("exp_avg", "exp_avg_sq"),
    "adam": _like("exp_avg", "exp_avg_sq"),
    "sgd": _like(),
    "sgd-momentum": _like("momentum_buffer"),
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
}

Plan = dict[str, list[State]]  # parameter name -> its state; parameters that are not updated are missing


def plan_updates(
    optimizer: str | torch.optim.Optimizer, masters: str | None, originals: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> Plan:
    """The state of each parameter that has a gradient and that the optimizer holds; a master is its first entry.

    originals: the user's parameters by name, by which an Optimizer knows them. trained: fake parameters that got a gradient, by name.
    """
    if masters not in (None, "fp32"):
        raise BadInput(f"masters={masters!r}; it is None (the optimizer works on the parameters as they are) or 'fp32'")
    if isinstance(optimizer, str):
        if optimizer not in _RULES:
            raise UnknownName("optimizer", optimizer, _RULES)
        return {name: _with_master(_RULES[optimizer], parameter, masters) for name, parameter in trained.items()}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"optimizer is a {type(optimizer).__name__}; give one of {', '.join(sorted(_RULES))}, or a torch.optim.Optimizer")
    return _plan_of_instance(optimizer, masters, originals, trained)


def _with_master(rule: StateRule, parameter: torch.Tensor, masters: str | None) -> list[State]:
    if masters is None or parameter.element_size() >= 4:
        return rule(parameter, parameter.element_size())
    return [State(MASTER, 4 * parameter.numel()), *rule(parameter, 4)]


def _plan_of_instance(
    optimizer: torch.optim.Optimizer, masters: str | None, originals: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]
) -> Plan:
    name_of = {id(parameter): name for name, parameter in originals.items()}
    held: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in name_of:
                held[name_of[id(parameter)]] = group
    if not held:
        raise BadInput(f"the {type(optimizer).__name__} holds none of the model's parameters; make it from model.parameters()")
    known = {name: _rule_of_group(optimizer, group) for name, group in held.items() if name in trained}
    if all(rule is not None for rule in known.values()):
        return {name: _with_master(rule, trained[name], masters) for name, rule in known.items() if rule is not None}
    if masters is not None:
        raise BadInput(f"masters='fp32' is known for {', '.join(sorted(_RULES))}, not for {type(optimizer).__name__}")
    return _asked(optimizer, {name: (trained[name], held[name]) for name in known})


def _rule_of_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> StateRule | None:
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return _like("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else _RULES["adamw"]
    if type(optimizer) is torch.optim.SGD:
        return _RULES["sgd-momentum"] if group["momentum"] else _RULES["sgd"]
    if type(optimizer) is torch.optim.Adafactor:
        return _adafactor
    return None


def _asked(optimizer: torch.optim.Optimizer, held: dict[str, tuple[torch.Tensor, dict[str, Any]]]) -> Plan:
    """Run one step of an optimizer of the same class on the fake parameters and look at what it keeps."""
    groups = [{**{key: value for key, value in group.items() if key != "params"}, "params": [parameter]} for parameter, group in held.values()]
    try:
        trial = type(optimizer)(groups, **optimizer.defaults)
        trial.step()
    except Exception as error:
        raise CaptureError(
            f"a step of {type(optimizer).__name__} could not be run on fake tensors ({type(error).__name__}: {error}); name an optimizer whose state "
            f"is of the same size instead: one of {', '.join(sorted(_RULES))}"
        ) from error
    return {
        name: [
            State(key, value.untyped_storage().nbytes())
            for key, value in trial.state[parameter].items()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        for name, (parameter, _) in held.items()
    }
