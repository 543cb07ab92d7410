"""zero_infinity: optimizer state on the disk, parameters in host memory or on the disk too, updates on the cpu tile by tile.

Paper    Rajbhandari, Ruwase, Rasley, Smith, He, SC 2021, arXiv:2104.07857.
Idea     what is used rarely can live far away if it is asked for in time: parameters are fetched along the order in which they are used, and one
         tile of optimizer state is read while the one before it is updated and the one before that is written.
Rule     home(optimizer state) = nvme;  home(parameters) = the nearest of dram and nvme with room for them;  parameter p comes `ahead` ops before its
         first use in forward and in backward and goes after its last;  gradient g leaves when its last device op is done;  after backward, for each
         update: read its state, update on the cpu, write it back.
Differs  one device: nothing is sharded or gathered, and large products are not tiled. Tiers are chosen by capacity alone: the paper also asks what
         share of its speed the device keeps at their bandwidth. Parameters on the disk come over the link that the machine has for that, in one hop.
         Activation checkpoints stay where they are. Always exact: no delayed update.
"""

from __future__ import annotations

from ..errors import UnknownName
from ..ir import Problem, Role, Schedule
from ._gaps import build
from ._lasting import away, movable

DECIDES = "parameters and optimizer state in host memory and on disk"
FIDELITY = "faithful"
EXECUTABLE = True
REQUIRES = {"dram", "nvme", "cpu"}
PARAMETERS = ("auto", "device", "dram", "nvme")


def plan(problem: Problem, *, parameters: str = "auto", state: str = "nvme", ahead: int = 2, update: str = "after") -> Schedule:
    """parameters: "device", "dram", "nvme" or "auto"; state: the tier of masters and moments; update: "after" or "backward"."""
    for what, value, known in (("home of parameters", parameters, PARAMETERS), ("time of updates", update, ("after", "backward"))):
        if value not in known:
            raise UnknownName(what, value, known)
    if state not in {tier.name for tier in problem.machine.tiers}:
        raise UnknownName("tier", state, (tier.name for tier in problem.machine.tiers))
    moved = movable(problem)
    home = _home(problem) if parameters == "auto" else parameters
    return away(problem, build(problem), moved, update=update, state=state, parameters=None if home == "device" else home, ahead=ahead)


def _home(problem: Problem) -> str:
    """Host memory also holds the gradients, and one update's state as it passes."""
    storages = problem.graph.storages
    needed = sum(s.nbytes for s in storages if (s.role is Role.PARAM and s.lasting) or s.role is Role.GRAD)
    states = [sum(storages[s].nbytes for s in op.mutates) for op in problem.graph.ops]
    return "dram" if needed + 2 * max(states, default=0) <= problem.machine.capacity("dram") else "nvme"
