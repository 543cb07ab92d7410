"""modnn: any budget above a bound: do the batch in sub-batches until the step fits, send what waits away, and spend what room is left on speed.

Paper    X. Chen, D. Z. Chen, X. S. Hu, DATE 2018.
Idea     what a layer needs while it runs shrinks with the part of the batch it works on; so sub-batch, offloading and the choice of kernels together
         reach budgets that none of them reaches alone.
Rule     the least plan sends every idle activation to the host at once and fetches it just in time, without workspace; the batch is split into the
         fewest pieces with which that fits. Then room is spent, while it lasts: fetch as early as hides the copy; keep those activations whose
         copies stick out most, seconds for each byte; and of kernels the fastest that fits in what is left.
Differs  the paper's text was not to be had: the order of the upgrades is ours, and pieces are powers of two for all layers alike instead of
         a size for each. Layers that look at the whole batch are not split (batch norm, the loss). Kernels are those the problem offers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import BadInput
from ..ir import Phase, Problem, Schedule
from ..simulate import step_seconds
from ._buckets import Buckets
from ._fit import device_peak, largest_that_fits
from ._gaps import Gap, Swap, build, gap_seconds, gaps
from ._split import split
from .vdnn import kernels_with_room

DECIDES = "sub-batches, swaps and kernels"
FIDELITY = "like"
EXECUTABLE = "simulated only: regions are compiled for the whole batch"
EXACTNESS = "lossy: sums over the batch are made in another order"
REQUIRES = {"dram"}
MOST_PIECES = 16
MOST_OPS = 10_000  # of a step in pieces; beyond it, planning would take minutes
LEADS = (1.0, 0.5, 0.0)  # how much of a copy's time before its use it is issued


def prepare(problem: Problem, *, pieces: int = 0, tier: str = "dram") -> Problem:
    """pieces: of the batch; 0 takes the fewest with which the step fits."""
    if pieces < 0:
        raise BadInput(f"pieces is {pieces}; it is a number of sub-batches, or 0 for the fewest that fit")
    if pieces:
        return split(problem, pieces) if pieces > 1 else problem
    least, best = device_peak(problem, build(problem, _away(problem, tier))), problem
    for candidate in _splits(problem):
        if least <= problem.budget_bytes:
            break
        needed = device_peak(candidate, build(candidate, _away(candidate, tier)))
        if needed < least:
            least, best = needed, candidate
    return best


def _splits(problem: Problem) -> Iterator[Problem]:
    pieces = 2
    while pieces <= MOST_PIECES:
        found = split(problem, pieces)
        if found is problem or len(found.graph.ops) > MOST_OPS:
            return
        yield found
        pieces *= 2


def plan(problem: Problem, *, pieces: int = 0, tier: str = "dram") -> Schedule:
    everything = build(problem, variants=kernels_with_room(problem, []))
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    idle = _by_exposure(problem, tier)
    tried: list[tuple[float, int, Schedule]] = []
    for lead in LEADS:
        swaps = _away(problem, tier, lead)

        def keeping(count: int, swaps: tuple[Swap, ...] = swaps) -> Schedule:
            kept = {(gap.storage, gap.start) for gap in idle[:count]}
            return build(problem, [swap for swap in swaps if (swap.storage, swap.free_at - 1) not in kept])

        if lead and device_peak(problem, keeping(0)) > problem.budget_bytes:
            continue  # so early there is no room for what comes back; the last lead is none
        count, schedule = largest_that_fits(problem, 0, len(idle), keeping)
        kept = {(gap.storage, gap.start) for gap in idle[:count]}
        chosen = [swap for swap in swaps if (swap.storage, swap.free_at - 1) not in kept]
        if kernels := kernels_with_room(problem, chosen):
            faster = build(problem, chosen, variants=kernels)
            schedule = faster if device_peak(problem, faster) <= problem.budget_bytes else schedule
        tried.append((step_seconds(problem, schedule), len(tried), schedule))
    return min(tried)[2]


def _idle(problem: Problem) -> list[Gap]:
    """What waits and does not last; the update's gradients stay."""
    return [g for g in gaps(problem) if not problem.graph.storages[g.storage].lasting and problem.graph.ops[g.end].phase is not Phase.UPDATE]


def _away(problem: Problem, tier: str, lead: float = 0.0) -> tuple[Swap, ...]:
    """Everything idle leaves at once; it is fetched so that `lead` of the copy is over when it is needed, on lanes that carry the others too."""
    if not lead:
        return tuple(Swap(gap.storage, tier, gap.start + 1, gap.start + 1, gap.end) for gap in _idle(problem))
    link = problem.machine.link(tier, problem.device_tier)
    lanes = Buckets(problem.device_seconds, [link])
    found = []
    for gap in sorted(_idle(problem), key=lambda gap: (-gap.end, gap.storage)):
        load = lead * (gap.nbytes + link.latency_seconds * link.bytes_per_second)
        back = max(lanes.start_op(link, gap.end, load), gap.start + 2, 0)
        lanes.fill_until(link, gap.end, load)
        found.append(Swap(gap.storage, tier, gap.start + 1, gap.start + 1, min(back, gap.end)))
    return tuple(sorted(found, key=lambda swap: (swap.out_at, swap.storage)))


def _by_exposure(problem: Problem, tier: str) -> list[Gap]:
    """Idle gaps, first those whose copies are hidden least, for each byte that keeping them takes."""
    machine, device = problem.machine, problem.device_tier

    def exposed(gap: Gap) -> float:
        copies = machine.copy_seconds(gap.nbytes, device, tier) + machine.copy_seconds(gap.nbytes, tier, device)
        return (copies - gap_seconds(problem, gap)) / gap.nbytes

    return sorted(_idle(problem), key=lambda gap: (-exposed(gap), gap.start, gap.storage))
