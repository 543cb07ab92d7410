"""monet: the recomputation that costs the least time within the budget, with forward run once and all recomputation in backward.

Paper    Shah, Wu, Mohan, Chidambaram, Krähenbühl, ICLR 2021, arXiv:2010.14501.
Idea     what is kept and how each op is computed belong together: solve for both.
Rule     min Σ seconds of ops run again  over the stages of backward:  R[t,i] whether i runs again before backward of t, S[t,i] whether it is
         stored from then on;  what backward of t or a rerun reads is stored or made in that stage;  at each op of each stage, bytes <= budget.
         Each op runs by one of its kernels, whose workspace counts.
Differs  kernels are not in the program: it is solved for several shares of the budget, each run takes the fastest of the step's variants for
         which the rest has room, and the fastest plan wins. Captured steps have no variants unless they are given. Which tensors a backward op
         reads, and in-place ops, are not chosen. Otherwise as checkmate here: what is freed is a variable of the program, storages are
         counted one by one, and large steps are dropped from op by op and rounded from the relaxed program of fewer nodes.
"""

from __future__ import annotations

from ..errors import InfeasibleBudget
from ..ir import Problem, Schedule
from ..simulate import step_seconds
from ._room import fastest_with_room, has_kernels
from ._stages import find

DECIDES = "what to recompute; kernels"
FIDELITY = "like"
EXECUTABLE = "simulated only: it runs ops again at any point of backward, where no region begins or ends"
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the budget for what is kept, where faster kernels want the rest


def plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_seconds: float = 20.0,
    relative_gap: float = 0.0,
    max_exact_nodes: int = 24,
    max_nodes: int = 100,
) -> Schedule:
    """Options as checkmate's."""
    shares = SHARES if has_kernels(problem) else (1.0,)
    plans = []
    for share in shares:
        try:
            found = find(
                problem.with_budget(int(problem.budget_bytes * share)),
                solver=solver,
                time_limit_seconds=time_limit_seconds / len(shares),
                relative_gap=relative_gap,
                max_exact_nodes=max_exact_nodes,
                max_nodes=max_nodes,
                forward_once=True,
            )
        except InfeasibleBudget:
            if share == 1:
                raise
            break
        plans.append(fastest_with_room(problem, found))
    return min(plans, key=lambda schedule: step_seconds(problem, schedule)) if len(plans) > 1 else plans[0]
