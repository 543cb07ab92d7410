"""oc_dnn: everything in managed memory, with advice: fetch for the next op while this one runs, send out what forward is done with.

Paper    Awan, Chu, Subramoni, Lu, Panda, HiPC 2018.
Idea     unified memory lets any network run, but by page faults; a framework that knows its layers can prefetch, evict and advise instead.
Rule     while an op runs, prefetch what the next one reads. Behind its last use in forward a feature map is sent to the host. Weights are read
         mostly: the host keeps its copy, and until they change they leave for nothing. Where there is no room the least recently used goes, and
         what is missing is a page fault. mode: opt (all of it), naive (managed memory alone).
Differs  the paper's text was not to be had: one op of lookahead, and that all feature maps are sent, are a reading of its abstract. Nothing is sent
         if all fits. Whole storages, not pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import BadInput
from ..ir import Op, Problem, Role, Schedule
from ._fit import device_peak
from ._gaps import build
from ._layers import saved_for_backward
from ._paging import Paging
from ._runtime import Homes, run_settled

DECIDES = "prefetch and eviction by op"
FIDELITY = "like"
EXECUTABLE = "simulated only: page faults and the order of evictions are a driver's, below what regions can plan"
REQUIRES = {"dram"}
MODES = ("opt", "naive")


def plan(problem: Problem, *, mode: str = "opt") -> Schedule:
    if mode not in MODES:
        raise BadInput(f"mode is {mode!r}; oc_dnn knows {' and '.join(MODES)}")
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    return run_settled(problem, lambda home: (_Advised if mode == "opt" else _Managed)(problem, home))


class _Managed(Paging):
    """Managed memory as it is: faults, and the least recently used goes."""

    faults = True

    def victims(self, needed: set[int]) -> Iterable[int]:
        return (storage for storage in self.least_recent() if storage not in needed)


class _Advised(_Managed):
    def __init__(self, problem: Problem, home: Homes) -> None:
        super().__init__(problem, home)
        self.done_in_forward: dict[int, list[int]] = {}
        for storage, last_forward, reader in saved_for_backward(problem.graph):
            if reader > last_forward + 1:
                self.done_in_forward.setdefault(last_forward, []).append(storage)

    def keeps_copy(self, storage: int) -> bool:
        return self.graph.storages[storage].role is Role.PARAM

    def before(self, op: Op) -> None:
        self.make_ready(op)
        for storage in self.done_in_forward.get(op.id - 1, ()):
            if storage not in (*op.reads, *op.mutates):
                self.send_out(storage)
        if op.id + 1 < len(self.graph.ops):
            self._prefetch(self.graph.ops[op.id + 1], op)

    def _prefetch(self, following: Op, op: Op) -> None:
        spare = self.bytes_needed(op)
        kept = {*op.reads, *op.writes, *op.mutates, *following.reads, *following.mutates}
        for storage in dict.fromkeys(following.reads + following.mutates):
            if not self.is_elsewhere(storage) and storage not in self.leaving_to:
                continue
            victims = iter(self.victims(kept))
            while not self.has_room(self.nbytes[storage] + spare):
                victim = next(victims, None)
                if victim is None:
                    return
                self.send_at_once(victim)
            self.fetch_ahead(storage, spare)
