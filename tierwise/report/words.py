"""A summary in sentences: what the plan does, what it costs, and how far the prediction was off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from .summary import RunSummary, Times

WORTH_NAMING = 0.05  # of the device's waiting: what works less than that meanwhile is not what it waits for
ALMOST = 0.0005  # of one: smaller differences are equality to the digits shown


def explain(run: RunSummary) -> tuple[str, ...]:
    told = [*_size(run), *_saved(run), *_homes(run), *_waits(run), *_peak(run), *_bound(run), *_measured(run), *_losses(run)]
    return tuple(told)


def _size(run: RunSummary) -> Iterator[str]:
    times = run.best
    if times is None:
        return
    peak = _device_peak(run, times)
    held = f" and {'held' if times.measured else 'holds'} {format_bytes(peak)} of {run.device_tier}" if peak is not None else ""
    budget = ""
    if run.budget_bytes and peak is not None:
        budget = f", {'within' if peak <= run.budget_bytes else 'more than'} the budget of {format_bytes(run.budget_bytes)}"
    yield f"The step {'took' if times.measured else 'takes'} {format_seconds(times.seconds)}{held}{budget}."
    if run.keep_all_seconds and run.keep_all_bytes and run.predicted and run.policy != "keep_all":
        kept = f"Keeping everything would take {format_seconds(run.keep_all_seconds)} and {format_bytes(run.keep_all_bytes)}"
        fits = run.budget_bytes is None or run.keep_all_bytes <= run.budget_bytes
        mine = f"this plan {'was predicted to take' if run.measured else 'takes'} {_longer(run.predicted.seconds / run.keep_all_seconds)}"
        yield f"{kept}{'' if fits else ', which does not fit'}; {mine}."


def _saved(run: RunSummary) -> Iterator[str]:
    total = sum(run.saved_bytes.values())
    if not total:
        return
    parts = []
    if run.saved_bytes["kept"]:
        parts.append(f"{format_bytes(run.saved_bytes['kept'])} stay in {run.device_tier}")
    if run.saved_bytes["copied"]:
        parts.append(f"{format_bytes(run.saved_bytes['copied'])} are copied away and back")
    if run.saved_bytes["recomputed"]:
        parts.append(
            f"{format_bytes(run.saved_bytes['recomputed'])} are recomputed ({recomputed_words(run)}, {format_seconds(run.recomputed_seconds or 0.0)})"
        )
    if len(parts) == 1 and run.saved_bytes["kept"]:
        yield f"All {format_bytes(total)} that backward needs of forward stay in {run.device_tier}."
    else:
        yield f"Of {format_bytes(total)} that backward needs of forward, {_listed(parts)}."


def recomputed_words(run: RunSummary) -> str:
    """What runs again: '37 ops', 'inside 24 blocks'."""
    parts = []
    if run.recomputed_ops:
        parts.append(f"{run.recomputed_ops:,} op{'s' if run.recomputed_ops > 1 else ''}")
    if run.recomputed_blocks:
        parts.append(f"inside {run.recomputed_blocks} block{'s' if run.recomputed_blocks > 1 else ''}")
    return " and ".join(parts)


def _homes(run: RunSummary) -> Iterator[str]:
    for home in run.homes:
        yield f"Between steps {format_bytes(home.nbytes)} of {role_words(home.role)} live in {home.dst}."
    for processor, ops in run.elsewhere_ops.items():
        yield f"{ops} ops run on the {processor}."


def _waits(run: RunSummary) -> Iterator[str]:
    times = run.best
    if times is None or not times.lanes or not times.seconds:
        return
    share = times.waiting_seconds / times.seconds
    device = times.lanes[0].name
    if not times.waiting_seconds:
        yield f"The {device} never waits."
        return
    busiest = sorted(times.waiting_while.items(), key=lambda item: -item[1])
    lanes = [f"'{lane}' works {format_seconds(seconds)}" for lane, seconds in busiest if seconds > times.waiting_seconds * WORTH_NAMING]
    meanwhile = f"; meanwhile {_listed(lanes)}" if lanes else ""
    yield f"The {device} waits {format_seconds(times.waiting_seconds)} ({share:.1%}) of the step{meanwhile}."


def _peak(run: RunSummary) -> Iterator[str]:
    times = run.best
    peak = next((p for p in times.peaks if p.tier == run.device_tier), None) if times else None
    if peak is None or peak.at_seconds is None or not peak.roles:
        return
    largest = sorted(peak.roles.items(), key=lambda item: -item[1])[:3]
    parts = [f"{format_bytes(nbytes)} of {role_words(role)}" for role, nbytes in largest]
    during = f", during {peak.during}" if peak.during else ""
    made_of = f"; most of it is {_listed(parts)}" if len(peak.roles) > 1 else ""  # an allocator does not say what its bytes are for
    yield f"{run.device_tier} is fullest at {format_seconds(peak.at_seconds)}{during}{made_of}."


def _bound(run: RunSummary) -> Iterator[str]:
    if run.bound_seconds and run.predicted and run.predicted.seconds >= run.bound_seconds:
        ratio = run.predicted.seconds / run.bound_seconds
        fastest = format_seconds(run.bound_seconds)
        yield f"At the rates of this machine no schedule within this budget is faster than {fastest}; this one takes {_longer(ratio)}."


def _measured(run: RunSummary) -> Iterator[str]:
    if not (run.predicted and run.measured):
        return
    parts = [f"{format_seconds(run.measured.seconds)}, {_off(run.measured.seconds, run.predicted.seconds)} predicted"]
    peaks = _device_peak(run, run.measured), _device_peak(run, run.predicted)
    if peaks[0] is not None and peaks[1]:
        parts.append(f"a peak of {format_bytes(peaks[0])}, {_off(peaks[0], peaks[1])} predicted")
    yield f"Measured: {_listed(parts)}."
    if run.reserved_bytes is not None:
        rest = f"; {format_bytes(run.unaccounted_bytes)} more are outside the allocator and not accounted for" if run.unaccounted_bytes else ""
        yield f"The allocator reserved {format_bytes(run.reserved_bytes)}{rest}."


def _losses(run: RunSummary) -> Iterator[str]:
    losses = run.losses
    if losses and losses.compared:
        same = "all" if losses.identical == losses.compared else f"{losses.identical} of"
        yield f"The loss is that of the untouched run, bit for bit, in {same} {losses.compared} steps."


def _longer(ratio: float) -> str:
    if abs(ratio - 1) < ALMOST:
        return "as long"
    if ratio >= 2:
        return f"{ratio:.1f} times as long"
    return f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'less time'}"


def _off(found: float, expected: float) -> str:
    change = found / expected - 1
    return "as" if abs(change) < ALMOST else f"{abs(change):.1%} {'more' if change > 0 else 'less'} than"


def _device_peak(run: RunSummary, times: Times) -> int | None:
    return next((peak.nbytes for peak in times.peaks if peak.tier == run.device_tier), None)


def sentence(text: str) -> str:
    """'everything fits' -> 'Everything fits.'"""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def role_words(role: str) -> str:
    """What a role is called in a report."""
    plural = {
        "param": "parameters",
        "buffer": "buffers",
        "grad": "gradients",
        "activation": "activations",
        "input": "inputs",
        "aside": "besides the step",
    }
    return plural.get(role, role.replace("_", " "))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
