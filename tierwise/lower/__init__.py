"""From a plan to what runs: region calls take choices, copies and frees snap to their boundaries, and the result is predicted.

coarse.py, image.py        a Program as a Problem and a Schedule, two ops for each region call: the prediction of what runs
choose.py                  the planner that answers with a Program
expand.py, lowering.py     any other policy's Schedule made into one
"""

from .choose import Chosen, choose, keep_everything, with_budget
from .coarse import Coarse, coarsen
from .expand import Expanded, expand
from .image import Image, image
from .lowering import Lowered, clustered, lower

__all__ = [
    "Chosen", "Coarse", "Expanded", "Image", "Lowered", "choose", "clustered", "coarsen", "expand", "image", "keep_everything", "lower",
    "with_budget",
]  # fmt: skip
