"""The messages of a group over the sockets of the process."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from rpcdist.collectives._transports.p2p.messenger import Messenger
from rpcdist.collectives._transports.sockets.spin_policy import message_spin_s
from rpcdist.errors import ProtocolViolation, TransportError
from rpcdist.transport.sockets import SocketHub

logger = logging.getLogger(__name__)


class Mailboxes(Messenger):
    """A `Messenger` whose connections come from and go to socket hubs. Connections are opened by the first send.

    Args:
        group_name: the group's name in errors.
        rank: this process's rank in the group.
        ranks: the members' ranks in the world, by rank in the group.
        hub: the hub of this process; None for a group of one.
        uid: an identifier of the group; the same on all ranks, and different from those of other groups.
        addresses: the addresses of the ranks' hubs, by rank in the group.
    """

    def __init__(
        self,
        group_name: str,
        rank: int,
        ranks: Sequence[int],
        hub: SocketHub | None = None,
        uid: str = "",
        addresses: Sequence[str] = (),
    ) -> None:
        super().__init__(group_name, rank, ranks, self._dial, spin_s=message_spin_s(rank, addresses))
        self._hub, self._uid = hub, uid
        self._addresses = tuple(addresses)
        self._prefix = f"{uid}/messages to {rank} from "
        if hub is not None:
            hub.announce(self._prefix, self._answer)

    def _dial(self, peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket:
        if self._hub is None:
            raise TransportError("this group has no socket hub")
        purpose = f"{self._uid}/messages to {peer} from {self._rank}"
        return self._hub.connect(self._addresses[peer], purpose, timeout_s, check=check)

    def _answer(self, purpose: str, sock: socket.socket) -> None:
        """Takes a connection for this group, on the I/O loop."""
        source = purpose.removeprefix(self._prefix)
        try:
            if not source.isascii() or not source.isdigit() or int(source) >= len(self._state.ranks):
                raise ProtocolViolation(f"it has no rank {source!r}")
            self.attach(int(source), sock)
        except ProtocolViolation as exc:
            sock.close()
            logger.warning("a connection of group %r was closed: %s", self._group_name, exc)

    def close(self) -> None:
        """Closes like `Messenger.close`, and takes no more connections."""
        if self._hub is not None:
            self._hub.withdraw(self._prefix)
        super().close()
