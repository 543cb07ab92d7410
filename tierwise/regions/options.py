"""Options of a region class: a few choices of what is saved for backward, from everything to the region's inputs alone. No torch.

    keep           what is saved when memory does not matter: the compiler's own choice, or in eager everything backward reads
    cheap          the fewest bytes from which backward gets the rest by passes over the data
    dear-1 ...     then matmuls, convolutions and attention are computed again too, those first that free the most bytes for their work
    checkpoint     everything is computed again that can be

Each option saves fewer bytes than the one before it and repeats more work.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from ..errors import BadFile, BadInput
from .cut import fewest_bytes
from .values import CHEAP, GIVEN, JointGraph, Kind

__all__ = ["Option", "option_saving", "options"]

Work = tuple[float, ...]
"""What is repeated, to compare: seconds where they are known, else flops and then bytes moved."""


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of saved values, and what it comes to."""

    name: str
    graph: str  # fingerprint of the joint graph it is for
    saved: tuple[str, ...]
    saved_bytes: int  # beyond inputs, parameters and the region's own results
    output_bytes: int  # of results of the region that backward reads too; whoever uses them keeps them anyway
    input_bytes: int  # of inputs, not parameters, that backward reads
    recompute_flops: int
    recompute_moved_bytes: int  # read and written if each repeated op ran by itself; a compiler fuses most of it away
    recomputed: tuple[str, ...]  # what is made a second time

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Option:
        try:
            data = json.loads(text)
            return Option(**{**data, "saved": tuple(data["saved"]), "recomputed": tuple(data["recomputed"])})
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(f"not an option of a region ({error}); plan again") from None


def option_saving(joint: JointGraph, values: Iterable[str], *, name: str = "custom") -> Option:
    """The option that saves these values: any names will do. What backward does not need is left out, what may not be repeated is added."""
    handover = joint.hand_over(values)
    saved = [joint.named[value] for value in handover.saved]
    inputs = [joint.named[value] for value in handover.given if joint.named[value].kind is Kind.INPUT]
    ops = [joint.named[value] for value in handover.recomputed if joint.named[value].kind not in (Kind.VIEW, Kind.PART)]
    repeated = [op.name for op in ops if op.in_forward]
    return Option(
        name=name,
        graph=joint.fingerprint,
        saved=handover.saved,
        saved_bytes=sum(value.nbytes for value in saved if not value.is_output),
        output_bytes=sum(value.nbytes for value in saved if value.is_output),
        input_bytes=sum(value.nbytes for value in inputs),
        recompute_flops=sum(op.flops for op in ops if op.in_forward),
        recompute_moved_bytes=sum(map(joint.moved_bytes, repeated)),
        recomputed=tuple(repeated),
    )


def options(joint: JointGraph, *, op_seconds: Mapping[str, float] | None = None, most: int = 6) -> tuple[Option, ...]:
    """At most `most` options, from the most bytes to the fewest. `op_seconds` says what each value takes to make, if that was measured."""
    if most < 2:
        raise BadInput(f"most is {most}; a region needs at least 2 options, to keep and to recompute")
    cheap, *dear = _ever_fewer(joint, op_seconds)
    path = [option_saving(joint, joint.keep, name="keep")]
    for option in (cheap, *dear):
        if option.saved_bytes < path[-1].saved_bytes:
            path.append(option)
    while len(path) > most:
        path.remove(_least_missed(path, op_seconds))
    return tuple(_named(path))


def _named(path: list[Option]) -> Iterator[Option]:
    """dear-1, dear-2 and so on, and the last one checkpoint, whatever it had to repeat."""
    number = count(1)
    for option in path[:-1] if len(path) > 1 else path:
        yield option if option.name else dataclasses.replace(option, name=f"dear-{next(number)}")
    if len(path) > 1:
        yield dataclasses.replace(path[-1], name="checkpoint")


def _ever_fewer(joint: JointGraph, op_seconds: Mapping[str, float] | None) -> list[Option]:
    """Cheap first, then group after group of dear ops, each time the one with the least work for the bytes it frees; last, all of them."""
    allowed: set[str] = set()
    found = [option_saving(joint, fewest_bytes(joint, allowed), name="cheap")]
    groups = _dear_groups(joint)
    while groups:
        trials = []
        for group in groups:
            option = option_saving(joint, fewest_bytes(joint, allowed | set(group)), name="")
            if (freed := found[-1].saved_bytes - option.saved_bytes) > 0:
                more = _work(option, op_seconds)[0] - _work(found[-1], op_seconds)[0]
                trials.append((more / freed, -freed, group, option))  # of equals, the one that frees more
        if not trials:
            break
        *_, group, option = min(trials, key=lambda trial: trial[:2])
        groups.remove(group)
        allowed |= set(group)
        found.append(option)
    found.append(option_saving(joint, fewest_bytes(joint, joint.named), name="checkpoint"))
    return found


def _dear_groups(joint: JointGraph) -> list[tuple[str, ...]]:
    """Ops that are not cheap, those that read the same values together: to repeat one of them is to have what the others need."""
    groups: dict[tuple[Kind, frozenset[str]], list[str]] = {}
    for value in joint.values:
        if value.kind not in CHEAP | GIVEN and value.in_forward and not value.must_save:
            reads = frozenset(owner.name for owner in map(joint.owner, value.made_from) if owner.kind is not Kind.PARAMETER)
            groups.setdefault((value.kind, reads), []).append(value.name)
    return [tuple(group) for group in groups.values()]


def _work(option: Option, op_seconds: Mapping[str, float] | None) -> Work:
    if op_seconds is not None:
        return (sum(op_seconds.get(name, 0.0) for name in option.recomputed),)
    return (float(option.recompute_flops), float(option.recompute_moved_bytes))


def _least_missed(path: list[Option], op_seconds: Mapping[str, float] | None) -> Option:
    """Without an option, whoever wanted it takes the next one, which repeats more, for all the bytes it was best for."""

    def missed(index: int) -> tuple[bool, list[float]]:
        before, option, after = path[index - 1 : index + 2]
        best_for_bytes = before.saved_bytes - option.saved_bytes
        extra = [later - now for later, now in zip(_work(after, op_seconds), _work(option, op_seconds), strict=True)]
        return option.name == "cheap", [best_for_bytes * work for work in extra]  # cheap goes last: a compiler does most of it for nothing

    return path[min(range(1, len(path) - 1), key=missed)]
