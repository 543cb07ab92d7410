"""From a plan to what runs: region calls take choices, copies and frees snap to their boundaries, and the result is predicted.

coarse.py, image.py        a Program as a Problem and a Schedule, two ops for each region call: the prediction of what runs
choose.py                  the planner that answers with a Program
states.py, splits.py       homes of lasting state in that image, and which they are by four numbers
jointly.py, search.py      the planner for both
bound.py                   what none can beat
compact.py                 a menu that is quicker to plan with
expand.py, lowering.py     any other policy's Schedule made into one
"""

from .choose import Chosen, choose, keep_everything, keeping_everything, with_budget
from .coarse import Coarse, coarsen
from .expand import Expanded, expand
from .image import Image, image
from .jointly import choose_jointly
from .lowering import Lowered, clustered, lower

__all__ = [
    "Chosen", "Coarse", "Expanded", "Image", "Lowered", "choose", "choose_jointly", "clustered", "coarsen", "expand", "image", "keep_everything",
    "keeping_everything", "lower",
    "with_budget",
]  # fmt: skip
