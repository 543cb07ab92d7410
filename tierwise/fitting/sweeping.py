"""What planning leaves behind is cleared away at once, not in the middle of a training step.

Python looks for garbage everywhere once enough has been made that lasts. Capture, compilation and planning make more of that in seconds than hours of
training do, so that one of the next steps would stand still for as long as the search takes: 0.4 to 0.7 s of a compiled model of 3 G parameters.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

LONG, LOOKED = 1.0, 0.3  # seconds, of planning and of looking at a step that was recorded; whoever was done sooner has left little


@contextlib.contextmanager
def swept(long: float = LONG) -> Iterator[None]:
    """Collect garbage after something that took longer than that, unless the user has switched that off."""
    began = time.monotonic()
    yield
    if gc.isenabled() and time.monotonic() - began > long:
        gc.collect()


@contextlib.contextmanager
def old_ones_rest() -> Iterator[None]:
    """Only what is made from now on is searched for garbage: several times in the ten seconds of a plan a third of one went into what torch and a
    compiled model keep anyway. Unless somebody else has objects put aside, who would get them back."""
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
