"""Parameters, gradients and optimizer state with homes of their own, and updates that run where the plan says."""

from .placement import ON_DEVICE, Needs, Placement
from .states import States

__all__ = ["ON_DEVICE", "Needs", "Placement", "States"]
