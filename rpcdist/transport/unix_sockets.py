"""What this host's Unix sockets can do, and who is at their other end.

[Note: who sends] `SO_PEERCRED` names the process that called `connect()` or `listen()`, for ever. That process may have
ended, and another one have its number; or it may have given the socket away, or inherited it. So it does not show who
speaks. The kernel can also add to each message which process sent it (`SCM_CREDENTIALS`). Only root (`CAP_SYS_ADMIN`)
can have it name another process, and only one in his own pid namespace. Each message of a handshake is read with that
(`receive_from`). Two processes that see each other's number on all messages are connected directly: the messages answer
one another, so both processes live until the handshake is done, and nobody else has their numbers meanwhile.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from functools import cache
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_NAMESPACE: Final = "/proc/self/ns/pid"


class PeerProcess(NamedTuple):
    """A process and its user, as numbers of this process's namespaces."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


@cache
def has_abstract_sockets() -> bool:
    """Whether Unix sockets here have names outside of the file system, and say who sends: on Linux, where /proc is."""
    return sys.platform == "linux" and hasattr(socket, "AF_UNIX") and os.path.exists(_NAMESPACE)


def process_namespace() -> int:
    """Which pid namespace this process has its number in. Raises `OSError` where there is no /proc."""
    return os.stat(_NAMESPACE).st_ino


def names_senders(connection: socket.socket, on: bool) -> None:
    """Has the kernel say of each message on a Unix socket which process sent it. [Note: who sends]

    Both ends switch it on before the other's first message, a server at its listener, and off after the handshake.
    Without effect on other sockets.
    """
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, on)


def receive_from(connection: socket.socket, size: int) -> tuple[bytes, PeerProcess]:
    """Up to so many bytes, all sent by one process, and which that was. Raises as `recv` does."""
    data, ancillary, _, _ = connection.recvmsg(size, socket.CMSG_LEN(_CREDENTIALS.size))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack(content)
            return data, PeerProcess(pid, uid)
    return data, PeerProcess(0, 0)  # the number of no process


def peer_process(connection: socket.socket) -> PeerProcess:
    """Who connected, or listened, at the other end of a Unix socket, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerProcess(pid, uid)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user, by the kernel's word."""
    return peer_process(connection).uid == os.getuid()
