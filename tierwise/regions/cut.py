"""The fewest bytes that let backward run: a minimum vertex cut between what may not be computed again and what backward reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from .values import CHEAP, GIVEN, JointGraph, JointValue


def fewest_bytes(joint: JointGraph, may_recompute: Collection[str]) -> tuple[str, ...]:
    """The values to save so that backward computes again only cheap ones and those of `may_recompute`.

    Among equal answers the one with most of what `keep` saves too, which the forward writes in any case; then the one nearest to backward, which
    repeats the least. A result of the region counts as free: who uses it keeps it.
    """
    needed = _needed(joint)
    number = {value.name: index for index, value in enumerate(needed)}
    network = _Network(2 * len(needed) + 2)
    source, sink = 2 * len(needed), 2 * len(needed) + 1
    kept = set(joint.keep)
    scale = 1 + len(needed)  # bytes rule; whether a value is kept anyway decides between equals
    endless = scale * (1 + sum(value.nbytes for value in needed))
    for value in needed:
        enters, leaves = 2 * number[value.name], 2 * number[value.name] + 1
        weight = 0 if value.is_output else scale * value.nbytes + (value.name not in kept)
        network.add(enters, leaves, weight if joint.savable(value) else endless)
        if not _may_repeat(joint, value, may_recompute):
            network.add(source, enters, endless)
        if value.read_by_backward:
            network.add(leaves, sink, endless)
        for name in dict.fromkeys(value.made_from):
            if name in number:
                network.add(2 * number[name] + 1, enters, endless)
    behind = network.reaches_after_flow(source, sink)
    return tuple(value.name for value in needed if not behind[2 * number[value.name]] and behind[2 * number[value.name] + 1])


def _may_repeat(joint: JointGraph, value: JointValue, may_recompute: Collection[str]) -> bool:
    if value.must_save:
        return not joint.savable(value)  # its parts or its owner are saved
    return value.kind in CHEAP or value.name in may_recompute or not value.in_forward


def _needed(joint: JointGraph) -> list[JointValue]:
    """What backward reads and what that is made from, down to what is given."""
    found: set[str] = set()
    for value in reversed(joint.values):
        if value.kind not in GIVEN and (value.read_by_backward or value.name in found):
            found.add(value.name)
            found.update(value.made_from)
    return [value for value in joint.values if value.name in found and value.kind not in GIVEN]


class _Network:
    """Maximum flow by Dinic's algorithm."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(size)]
        self.ends: list[int] = []
        self.left: list[int] = []

    def add(self, start: int, end: int, capacity: int) -> None:
        for node, other, room in ((start, end, capacity), (end, start, 0)):
            self.edges[node].append(len(self.ends))
            self.ends.append(other)
            self.left.append(room)

    def reaches_after_flow(self, source: int, sink: int) -> list[bool]:
        """Which nodes can still send something to the sink when the flow is at its maximum: the side of the latest minimum cut."""
        while (depth := self._depths(source))[sink] >= 0:
            unused = [0] * len(self.edges)
            while self._push(source, sink, depth, unused):
                pass
        reaches = [False] * len(self.edges)
        reaches[sink] = True
        waiting = deque([sink])
        while waiting:
            for edge in self.edges[waiting.popleft()]:
                before = self.ends[edge]
                if self.left[edge ^ 1] and not reaches[before]:
                    reaches[before] = True
                    waiting.append(before)
        return reaches

    def _depths(self, source: int) -> list[int]:
        depth = [-1] * len(self.edges)
        depth[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                if self.left[edge] and depth[self.ends[edge]] < 0:
                    depth[self.ends[edge]] = depth[node] + 1
                    waiting.append(self.ends[edge])
        return depth

    def _push(self, source: int, sink: int, depth: list[int], unused: list[int]) -> int:
        """One path from source to sink along growing depth, filled; 0 when there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            for at in range(unused[node], len(self.edges[node])):
                edge = self.edges[node][at]
                if self.left[edge] and depth[self.ends[edge]] == depth[node] + 1:
                    unused[node] = at
                    path.append(edge)
                    node = self.ends[edge]
                    break
            else:
                if not path:
                    return 0
                depth[node] = -1
                node = self.ends[path.pop() ^ 1]
        amount = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount
        return amount
