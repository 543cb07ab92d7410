from __future__ import annotations

from one_thread import one_thread as one_thread
