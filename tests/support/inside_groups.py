"""The parts of process groups that users do not see, for tests that put a group together, or one part of it.

Tests take them from here, so that one place changes with the code.
"""

from __future__ import annotations

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.world import World, current_world, use_world
from rpcdist.collectives._transports.transport_base import (
    Control,
    Transport,
    TransportMismatch,
    TransportPeerLost,
    TransportTimeout,
)

__all__ = [
    "Control",
    "GroupContext",
    "Transport",
    "TransportMismatch",
    "TransportPeerLost",
    "TransportTimeout",
    "World",
    "current_world",
    "use_world",
]
