"""The error of a blocking function on the thread of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rpcdist.errors import BlockingInLoop

__all__ = ["refuses"]


def refuses(advice: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Checks that it raises `BlockingInLoop` with this advice, which is an expression."""
    with pytest.raises(BlockingInLoop) as caught:
        function(*args, **kwargs)
    assert str(caught.value).endswith(f"would block the event loop of this thread; write `{advice}` instead")
