"""monet: the recomputation that costs the least time within the budget, with forward run once and all recomputation in backward.

Paper    Shah, Wu, Mohan, Chidambaram, Krähenbühl, ICLR 2021, arXiv:2010.14501.
Idea     what is kept and how each op is computed belong together: solve for both.
Rule     min Σ seconds of ops run again  over the stages of backward:  R[t,i] whether i runs again before backward of t, S[t,i] whether it is
         stored from then on;  what backward of t or a rerun reads is stored or made in that stage;  at each op of each stage, bytes <= budget.
Differs  the choice of implementations (which tensors a backward op reads, convolution algorithms, in-place ops) is left out until ops have variants:
         of the paper's two halves this is the checkpointing. Otherwise as checkmate here: what is freed is a variable of the program, storages are
         counted one by one, larger graphs are nodes of consecutive ops, and beyond max_exact_nodes the relaxed program is rounded.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import BadInput, InfeasibleBudget
from ..ir import Phase, Problem, Schedule, peak_bytes
from ..units import format_bytes
from ._gaps import build
from ._nodes import runs_of
from ._stages import FIRST_ANSWERS, Search, check_what_cannot_move

DECIDES = "what to recompute"
FIDELITY = "like"
EXECUTABLE = "simulated only: it runs ops again at any point of backward, where no region begins or ends"

SOLVERS = ("auto", "exact", "rounding")


def plan(
    problem: Problem,
    *,
    solver: str = "auto",
    time_limit_seconds: float = 30.0,
    relative_gap: float = 0.0,
    max_exact_nodes: int = 24,
    max_nodes: int = 160,
) -> Schedule:
    """Options as checkmate's."""
    if solver not in SOLVERS:
        raise BadInput(f"solver {solver!r}; give one of {', '.join(SOLVERS)}")
    everything = build(problem)
    if peak_bytes(problem, everything)[problem.device_tier] <= problem.budget_bytes:
        return everything
    check_what_cannot_move(problem)
    runs = runs_of(problem, max_nodes, only_forward=True)
    exact = solver == "exact" or (solver == "auto" and len(runs) <= max_exact_nodes)
    search = Search(problem, runs, only_forward=True, first_again=_first_backward(problem, runs))
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


def _first_backward(problem: Problem, runs: list[range]) -> int:
    """The first stage whose node is no longer forward alone."""
    ops = problem.graph.ops
    return next((stage for stage, run in enumerate(runs) if any(ops[op].phase is not Phase.FORWARD for op in run)), len(runs))
