"""Where a policy's schedule keeps lasting state, as homes of module paths: updates, state and parameters of a path go where most of the bytes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..errors import NotExecutable
from ..ir import ON_DEVICE, Compute, Phase, Placement, Problem, Role, Schedule
from ..ir.placement import stated
from .states import TIER_OF, StateUnit, state_units

HOME_OF = {tier: home for home, tier in TIER_OF.items()}


def homes_in(problem: Problem, schedule: Schedule, homes: Mapping[str, tuple[Placement, ...]], update: str) -> dict[str, Placement]:
    """By module path, where anything leaves the device. homes: what each path can choose from; update: when updates run."""
    runs_on = {step.op: step.on for step in schedule.steps if isinstance(step, Compute) and problem.graph.ops[step.op].phase is Phase.UPDATE}
    device = problem.machine.device
    if not homes:
        if away := [op for op, processor in runs_on.items() if processor != device.name]:
            raise NotExecutable(
                f"{problem.graph.ops[away[0]].name} runs on {runs_on[away[0]]}, and of this model's updates nothing is known; give fit an optimizer "
                "of torch.optim"
            )
        return {}
    found = {}
    for unit in state_units(problem.graph, homes):
        wanted = _wanted(problem, schedule, unit, runs_on, update)
        found[unit.path] = wanted if wanted == ON_DEVICE else _nearest(unit.path, wanted, homes[unit.path])
    return stated(found)


def _wanted(problem: Problem, schedule: Schedule, unit: StateUnit, runs_on: Mapping[int, str], update: str) -> Placement:
    graph, device = problem.graph, problem.machine.device
    parameters = _home(problem, schedule, unit.parameters)
    if not unit.updates:
        return Placement(parameters=parameters)
    state = _home(problem, schedule, (s for op in unit.updates for s in graph.ops[op].mutates if graph.storages[s].role is Role.OPTIMIZER_STATE))
    work = Counter[str]()
    for op in unit.updates:
        work[runs_on[op]] += sum(graph.storages[s].nbytes for s in graph.ops[op].mutates)
    on_device = max(sorted(work), key=work.__getitem__) == device.name
    if on_device and state == "device":
        return Placement(parameters=parameters)
    if on_device:
        return Placement(state, "streamed", parameters, "host" if update == "after" else "device")
    return Placement("host" if state == "device" else state, "cpu", parameters, "host")


def _home(problem: Problem, schedule: Schedule, storages: Iterable[int]) -> str:
    nbytes = Counter[str]()
    for storage in storages:
        at = schedule.home.get(storage, (problem.device_tier,))
        nbytes["device" if problem.device_tier in at else HOME_OF[at[0]]] += problem.graph.storages[storage].nbytes
    return max(sorted(nbytes), key=nbytes.__getitem__, default="device")


def _nearest(path: str, wanted: Placement, offered: tuple[Placement, ...]) -> Placement:
    """What was wanted, or with the parameters and gradients elsewhere: what several modules share, say, stays."""
    alike = [place for place in offered if (place.state, place.update) == (wanted.state, wanted.update)]
    if not alike:
        raise NotExecutable(
            f"the state of {path} is to live on {wanted.state!r} and be updated on {wanted.update!r}, which this optimizer or this call of fit does "
            "not allow; give it a disk with nvme=, or use policy='auto'"
        )
    return max(alike, key=lambda place: (place.parameters == wanted.parameters, place.parameters == "device", place.gradients == wanted.gradients))
