"""What this host's Unix sockets can do, and who is at their other end."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final, NamedTuple

__all__ = ["PeerProcess", "has_abstract_sockets", "peer_process", "same_user"]

_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid


class PeerProcess(NamedTuple):
    """A process and its user, as numbers of this process's namespaces."""

    pid: int
    uid: int


def has_abstract_sockets() -> bool:
    """Whether Unix sockets with names outside of the file system exist here: on Linux only."""
    return sys.platform == "linux" and hasattr(socket, "AF_UNIX")


def peer_process(connection: socket.socket) -> PeerProcess:
    """Who connected, or listened, at the other end of a Unix socket, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerProcess(pid, uid)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user, by the kernel's word."""
    return peer_process(connection).uid == os.getuid()
