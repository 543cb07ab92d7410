"""checkmate: the recomputation that costs the least time within the budget, by integer programming.

Paper    Jain et al., MLSys 2020, arXiv:1910.02653.
Idea     split the step into stages, one for each node of the graph; in each, decide which earlier nodes run again and what is kept.
Rule     min Σ C_i R[t,i]  over stages t and nodes i, with R[t,i]: i runs in t, S[t,s]: s is there when t begins, F[t,s,i]: s goes behind i in t;
         R[t,t] = 1;  R[t,j] + Σ_{i<j} F[t,s,i] <= S[t,s] + R[t,i(s)] for each reader j of s;  S[t+1,s] + Σ F[t,s,i] <= S[t,s] + R[t,i(s)];
         U[t,i], what is there while i runs in t, from S, R and F, <= budget. Larger graphs: S of the relaxed program, rounded at thresholds.
Differs  Memory is counted for each storage, not for each node, so that an op may have several outputs; an in-place op takes over its input.
         What is freed must have been there, which makes the relaxation tighter than the paper's. Updates and ops that cannot be replayed run
         once, and so do backward ops unless recompute_backward is set: the paper lets them run again, which costs the solver much and hardly
         ever pays. The solver is given a first answer to beat: drop, where the program runs short, what is cheap to make again per byte.
         Rounding also tries dropping in the order of the relaxed S, and takes back what there turns out to be room for. Beyond max_nodes, runs
         of ops are one node: cut where region call or phase change, then forward at equal work. Sizes too fine for the solver are rounded up
         to 1/100,000 of the budget.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import BadInput, InfeasibleBudget
from ..ir import Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._gaps import build
from ._nodes import runs_of
from ._stages import FIRST_ANSWERS, Search, check_what_cannot_move

DECIDES = "what to recompute"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: it runs ops again at any point of the step, where no region begins or ends"

SOLVERS = ("auto", "exact", "rounding")


def plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_seconds: float = 30.0,
    relative_gap: float = 0.0,
    recompute_backward: bool = False,
    max_exact_nodes: int = 24,
    max_nodes: int = 160,
) -> Schedule:
    """`auto` solves exactly what has at most `max_exact_nodes` ops and rounds the rest; `exact` takes any graph, in `max_nodes` nodes.

    An exact answer is the best unless the time limit comes first; a graph of that size can then have another plan on another machine.
    """
    if solver not in SOLVERS:
        raise BadInput(f"solver {solver!r}; give one of {', '.join(SOLVERS)}")
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    check_what_cannot_move(problem)
    runs = runs_of(problem, max_nodes, only_forward=not recompute_backward)
    exact = solver == "exact" or (solver == "auto" and len(runs) <= max_exact_nodes)
    search = Search(problem, runs, only_forward=not recompute_backward)
    search.evict(*FIRST_ANSWERS)
    if exact:
        search.solve(time_limit_seconds, relative_gap)
    else:
        search.round(time_limit_seconds)
        search.polish()
    if search.best is None:
        least = None if exact else search.least_bytes(*FIRST_ANSWERS)
        raise InfeasibleBudget(f"no schedule within {format_bytes(problem.budget_bytes)} was found; {search.why}", least_bytes=least)
    return replace(search.best, notes=(search.note,))
