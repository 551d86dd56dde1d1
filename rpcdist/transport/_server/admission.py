"""Admission of peers: nothing but the handshake is read of a connection until its peer has proven the job token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from rpcdist.errors import AuthenticationFailed, ProtocolViolation, TransportError
from rpcdist.time_limits import HANDSHAKE_LIMIT_S, REFUSAL_LOG_PERIOD_S
from rpcdist.transport._channels.channel import Channel
from rpcdist.transport._channels.proving import prove_server
from rpcdist.transport.handshake import ServerHandshake

__all__ = ["MAX_UNPROVEN", "Admission", "RefusalLog"]

logger = logging.getLogger(__name__)

MAX_UNPROVEN = 512  # connections in the middle of a handshake; more than a large job opens at once
MAX_REFUSALS_SHOWN: Final = 64  # in that time; a stranger cannot fill the disk with log lines


class RefusalLog:
    """Warns of refused connections, of each host and reason once in `REFUSAL_LOG_PERIOD_S`."""

    def __init__(self) -> None:
        self._since = 0.0
        self._shown: set[str] = set()

    def note(self, peer: str, reason: Exception) -> None:
        now = time.monotonic()
        if now - self._since >= REFUSAL_LOG_PERIOD_S:
            self._since = now
            self._shown.clear()
        text = f"{peer.rpartition(':')[0]}: {reason}"  # each attempt has another port
        is_news = text not in self._shown and len(self._shown) < MAX_REFUSALS_SHOWN
        if is_news:
            self._shown.add(text)
        logger.log(logging.WARNING if is_news else logging.DEBUG, "refused a connection from %s: %s", peer, reason)


class Admission:
    """Runs the handshakes of accepted connections, on the I/O loop.

    Attributes:
        num_unproven: connections in the middle of a handshake.

    Args:
        new_handshake: makes the server's side of one handshake.
    """

    def __init__(self, new_handshake: Callable[[], ServerHandshake]) -> None:
        self.num_unproven = 0
        self._new_handshake = new_handshake
        self._log = RefusalLog()

    @property
    def is_full(self) -> bool:
        return self.num_unproven >= MAX_UNPROVEN

    async def admit(
        self, channel: Channel, peer: str, turn_away: Callable[[str], Awaitable[None]]
    ) -> ServerHandshake | None:
        """Lets a peer prove itself.

        Args:
            channel: the accepted connection.
            peer: where it comes from, for the log.
            turn_away: closes the connection with a reason that the peer may read.

        Returns:
            The finished handshake; None if the peer proved nothing.
        """
        self.num_unproven += 1
        try:
            handshake = self._new_handshake()
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                await prove_server(channel, handshake)
            return handshake
        except (AuthenticationFailed, ProtocolViolation) as exc:
            self._log.note(peer, exc)
            await turn_away(str(exc))
        except TimeoutError:
            await turn_away(f"the handshake took longer than {HANDSHAKE_LIMIT_S} s")
        except TransportError:
            pass  # the peer went away before it proved anything
        finally:
            self.num_unproven -= 1
        return None
