"""dragon: page faults served from a file on the disk, with the host's page cache in between and read-ahead into it.

Paper    Markthub, Belviranli, Lee, Vetter, Matsuoka, SC 2018.
Idea     map a file on NVMe into the GPU's address space: its memory and the host's are then two caches, and kernels run on terabytes unchanged.
Rule     what an op reads and is not here is a page fault, and the op waits. The least recently used goes, to the page cache, which keeps it when it
         comes back: what was not changed is not written again. What the page cache has no room for is on the disk; a fault that reaches it also
         reads the next `read_ahead` storages, in the order of their addresses, into the cache. What is dead is never written (volatile).
Differs  whole storages, not pages; addresses are in the order in which storages were made. How far it reads ahead is ours. What leaves goes to the
         disk itself when the cache is full, which does not make room by writing old pages; nor are 16 blocks of 2 MiB reclaimed at once. Storages
         that last are at home in the cache as far as it has room: lazy writes of the file behind it are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import BadInput
from ..ir import Problem, Schedule
from ._fit import device_peak
from ._gaps import build
from ._paging import Paging
from ._runtime import Homes, run_settled

DECIDES = "nothing: demand paging from host and disk"
FIDELITY = "faithful"
EXECUTABLE = "simulated only: page faults and the order of evictions are a driver's, below what regions can plan"
REQUIRES = {"dram", "nvme"}
CACHE, DISK = "dram", "nvme"


def plan(problem: Problem, *, read_ahead: int = 16) -> Schedule:
    """read_ahead: how many storages behind one that is read from the disk are read with it."""
    if read_ahead < 0:
        raise BadInput(f"read_ahead is {read_ahead}; it is a number of storages, 0 or more")
    everything = build(problem)
    if device_peak(problem, everything) <= problem.budget_bytes:
        return everything
    return run_settled(problem, lambda home: _Dragon(problem, home, read_ahead))


class _Dragon(Paging):
    faults = True

    def __init__(self, problem: Problem, home: Homes, read_ahead: int) -> None:
        super().__init__(problem, home)
        self.read_ahead = read_ahead if (DISK, CACHE) in problem.machine.link_between else 0

    def keeps_copy(self, storage: int) -> bool:
        return True

    def victims(self, needed: set[int]) -> Iterable[int]:
        return (storage for storage in self.least_recent() if storage not in needed)

    def _fetch(self, storage: int, *, fault: bool = False) -> None:
        from_disk = self.current[storage] == {DISK}
        super()._fetch(storage, fault=fault)
        if from_disk and fault:
            behind = range(storage + 1, min(storage + 1 + self.read_ahead, len(self.nbytes)))
            for following in behind:
                if self.current.get(following) == {DISK}:
                    self.copy_between(following, DISK, CACHE)
