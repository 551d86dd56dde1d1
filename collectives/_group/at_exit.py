"""Groups that a script leaves open are closed when its process ends: peers see a rank that left, not one that died."""

from __future__ import annotations

import atexit
import weakref

from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.time_limits import GROUP_EXIT_LIMIT_S
from rpcdist.transport import fork

__all__ = ["close_at_exit"]


_living: weakref.WeakSet[GroupBackend] = weakref.WeakSet()


def close_at_exit(backend: GroupBackend) -> None:
    """Closes the backend at the end of the process, unless it is gone or closed by then."""
    _living.add(backend)


def _close_all() -> None:
    if not fork.in_forked_child():
        for backend in list(_living):
            backend.close(GROUP_EXIT_LIMIT_S)


atexit.register(_close_all)  # the transport has registered before, and so it stops after this
