"""Admission of peers: until a peer has proven the job token, only the handshake is read from its connection.

The cost of unproven peers is limited for all listeners of a process together: `MAX_UNPROVEN` handshakes at once, half
of them for one host, `MAX_UNPROVEN_PER_CONNECTION` for one gRPC connection; for each, `HANDSHAKE_LIMIT_S` and a few
messages of `MAX_HANDSHAKE_BYTES`. At the limit, a newcomer does not wait: it displaces the oldest handshake of the host
with the most handshakes. A peer with the token finishes within milliseconds; if it is displaced, the refusal tells it
to try again. Only within one gRPC connection the newcomer itself is refused, unread: a link opens one stream, and gRPC
reads a message of megabytes for each stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, NamedTuple

from rpcdist._proto import handshake_pb2 as pb
from rpcdist.errors import AuthenticationFailed, ProtocolViolation, TransportError
from rpcdist.time_limits import HANDSHAKE_LIMIT_S, LOG_PERIOD_S, QUICK_ANSWER_LIMIT_S
from rpcdist.transport._channels.proving import HandshakePipe, prove_server
from rpcdist.transport.handshake import ServerHandshake

logger = logging.getLogger(__name__)

# Unfinished handshakes. A first message that announces the largest size that TLS allows costs 180 KiB.
MAX_UNPROVEN: Final = 256
MAX_UNPROVEN_PER_CONNECTION: Final = 4  # streams of one gRPC connection; a link opens one
MAX_REFUSALS_SHOWN: Final = 64  # in one log period, so that a stranger cannot fill the disk with log lines


class Origin(NamedTuple):
    """The origin of a connection.

    Attributes:
        host: the host, whose connections share a limit.
        port: the port, for the log; the streams of one gRPC connection share it.
    """

    host: str
    port: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


class Admission:
    """Runs the handshakes of accepted connections, of all kinds together; on the I/O loop.

    Attributes:
        num_wrong_tokens: processes refused because of their token.
        num_refused: connections refused for any reason.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        self.num_wrong_tokens = 0
        self._unproven: dict[asyncio.Timeout, Origin] = {}  # the limit of each handshake; the oldest first
        self._shown: set[str] = set()  # the refusals that the log has shown in this period
        self._shown_since = 0.0

    @property
    def num_unproven(self) -> int:
        """The number of unfinished handshakes."""
        return len(self._unproven)

    async def admit(
        self,
        pipe: HandshakePipe,
        origin: Origin,
        handshake: ServerHandshake,
        turn_away: Callable[[pb.Refusal], Awaitable[None]],
    ) -> bool:
        """Runs the handshake of a peer.

        Args:
            handshake: not started; has the outcome afterwards.
            turn_away: sends the peer the reason, if possible; bounded by `QUICK_ANSWER_LIMIT_S`.

        Returns:
            Whether the peer is proven and accepted; if not, the caller closes the connection.
        """
        if origin.port and self._count(lambda other: other == origin) >= MAX_UNPROVEN_PER_CONNECTION:
            await self._turn_away(turn_away, pb.Refusal.BUSY, "too many handshakes on one connection")
            return False
        self._make_room(origin)
        limit = asyncio.timeout(HANDSHAKE_LIMIT_S)
        self._unproven[limit] = origin
        try:
            async with limit:
                await prove_server(pipe, handshake)
            return True
        except (AuthenticationFailed, ProtocolViolation) as exc:
            self._note(origin, exc)
            code = handshake.refusal_code
            self.num_wrong_tokens += code == pb.Refusal.TOKEN
            reason = str(exc)
        except TimeoutError:
            code, reason = pb.Refusal.UNSPECIFIED, f"the handshake took longer than {HANDSHAKE_LIMIT_S} s"
            if limit not in self._unproven:  # it was displaced
                code, reason = pb.Refusal.BUSY, "too many handshakes at once; try again"
            self._note(origin, reason)
        except TransportError:
            return False  # the peer disconnected before it proved anything
        finally:
            self._unproven.pop(limit, None)
        await self._turn_away(turn_away, code, reason)
        return False

    async def _turn_away(
        self, turn_away: Callable[[pb.Refusal], Awaitable[None]], code: pb.Refusal.Code, reason: str
    ) -> None:
        self.num_refused += 1
        with suppress(TimeoutError, TransportError):
            async with asyncio.timeout(QUICK_ANSWER_LIMIT_S):
                await turn_away(pb.Refusal(reason=reason, code=code))

    def _make_room(self, newcomer: Origin) -> None:
        """Displaces the oldest handshakes, of the newcomer's host or of the host with the most, above the limits."""
        self._keep_below(MAX_UNPROVEN // 2, lambda origin: origin.host == newcomer.host)
        if len(self._unproven) >= MAX_UNPROVEN:
            hosts = Counter(origin.host for origin in self._unproven.values())
            busiest = hosts.most_common(1)[0][0]
            self._keep_below(hosts[busiest], lambda origin: origin.host == busiest)

    def _count(self, counts: Callable[[Origin], bool]) -> int:
        return sum(map(counts, self._unproven.values()))

    def _keep_below(self, limit: int, counts: Callable[[Origin], bool]) -> None:
        counted = [entry for entry, origin in self._unproven.items() if counts(origin)]
        for entry in counted[: max(0, len(counted) - limit + 1)]:
            del self._unproven[entry]
            with suppress(RuntimeError):  # its wait has not begun, or has just ended
                entry.reschedule(asyncio.get_running_loop().time())

    def _note(self, origin: Origin, reason: Exception | str) -> None:
        """Logs a refused connection: one warning for each host and reason in `LOG_PERIOD_S`."""
        now = time.monotonic()
        if now - self._shown_since >= LOG_PERIOD_S:
            self._shown_since = now
            self._shown.clear()
        text = f"{origin.host}: {reason}"  # without the port, which differs for each attempt
        is_news = text not in self._shown and len(self._shown) < MAX_REFUSALS_SHOWN
        if is_news:
            self._shown.add(text)
        logger.log(logging.WARNING if is_news else logging.DEBUG, "refused a connection from %s: %s", origin, reason)
