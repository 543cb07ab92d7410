"""The best way through a chain within memory: dynamic programming over its stretches (Beaumont et al.'s rotor, with options for each segment).

opt(s, t, m): the fewest seconds to run segments s to t forward and back with m units of memory beside the input of s, which is there. Either s
runs with one of its options, saves what that saves and waits for the others; or s to r - 1 run without saving anything but the input of r, the
segments from r on are done, and s to r - 1 are begun again. A single segment that saves nothing goes straight to its backward, which makes what
it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a segment; sizes in units."""

    saved: int  # from its forward to its backward, beyond input and output
    forward_peak: int
    backward_peak: int
    again_seconds: float  # what its backward computes again


@dataclass(frozen=True, slots=True)
class Stage:
    """A segment as the program sees it; the last is the turn, which has one choice that saves nothing."""

    seconds: float  # forward
    choices: tuple[Choice, ...]
    passing_peak: int  # forward without saving anything
    output: int  # what it hands to the next
    gradient: int  # what its backward hands to the one before
    left: int  # what its backward leaves behind for good


Step = tuple[str, int, int]  # ("forward", segment, choice or -1 to save nothing), ("backward", segment, choice), ("turn", segment, 0)


class Rotor:
    def __init__(self, stages: Sequence[Stage], most_units: int) -> None:
        self.stages, self.size = stages, most_units + 1
        self.seconds: dict[tuple[int, int], np.ndarray] = {}
        self.chosen: dict[tuple[int, int], np.ndarray] = {}  # a choice, or -r for a new beginning at r
        last = len(stages) - 1
        turn = np.full(self.size, np.inf)
        turn[stages[last].choices[0].forward_peak :] = 0.0
        self.seconds[last, last], self.chosen[last, last] = turn, np.zeros(self.size, dtype=np.int32)
        for length in range(last + 1):
            for start in range(last + 1 - length):
                if (start, start + length) != (last, last):
                    self._solve(start, start + length)

    @property
    def best(self) -> np.ndarray:
        """Seconds of the whole chain for each number of units."""
        return self.seconds[0, len(self.stages) - 1]

    def _solve(self, start: int, end: int) -> None:
        best = np.full(self.size, np.inf)
        chosen = np.zeros(self.size, dtype=np.int32)
        stage = self.stages[start]
        incoming = self.stages[end + 1].gradient if end + 1 < len(self.stages) else 0  # it waits there until the last of them goes back
        later = self._left(start + 1, end)
        for number, choice in enumerate(stage.choices):
            if start == end:
                found = np.full(self.size, choice.again_seconds + (stage.seconds if choice.saved else 0.0))
                need = incoming + max(choice.forward_peak if choice.saved else 0, choice.backward_peak)
            else:
                found = self._with_less(start + 1, end, choice.saved + stage.output) + (stage.seconds + choice.again_seconds)
                need = max(choice.forward_peak + incoming, choice.backward_peak + later + self.stages[start + 1].gradient)
            found[:need] = np.inf
            better = found < best
            best[better], chosen[better] = found[better], number
        passing, need = 0.0, 0
        for again in range(start + 1, end + 1):
            before = self.stages[again - 1]
            passing += before.seconds
            need = max(need, incoming + before.passing_peak + (self.stages[again - 2].output if again - 1 > start else 0))
            found = self._with_less(again, end, before.output) + self._with_less(start, again - 1, self._left(again, end)) + passing
            found[:need] = np.inf
            better = found < best
            best[better], chosen[better] = found[better], -again
        self.seconds[start, end], self.chosen[start, end] = best, chosen

    def _left(self, start: int, end: int) -> int:
        return sum(stage.left for stage in self.stages[start : end + 1])

    def _with_less(self, start: int, end: int, units: int) -> np.ndarray:
        found = np.full(self.size, np.inf)
        if units < self.size:
            found[units:] = self.seconds[start, end][: self.size - units]
        return found

    def steps(self, units: int) -> Iterator[Step]:
        """The way through the whole chain with so many units."""
        return self._steps(0, len(self.stages) - 1, units)

    def _steps(self, start: int, end: int, units: int) -> Iterator[Step]:
        last = len(self.stages) - 1
        if start == last:
            yield "turn", start, 0
            return
        choice = int(self.chosen[start, end][units])
        if choice < 0:
            again = -choice
            for segment in range(start, again):
                yield "forward", segment, -1
            yield from self._steps(again, end, units - self.stages[again - 1].output)
            yield from self._steps(start, again - 1, units - self._left(again, end))
            return
        if start < end or self.stages[start].choices[choice].saved:
            yield "forward", start, choice
        if start < end:
            yield from self._steps(start + 1, end, units - self.stages[start].choices[choice].saved - self.stages[start].output)
        yield "backward", start, choice
