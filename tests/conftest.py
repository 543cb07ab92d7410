"""What holds for every test."""

from __future__ import annotations

import one_arithmetic  # noqa: F401
