"""The futures that a thread has started while it collects them, for torch's `_wait_all`."""

from __future__ import annotations

import threading
from typing import Any

from rpcdist.rpc.future import Future

collecting = threading.local()
"""torch's programs know it as `rpc.api._thread_local_var`: it has a `future_list` while a thread collects."""


def note_started(future: Future[Any]) -> None:
    """Adds a future that this thread has started, if it collects them."""
    if "future_list" in collecting.__dict__:  # `hasattr` takes a microsecond to say no
        collecting.future_list.append(future)
