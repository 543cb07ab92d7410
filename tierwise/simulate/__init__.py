"""Schedule -> Timeline: when everything would run. What the judge accepts can only stall here, never overflow."""

from .bound import lower_bound_seconds
from .simulator import Clock, simulate, step_seconds

__all__ = ["Clock", "lower_bound_seconds", "simulate", "step_seconds"]
