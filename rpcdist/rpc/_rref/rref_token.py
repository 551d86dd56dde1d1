"""A reference that arrived in a message."""

from __future__ import annotations

from rpcdist.rpc._rref.handles import Handle, HandleState


class Token:
    """A reference that arrived in a message and was not unpickled yet: `RRefManager.claim` it, or `discard` it."""

    __slots__ = ("handle", "rref", "state")

    def __init__(self, state: HandleState, handle: Handle) -> None:
        self.state = state
        self.handle: Handle | None = handle
        self.rref: object = None
