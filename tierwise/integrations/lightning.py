"""Lightning, in one process on one device.

    from tierwise.integrations.lightning import FitCallback

    Trainer(callbacks=[FitCallback(budget="20GiB")]).fit(module)

What is planned is the module that training_step calls: the LightningModule itself where that calls self(...), or the network inside of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ..errors import BadInput
from ..fitting import release
from .lookout import Lookout

__all__ = ["FitCallback"]

# One library under two names, whose classes do not know each other: the one that is in use.
_NAME = "pytorch_lightning" if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules else "lightning.pytorch"
Callback: Any = import_module(_NAME).Callback


class FitCallback(Callback):  # type: ignore[misc]
    """`settings` are those of tierwise.fit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self._lookout: Lookout | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size > 1:
            raise BadInput(f"{trainer.world_size} processes train together here; Tierwise plans for one so far: Trainer(devices=1)")
        self._lookout = Lookout(self.settings).__enter__()
        for optimizer in trainer.optimizers:
            self._lookout.note(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        lookout, self._lookout = self._lookout, None
        if lookout is None:
            return
        lookout.__exit__()
        fitted = lookout.fitted
        lookout.finish()
        if fitted is not None:
            release(fitted.model)
