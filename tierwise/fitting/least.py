"""What no plan could beat, by what was measured: choices that were only estimated may be slower, and no link is faster than it was alone."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Link, Machine, Menu
from ..lower.stages import least_seconds_by_stages
from ..lower.states import Takes
from .programs import measured_only


def least_seconds(menu: Menu, update: str, alone: Machine, takes: Takes) -> float:
    """Of a step. `alone`: the machine before anything was learned in steps; `takes`: what plans leave free."""

    def slower(link: Link, lane: str, rate: float) -> float:
        return min(rate, alone.link(link.src, link.dst).lanes[lane])

    known = measured_only(menu)
    known = known if all(known.choices.values()) else menu
    problem = replace(known.problem, machine=known.problem.machine.with_rates(slower))
    return least_seconds_by_stages(replace(known, problem=problem), update, takes)
