"""checkmate: the recomputation that costs the least time within the budget, by integer programming.

Paper    Jain et al., MLSys 2020, arXiv:1910.02653.
Idea     split the step into stages, one for each node of the graph; in each, decide which earlier nodes run again and what is kept.
Rule     min Σ C_i R[t,i]  over stages t and nodes i, with R[t,i]: i runs in t, S[t,s]: s is there when t begins, F[t,s,i]: s goes behind i in t;
         R[t,t] = 1;  R[t,j] + Σ_{i<j} F[t,s,i] <= S[t,s] + R[t,i(s)] for each reader j of s;  S[t+1,s] + Σ F[t,s,i] <= S[t,s] + R[t,i(s)];
         U[t,i], what is there while i runs in t, from S, R and F, <= budget. Larger graphs: S of the relaxed program, rounded at thresholds.
Differs  Memory is counted for each storage, not for each node, so that an op may have several outputs; an in-place op takes over its input.
         What is freed must have been there, which makes the relaxation tighter than the paper's. Updates and ops that cannot be replayed run
         once, and so do backward ops unless recompute_backward is set: the paper lets them run again, which costs the solver much and hardly
         ever pays. The solver is given a first answer to beat, found op by op: drop, where the program runs short, what is cheap to make again
         per byte. On large steps that is often the best found, and the plan says so. Rounding also tries dropping in the order of the relaxed S,
         and takes back what there turns out to be room for. Beyond max_nodes, runs of ops are one node of the program: cut where region call or
         phase change, then forward at equal work. Sizes too fine for the solver are rounded up to 1/100,000 of the budget.
"""

from __future__ import annotations

from ..ir import Problem, Schedule
from ._stages import find

DECIDES = "what to recompute"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it runs ops again at any point of the step, where no region begins or ends"


def plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_seconds: float = 20.0,
    relative_gap: float = 0.0,
    recompute_backward: bool = False,
    max_exact_nodes: int = 24,
    max_nodes: int = 100,
) -> Schedule:
    """`auto` solves exactly what has at most `max_exact_nodes` ops and rounds the rest; `exact` takes any graph, in `max_nodes` nodes.

    An exact answer is the best unless the time limit comes first; a graph of that size can then have another plan on another machine.
    """
    return find(
        problem,
        solver=solver,
        time_limit_seconds=time_limit_seconds,
        relative_gap=relative_gap,
        max_exact_nodes=max_exact_nodes,
        max_nodes=max_nodes,
        recompute_backward=recompute_backward,
    )
