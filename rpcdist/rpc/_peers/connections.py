"""All connections of this worker, in both directions: for leases, and for the end."""

from __future__ import annotations

import asyncio
import logging

from rpcdist.rpc._peers.control_receiver import ControlReceiver
from rpcdist.rpc._peers.inbound import Inbound
from rpcdist.rpc._peers.network import PeerSession
from rpcdist.rpc._peers.router import Router

logger = logging.getLogger(__name__)


class Connections:
    """One per agent; on the I/O loop.

    Args:
        router: has those that this worker opened.
        inbound: has those that others opened.
        control: owes them acknowledgements.
    """

    def __init__(self, router: Router, inbound: Inbound, control: ControlReceiver) -> None:
        self._router = router
        self._inbound = inbound
        self._control = control

    def __repr__(self) -> str:
        return f"<Connections [{self._router!r}, {self._inbound!r}]>"

    def sessions(self) -> list[PeerSession]:
        return [*self._router.sessions(), *self._inbound.sessions]

    async def flush(self, timeout_s: float, wait_for_others: bool) -> None:
        """Waits until what was queued is written, and perhaps until the others have left, for they wait for it."""
        self._control.acknowledge()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(session.drain(timeout_s) for session in self.sessions()))
                if wait_for_others:
                    await asyncio.gather(*(session.ended(timeout_s) for session in list(self._inbound.sessions)))
        except TimeoutError:
            logger.debug("not everything was written within %s s", timeout_s)

    def close(self, reason: str) -> None:
        """Ends all of them at once."""
        self._router.close(reason)
        self._inbound.close(reason)
