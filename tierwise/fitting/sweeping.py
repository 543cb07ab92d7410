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
    """Collect garbage after something that took longer than that, unless the user has switched that off. Meanwhile only what is made from now on is
    searched: a third of a second each time, several times in a plan's ten, went into what torch and a compiled model keep anyway."""
    began = time.monotonic()
    ours = gc.isenabled() and not gc.get_freeze_count()
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
    if gc.isenabled() and time.monotonic() - began > long:
        gc.collect()
