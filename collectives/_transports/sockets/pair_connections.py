"""The connections between each pair of ranks that exchange messages, opened when needed.

The lower rank connects. The higher rank accepts on the I/O loop, and wakes the thread that waits for the connection.

Between hosts, large messages are cut into stripes for several connections, since networks often limit the rate of each
connection. On one host the first connection carries all messages, as each further one was measured to cost time.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Sequence
from typing import Final

from rpcdist.collectives._operations.operation import FINGERPRINT_BYTES, describe_fingerprint
from rpcdist.collectives._transports.transport_base import (
    Control,
    TransportMismatch,
    TransportPeerLost,
    TransportTimeout,
    Waker,
)
from rpcdist.errors import TransportError
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import GROUP_CONNECT_LIMIT_S
from rpcdist.transport._tls.tls_socket import StreamSocket, encrypted_by
from rpcdist.transport.addresses import is_loopback
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.sockets import SocketHub

logger = logging.getLogger(__name__)

STRIPE_BYTES: Final = 1 << 20
"""The smallest stripe; shorter messages are sent whole."""

_SOCKETS_BETWEEN_HOSTS: Final = 4
_STRIPE_MULTIPLE: Final = 1 << 10
_PLACE: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,3})")


class PairConnections:
    """The sockets of one rank of a group. One thread at a time calls `get`.

    Args:
        hub: the hub of this process, which must stay open until these are closed.
        name: the same on all ranks; no others that are open have it.
        addresses: `SocketHub.address` of every rank.
        unix: True for Unix sockets, False for TCP; None takes Unix sockets between ranks of one host.
        sockets_per_pair: how many connections two ranks use for large messages, the same on all ranks; None takes 4
            between hosts and 1 on one host.
    """

    def __init__(
        self,
        rank: int,
        hub: SocketHub,
        name: str,
        addresses: Sequence[str],
        unix: bool | None = None,
        sockets_per_pair: int | None = None,
    ) -> None:
        self.rank = rank
        self._hub = hub
        self._name = name
        self._prefix = f"{name}/link/"
        self.addresses = tuple(addresses)
        self._unix = unix
        self._num_channels = [sockets_per_pair or _usual_number(addresses[rank], other) for other in addresses]
        self._open: dict[tuple[int, int], StreamSocket] = {}  # by peer and channel
        self._arrived: dict[tuple[int, int], StreamSocket] = {}
        self._closed = False
        self._lock = threading.Lock()
        self.waker = Waker()  # wakes the thread that waits for a connection of a lower rank
        hub.announce(self._prefix, self._arrive)

    def stripes(self, peer: int, size_bytes: int) -> list[tuple[int, int]]:
        """Returns start and stop of each stripe of a message, by channel; one or more."""
        number = min(self._num_channels[peer], max(1, size_bytes // STRIPE_BYTES))
        length = -(-size_bytes // number // _STRIPE_MULTIPLE) * _STRIPE_MULTIPLE
        starts = [channel * length for channel in range(number)]
        return [(start, min(start + length, size_bytes)) for start in starts]

    def get(self, peer: int, channel: int, control: Control) -> StreamSocket | None:
        """Returns a connection with a rank; None if the peer must open it and has not done so yet."""
        connection = self._open.get((peer, channel))
        if connection is None:
            if self.rank < peer:
                connection = self._connect(peer, channel, control)
            else:
                with self._lock:
                    connection = self._arrived.pop((peer, channel), None)
            if connection is not None:
                if not self._open and (who := encrypted_by(connection)) is not None:
                    logger.info(
                        "rank %d of group %r: what its sockets send is encrypted by %s", self.rank, self._name, who
                    )
                self._open[peer, channel] = connection
        return connection

    def established(self, peer: int) -> StreamSocket | None:
        return self._open.get((peer, 0))

    def _connect(self, peer: int, channel: int, control: Control) -> StreamSocket:
        purpose = f"{self._prefix}{self.rank}.{channel}"
        limit_s = min(control.deadline.remaining_s(), GROUP_CONNECT_LIMIT_S)
        try:
            return self._hub.connect(self.addresses[peer], purpose, limit_s, self._unix, control.check)
        except TransportError as exc:
            if own_shortage(exc) is not None:
                raise  # this rank failed, not the peer; all ranks are told so
            if control.deadline.expired():
                raise TransportTimeout(frozenset([peer])) from exc
            raise TransportPeerLost(peer, str(exc)) from exc

    def _arrive(self, purpose: str, connection: StreamSocket) -> None:
        """Accepts, on the I/O loop, a connection that a lower rank opened."""
        key = self._key(purpose.removeprefix(self._prefix))
        with self._lock:
            wanted = key is not None and not (self._closed or key in self._arrived or key in self._open)
            if wanted and key is not None:
                self._arrived[key] = connection
                self.waker.wake()  # under the lock: `close` closes its descriptors
        if not wanted:
            connection.close()

    def _key(self, text: str) -> tuple[int, int] | None:
        """Returns the peer and channel that a purpose names; None if this rank expects no such connection."""
        match = _PLACE.fullmatch(text)
        if match is None:
            return None
        peer, channel = int(match[1]), int(match[2])
        return (peer, channel) if peer < self.rank and channel < self._num_channels[peer] else None

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = [*self._open.values(), *self._arrived.values()]
            self._arrived.clear()
            self.waker.close()
        self._hub.withdraw(self._prefix)
        for connection in connections:
            connection.close()


def _usual_number(mine: str, theirs: str) -> int:
    hosts = {HubAddress.parse(mine).host, HubAddress.parse(theirs).host}
    return 1 if len(hosts) == 1 or all(map(is_loopback, hosts)) else _SOCKETS_BETWEEN_HOSTS


_MAGIC: Final = b"rpcC"
_HEADER: Final = struct.Struct(f"<4sIIQQ{FINGERPRINT_BYTES}s")
"""Magic, round, detail, sequence, payload bytes, fingerprint."""
HEADER_BYTES: Final = _HEADER.size


class OperationFrame:
    """Makes and compares the headers of one operation on one rank.

    Args:
        detail: a number that must be equal on all ranks, like the fingerprint.
    """

    __slots__ = ("_detail", "_fingerprint", "_rank", "_sequence")

    def __init__(self, rank: int, fingerprint: bytes, sequence: int, detail: int) -> None:
        self._rank = rank
        self._fingerprint = fingerprint
        self._sequence = sequence
        self._detail = detail

    def header(self, round_number: int, size_bytes: int) -> bytes:
        """Returns the header of a message; the receiver expects exactly the same bytes."""
        return _HEADER.pack(_MAGIC, round_number, self._detail, self._sequence, size_bytes, self._fingerprint)

    def mismatch(self, peer: int, expected: bytes, got: bytes) -> TransportMismatch:
        mine, theirs = describe_fingerprint(self._fingerprint), self._describe(got)
        if mine == theirs:
            difference = _differences(_HEADER.unpack(expected), _HEADER.unpack(got))
            mine, theirs = f"{mine}{difference[0]}", f"{theirs}{difference[1]}"
        return TransportMismatch({self._rank: mine, peer: theirs})

    def _describe(self, got: bytes) -> str:
        fields = _HEADER.unpack(got)
        return describe_fingerprint(fields[5]) if fields[0] == _MAGIC else f"unreadable bytes {got[:16].hex()}"


def _differences(expected: tuple[object, ...], got: tuple[object, ...]) -> tuple[str, str]:
    """Describes the field in which two headers with the same fingerprint differ: the expected value and the other."""
    if expected[2] != got[2]:
        return f" with chunks {expected[2]:08x}", f" with chunks of other lengths {got[2]:08x}"
    if expected[4] != got[4]:
        return f" expecting {expected[4]} bytes", f" sending {got[4]} bytes"
    return f" at step {expected[3]}.{expected[1]}", f" at step {got[3]}.{got[1]}"
