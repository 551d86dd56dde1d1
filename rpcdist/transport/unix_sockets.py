"""What this host's Unix sockets can do, and who is at their other end."""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Final

__all__ = ["has_abstract_sockets", "same_user"]

_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid


def has_abstract_sockets() -> bool:
    """Whether Unix sockets with names outside of the file system exist here: on Linux only."""
    return sys.platform == "linux" and hasattr(socket, "AF_UNIX")


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(raw)[1]
    return uid == os.getuid()
