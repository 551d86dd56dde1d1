"""Numbers that the program publishes, such as its loss: a live view draws them as curves."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Final

from rpcdist.errors import ConfigError
from rpcdist.inspection.facts import CurveFacts

MAX_CURVES: Final = 64
MAX_NAME_CHARS: Final = 100
KEPT_POINTS: Final = 100
"""Of each curve. A live view asks twice a second and keeps what it has seen."""

_lock = threading.Lock()
_curves: dict[str, deque[tuple[float, float]]] = {}


def publish(name: str, value: float) -> None:
    """Adds a point to a curve of this process, which `python -m rpcdist dashboard` shows.

    It takes about a microsecond, sends nothing, and works before `init_rpc` and without it. The latest points are kept.
    Numbers that are not finite are left out. Any thread may call it.

    Args:
        name: of the curve, such as "loss".
        value: a number, or a tensor of one element.

    Raises:
        TypeError, ValueError, OverflowError: the value is no number.
        ConfigError: the name is no text of 1 to 100 characters, or this process has 64 curves already.
    """
    number = float(value)
    points = _curves.get(name) if isinstance(name, str) else None
    if points is None:
        points = _new_curve(name)
    if math.isfinite(number):
        points.append((time.time(), number))


def published_curves() -> tuple[CurveFacts, ...]:
    """All curves of this process."""
    return tuple(CurveFacts(name, tuple(points.copy())) for name, points in list(_curves.items()))


def _new_curve(name: str) -> deque[tuple[float, float]]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ConfigError(f"the name of a curve is a text of 1 to {MAX_NAME_CHARS} characters, not {name!r:.200}")
    with _lock:
        if name not in _curves and len(_curves) >= MAX_CURVES:
            raise ConfigError(f"curve {name!r} is not published: this process has {MAX_CURVES} curves already")
        return _curves.setdefault(name, deque(maxlen=KEPT_POINTS))
