"""What runs is coarser than what is planned: a region call is one forward and one backward. Here graphs and schedules are brought to that grain."""

from .coarse import Coarse, CompiledRegion, coarsen

__all__ = ["Coarse", "CompiledRegion", "coarsen"]
