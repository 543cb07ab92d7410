"""The user's optimizer, with its methods answered by lasting state: still the same object of the same class, in the same layout.

`step` starts the updates. `state_dict` gives what torch's would give, masters as one key more; it loads without us. `load_state_dict` takes that,
or a state that torch saved, to wherever the state lives now.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NoReturn, Protocol

import torch

from ...errors import BadInput
from .torch_compat import run_hooks, with_step_hooks

MASTER = "master"  # the key of fp32 masters in a parameter's state


class Keeper(Protocol):
    def step(self) -> None: ...

    def collected(self) -> dict[Any, dict[str, Any]]:
        """The state by parameter, in torch's layout."""

    def distribute(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take over a state by parameter."""


class Facade:
    """Methods on the instance; `close` takes them off again."""

    def __init__(self, optimizer: torch.optim.Optimizer, keeper: Keeper) -> None:
        self._optimizer = optimizer
        names = ("step", "state_dict", "load_state_dict", "add_param_group", "_step_supports_amp_scaling")
        self._before = {name: optimizer.__dict__[name] for name in names if name in optimizer.__dict__}
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._opt_called = True  # type: ignore[attr-defined]
            with torch.no_grad():
                keeper.step()
            return loss

        hooked = with_step_hooks(step)
        if scheduled:
            hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        kind = type(optimizer)

        def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
            kept, self.state = self.state, keeper.collected()  # type: ignore[assignment]
            try:
                return kind.state_dict(self)
            finally:
                self.state = kept

        def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            state_dict = run_hooks(self, "load_state_dict_pre", state_dict.copy()) or state_dict
            keeper.distribute(_with_parameters(self, state_dict))
            run_hooks(self, "load_state_dict_post")

        def add_param_group(self: torch.optim.Optimizer, group: Any) -> NoReturn:
            raise BadInput(
                "a parameter group cannot be added while the optimizer's state is placed; call tierwise.release(model), add it, and fit again"
            )

        for name, method in {
            "step": hooked,
            "state_dict": state_dict,
            "load_state_dict": load_state_dict,
            "add_param_group": add_param_group,
        }.items():
            optimizer.__dict__[name] = types.MethodType(method, optimizer)  # type: ignore[arg-type]
        optimizer.__dict__["_step_supports_amp_scaling"] = False  # a GradScaler then divides the gradients itself, wherever they are

    def close(self) -> None:
        for name in ("step", "state_dict", "load_state_dict", "add_param_group", "_step_supports_amp_scaling"):
            self._optimizer.__dict__.pop(name, None)
        self._optimizer.__dict__.update(self._before)


def _with_parameters(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """A saved state by parameter; the groups' settings are taken over."""
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"the loaded state has {len(saved)} parameter groups and the optimizer has {len(groups)}; load it into the optimizer it is of"
        )
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"parameter group {number} of the loaded state has {len(other['params'])} parameters and the optimizer's has {len(group['params'])}; "
                f"load it into the optimizer it is of"
            )
    parameters = {index: p for group, other in zip(groups, saved, strict=True) for index, p in zip(other["params"], group["params"], strict=True)}
    for group, other in zip(groups, saved, strict=True):
        group.update({key: deepcopy(value) for key, value in other.items() if key not in ("params", "param_names")})
    return {parameters[index]: state for index, state in state_dict["state"].items() if index in parameters}
