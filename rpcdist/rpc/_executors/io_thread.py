"""The I/O loop, as the parts of a worker see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class IoThread(Protocol):
    """The event loop on which everything of the network runs, and its thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; to be used on its thread only."""

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Has a function called on the loop soon; any thread."""

    def spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Starts a task on the loop; on its thread only."""
