"""Tierwise: train models that do not fit, planned from one number, the budget in bytes.

The public names, each loaded when it is first used: importing tierwise imports nothing else, and in particular not torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .capture import capture as capture
    from .errors import TierwiseError as TierwiseError
    from .fitting import fit as fit
    from .fitting import plan_of as plan_of
    from .fitting import release as release
    from .fitting import stats as stats
    from .integrations.watching import watch as watch

__version__ = "0.1.0"

_HOMES = {  # public name -> the module that has it
    "TierwiseError": "errors",
    "capture": "capture",
    "fit": "fitting",
    "plan_of": "fitting",
    "release": "fitting",
    "stats": "fitting",
    "watch": "integrations.watching",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tierwise' has no attribute {name!r}")
    home = import_module(f".{_HOMES[name]}", __name__)
    # Importing the folder capture/ has bound tierwise.capture to it; being callable, the folder is the function too.
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
