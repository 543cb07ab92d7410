"""monet: the recomputation that costs the least time within the budget, with forward run once and all recomputation in backward.

Paper    Shah, Wu, Mohan, Chidambaram, Krähenbühl, ICLR 2021, arXiv:2010.14501.
Idea     what is kept and how each op is computed belong together: solve for both.
Rule     min Σ seconds of ops run again  over the stages of backward:  R[t,i] whether i runs again before backward of t, S[t,i] whether it is
         stored from then on;  what backward of t or a rerun reads is stored or made in that stage;  at each op of each stage, bytes <= budget.
Differs  the choice of implementations (which tensors a backward op reads, convolution algorithms, in-place ops) is left out until ops have variants:
         of the paper's two halves this is the checkpointing. Otherwise as checkmate here: what is freed is a variable of the program, storages are
         counted one by one, and large steps are dropped from op by op and rounded from the relaxed program of fewer nodes.
"""

from __future__ import annotations

from ..ir import Problem, Schedule
from ._stages import find

DECIDES = "what to recompute"
FIDELITY = "like"
EXECUTABLE = "simulated only: it runs ops again at any point of backward, where no region begins or ends"


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
    return find(
        problem,
        solver=solver,
        time_limit_seconds=time_limit_seconds,
        relative_gap=relative_gap,
        max_exact_nodes=max_exact_nodes,
        max_nodes=max_nodes,
        forward_once=True,
    )
