"""zenflow: the columns with the largest gradients are updated on the device at once; the others gather on the cpu and are updated every few steps.

Paper    Lan et al., ZenFlow, arXiv 2025, arXiv:2505.12242.
Idea     a tenth of the columns carries most of the gradient; the rest can wait for a cpu that then never holds up the device.
Rule     ratio r = 0.1 of each parameter's columns, by the norm of their gradient, and their state stay on the device and are updated there every
         step. The other gradients leave as they come, (1 - r) of their bytes; the cpu adds them up and every `interval` steps updates with their sum;
         the new parameters, (1 - r) / interval of them each step, are applied one step later.
Differs  it trains another way than the step it is given: the result is not that step's. One step stands for `interval` of them, with an even share
         of the cpu's update and of what comes back. Which columns are chosen, how often that is looked at again, and the warm-up are not modelled;
         nor is DeepSpeed's interval that adjusts itself.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import BadInput
from ..ir import Costs, Graph, Op, Phase, Problem, Role, Schedule, Storage
from . import zero_offload

DECIDES = "which updates run on the cpu, late"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it changes what is trained, and the runtime keeps every update"
EXACTNESS = "lossy: most parameters are updated every few steps, from summed gradients, one step late"
REQUIRES = {"dram", "cpu"}
# Adding a gradient of 2 bytes to a sum of 4 moves 10 bytes; an update of Adam moves 28.
ADDING = 10 / 28


def prepare(problem: Problem, *, ratio: float = 0.1, interval: int = 4) -> Problem:
    if not 0 < ratio < 1 or interval < 1:
        raise BadInput(f"ratio is {ratio} and interval {interval}; a share between 0 and 1 is updated each step, the rest every 1 or more steps")
    return _Rewrite(problem, ratio, interval).problem()


def plan(problem: Problem, *, ratio: float = 0.1, interval: int = 4) -> Schedule:
    return zero_offload.plan(problem)


class _Rewrite:
    """The step with each update cut in two: the hot part on the device, the cold part on the cpu for the next step."""

    def __init__(self, problem: Problem, ratio: float, interval: int) -> None:
        self.before, self.graph, self.ratio, self.interval = problem, problem.graph, ratio, interval
        self.device = problem.machine.device
        self.storages: list[Storage] = list(problem.graph.storages)
        self.ops: list[Op] = []
        self.seconds: dict[tuple[int, str], float] = {}

    def problem(self) -> Problem:
        for op in self.graph.ops:
            if self._is_cut(op):
                self._cut(op)
            else:
                self._add(op, {p: s for (i, p), s in self.before.costs.op_seconds.items() if i == op.id})
        graph = Graph(tuple(self.ops), tuple(self.storages), self.graph.regions, self.graph.calls)
        return replace(self.before, graph=graph, costs=Costs(self.seconds))

    def _is_cut(self, op: Op) -> bool:
        """Updates of one parameter that the cpu can do as well, from one gradient nobody else reads."""
        graph = self.graph
        parameters = [s for s in op.writes + op.mutates if graph.storages[s].role is Role.PARAM]
        own = [s for s in op.reads if graph.storages[s].role is Role.GRAD and not graph.storages[s].lasting and graph.uses[s][-1] == op.id]
        both = {(op.id, "cpu"), (op.id, self.device.name)} <= self.before.costs.op_seconds.keys()
        return op.phase is Phase.UPDATE and both and len(parameters) == 1 and len(own) == 1 and len(graph.writers[parameters[0]]) == 1

    def _cut(self, op: Op) -> None:
        graph, cold = self.graph, 1 - self.ratio
        (parameter,) = (s for s in op.writes + op.mutates if graph.storages[s].role is Role.PARAM)
        gradient = next(s for s in op.reads if graph.storages[s].role is Role.GRAD)
        states = [s for s in op.mutates + op.writes if s != parameter]
        size = graph.storages[parameter].nbytes
        cold_states = tuple(self._storage(f"{graph.storages[s].name} cold", graph.storages[s].nbytes * cold, Role.OPTIMIZER_STATE) for s in states)
        for s in states:  # what keeps its name is the hot part
            self.storages[s] = replace(self.storages[s], nbytes=round(graph.storages[s].nbytes * self.ratio))
        name = graph.storages[parameter].name
        sums = self._storage(f"{name} summed gradient", 2 * size * cold, Role.OPTIMIZER_STATE)
        fresh = self._storage(f"{name} fresh columns", size * cold / self.interval, Role.BUFFER)
        leaving = self._storage(f"{name} cold gradient", graph.storages[gradient].nbytes * cold, Role.GRAD)
        here, there = (self.before.seconds(op.id, processor) for processor in (self.device.name, "cpu"))
        hot = tuple(s for s in states if s in op.mutates or s in op.writes)
        only_here = self.device.name
        self._add(replace(op, name=f"{op.name} apply", reads=(fresh,), writes=(), mutates=(parameter,)), {only_here: self._passes(fresh, fresh)})
        self._add(replace(op, name=f"{op.name} hot", writes=(), mutates=(parameter, *hot)), {only_here: here * self.ratio})
        self._add(
            replace(op, name=f"{op.name} select", reads=(gradient,), writes=(leaving,), mutates=()), {only_here: self._passes(gradient, leaving)}
        )
        late = replace(op, name=f"{op.name} cold", reads=(leaving,), writes=(fresh,), mutates=(sums, *cold_states))
        self._add(late, {"cpu": there * cold * (1 / self.interval + ADDING)})

    def _add(self, op: Op, seconds: dict[str, float]) -> None:
        self.seconds.update({(len(self.ops), processor): value for processor, value in seconds.items()})
        self.ops.append(replace(op, id=len(self.ops)))

    def _storage(self, name: str, nbytes: float, role: Role) -> int:
        self.storages.append(Storage(len(self.storages), name, round(nbytes), role, lasting=role is not Role.GRAD))
        return len(self.storages) - 1

    def _passes(self, *storages: int) -> float:
        """Seconds to move so many bytes through the device's memory."""
        nbytes = sum(self.storages[s].nbytes for s in storages)
        return self.device.launch_seconds + (nbytes / self.device.bytes_per_second if self.device.bytes_per_second else 0.0)
