"""The processes of this host that serve something, found through the kernel: also those that cannot answer."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

from rpcdist.time_limits import NEIGHBOUR_CONNECT_LIMIT_S
from rpcdist.transport._channels.stream_sockets import local_name
from rpcdist.transport.unix_sockets import has_abstract_sockets, peer_process

INSPECTION_ROLE: Final = "inspection"
"""Of connections to workers that are asked what they do."""

_LISTED: Final = "/proc/net/unix"


def process_at(address: str) -> int | None:
    """The process of this user on this host that serves at an address; None if there is none, or it cannot be known.

    The kernel makes the connection and names the process, which need not do anything. Without the channel "local"
    (`RPCDIST_CHANNELS`) a process is not found.
    """
    if not has_abstract_sockets():
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(NEIGHBOUR_CONNECT_LIMIT_S)
        with suppress(OSError):
            connection.connect(f"\0{local_name(address)}")
            found = peer_process(connection)
            return found.pid if found.pid > 0 and found.uid == os.getuid() else None
    return None


def local_addresses() -> list[str]:
    """The addresses at which processes of this host serve, those of other users included."""
    prefix = f"@{local_name('')}"
    try:
        with open(_LISTED) as file:
            names = [line.rstrip("\n").rpartition(" ")[2] for line in file]
    except OSError:
        return []
    return sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
