"""From a plan to what runs: region calls take choices, copies and frees snap to their boundaries, and the result is predicted."""

from .choose import Chosen, choose, keep_everything, with_budget
from .coarse import Coarse, coarsen
from .image import Image, image

__all__ = ["Chosen", "Coarse", "Image", "choose", "coarsen", "image", "keep_everything", "with_budget"]
