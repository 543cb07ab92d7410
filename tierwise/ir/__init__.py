"""What the stages say to each other: small frozen types with a JSON form. Standard library only."""

from .graph import MASTER, Graph, Op, Phase, Region, RegionCall, Role, Storage
from .judge import check_graph, check_schedule, peak_bytes
from .machine import Link, Machine, Processor, Tier
from .placement import BUFFERS, ON_DEVICE, PASSING, PASSING_HOST, Placement
from .problem import Codec, Costs, Problem, Variant
from .program import INPUTS, CallPlan, Choice, Menu, Program, SavedValue, When
from .run import Comparison, Outcome, Row, Run, Within
from .schedule import Compute, Copy, Free, Schedule, Step
from .timeline import Curve, Span, Timeline

__all__ = [
    "BUFFERS",
    "INPUTS",
    "MASTER",
    "ON_DEVICE",
    "PASSING",
    "PASSING_HOST",
    "CallPlan",
    "Choice",
    "Codec",
    "Comparison",
    "Compute",
    "Copy",
    "Costs",
    "Curve",
    "Free",
    "Graph",
    "Link",
    "Machine",
    "Menu",
    "Op",
    "Outcome",
    "Phase",
    "Placement",
    "Problem",
    "Processor",
    "Program",
    "Region",
    "RegionCall",
    "Role",
    "Row",
    "Run",
    "SavedValue",
    "Schedule",
    "Span",
    "Step",
    "Storage",
    "Tier",
    "Timeline",
    "Variant",
    "When",
    "Within",
    "check_graph",
    "check_schedule",
    "peak_bytes",
]  # fmt: skip
