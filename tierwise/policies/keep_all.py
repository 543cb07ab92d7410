"""keep_all: every storage stays on the device from its first use to its last.

Paper    none; what PyTorch does.
Idea     the reference the others are compared with: nothing is moved, nothing is computed twice.
Rule     free s  after its last use.
Differs  updates run on the device.
"""

from ..ir import Problem, Schedule
from ._gaps import build

DECIDES = "nothing"
FIDELITY = "faithful"
EXECUTABLE = True


def plan(problem: Problem) -> Schedule:
    return build(problem)
