"""Demand paging that knows who came when and who was used when: the two orders that drivers evict by."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Op, Problem
from ._runtime import DemandPaging, Homes


class Paging(DemandPaging):
    """Storages on the device in two orders: by when they came, and by when they were last used."""

    def __init__(self, problem: Problem, home: Homes) -> None:
        super().__init__(problem, home)
        self._came: dict[int, None] = {}  # the oldest first
        self._used: dict[int, None] = {}  # the least recently used first
        for storage, tiers in self.home.items():
            if self.device in tiers:
                self._came[storage] = self._used[storage] = None

    def oldest(self) -> Iterator[int]:
        """What is on the device and not on its way out, by when it came there."""
        return (s for s in tuple(self._came) if self._is_settled(s))

    def least_recent(self) -> Iterator[int]:
        """What is on the device and not on its way out, by its last use."""
        return (s for s in tuple(self._used) if self._is_settled(s))

    def _is_settled(self, storage: int) -> bool:
        return bool(self.nbytes[storage]) and self.device in self.current.get(storage, ()) and storage not in self.leaving_to

    def after(self, op: Op) -> None:
        for storage in dict.fromkeys(op.reads + op.writes + op.mutates):
            self._used.pop(storage, None)
            if storage in self.present:
                self._used[storage] = None
                self._came.setdefault(storage)
            else:
                self._came.pop(storage, None)

    def _drop(self, storage: int, tier: str) -> None:
        super()._drop(storage, tier)
        if tier == self.device:
            self._came.pop(storage, None)
            self._used.pop(storage, None)

    def _fetch(self, storage: int, *, fault: bool = False) -> None:
        super()._fetch(storage, fault=fault)
        self._came.pop(storage, None)
        self._came[storage] = None
        self._used.setdefault(storage)
