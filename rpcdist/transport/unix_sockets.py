"""Unix sockets of this host: what they support here, the process at the other end, and descriptors passed over them.

[Note: senders] `SO_PEERCRED` always names the process that called `connect()` or `listen()`. That process may have
ended, and its process id may have been reused; or it may have passed the socket on. So `SO_PEERCRED` does not identify
the sender of a message. The kernel can also add the sender's process id to each message (`SCM_CREDENTIALS`). Only root
(`CAP_SYS_ADMIN`) can name another process there, and only one in its own pid namespace. `receive_from` reads each
message of a handshake in this way. Two processes that see each other's id on all messages are connected directly: the
messages answer one another, so both processes live until the handshake is done, and their ids cannot be reused.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple

from rpcdist.errors import ProtocolViolation
from rpcdist.time_limits import MIN_ATTEMPT_S
from rpcdist.transport.shared_memory import Segment

_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_NAMESPACE: Final = "/proc/self/ns/pid"


class PeerProcess(NamedTuple):
    """The ids of a process and its user, in the namespaces of this process."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


def local_name(address: str) -> str:
    """The abstract name of the Unix socket beside the server at `address`."""
    return f"rpcdist-channel-{address}"


@cache
def has_abstract_sockets() -> bool:
    """Whether Unix sockets have abstract names and credentials of senders here: with /proc."""
    return os.path.exists(_NAMESPACE)


def process_namespace() -> int:
    """The pid namespace of this process. Raises `OSError` if /proc is missing."""
    return os.stat(_NAMESPACE).st_ino


def names_senders(connection: socket.socket, on: bool) -> None:
    """Makes the kernel name the sending process of each message on a Unix socket. [Note: senders]

    Both ends switch this on before the peer's first message (a server at its listener), and off after the handshake.
    It has no effect on other sockets.
    """
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, on)


def receive_from(connection: socket.socket, size: int) -> tuple[bytes, PeerProcess]:
    """Up to `size` bytes that one process sent, and that process. Raises the errors of `recv`."""
    data, ancillary, _, _ = connection.recvmsg(size, socket.CMSG_LEN(_CREDENTIALS.size))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, _ = _CREDENTIALS.unpack(content)
            return data, PeerProcess(pid, uid)
    return data, PeerProcess(0, 0)  # 0 is not a process id


def peer_process(connection: socket.socket) -> PeerProcess:
    """The process that connected or listened at the other end of a Unix socket, according to the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return PeerProcess(pid, uid)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user, according to the kernel."""
    return peer_process(connection).uid == os.getuid()


# ---------------------------------------------------------------- descriptors that travel beside the bytes

Ancillary = list[tuple[int, int, bytes]]

_INT_BYTES: Final = array("i").itemsize
MAX_DESCRIPTORS: Final = 16
"""Limit on received descriptors whose message has not been read yet."""
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT_BYTES)
CUT_OFF: Final = int(socket.MSG_CTRUNC)
"""A plain integer: an operation on the enums of `socket` takes longer than the system call."""
CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)


class ReceivedDescriptors:
    """Descriptors that were received and not taken yet; used by the thread that reads."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiting: deque[int | None] = deque()  # None: this process had no free descriptor for it

    def add(self, ancillary: Ancillary, flags: int) -> None:
        """Stores the descriptors that `recvmsg` returned. Raises `ProtocolViolation` if the peer passes too many."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._waiting.extend(array("i", data[: len(data) // _INT_BYTES * _INT_BYTES]))
        if not ancillary:  # truncated: this process has no free descriptor
            self._waiting.append(None)
        elif flags & CUT_OFF:
            raise ProtocolViolation(f"{self._address} sent more descriptors at once than are allowed")
        if len(self._waiting) > MAX_DESCRIPTORS:
            raise ProtocolViolation(f"{self._address} sent descriptors that no message announced")

    def take(self) -> int | None:
        """The next descriptor, which the caller closes; None if this process had no free descriptor for it."""
        if not self._waiting:
            raise ProtocolViolation(f"{self._address} offered shared memory but sent no descriptor")
        return self._waiting.popleft()

    def close(self) -> None:
        """Closes the descriptors that were not taken."""
        while self._waiting:
            if (descriptor := self._waiting.popleft()) is not None:
                os.close(descriptor)


def rights(segment: Segment) -> Ancillary:
    """The ancillary data with which `sendmsg` passes the descriptor of a segment."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [segment.fileno()]).tobytes())]


# ---------------------------------------------------------------- serving processes of this host

INSPECTION_ROLE: Final = "inspection"
"""The role of connections that ask a worker for its state."""

_LISTED: Final = "/proc/net/unix"


def process_at(address: str) -> int | None:
    """The process of this user on this host that serves at an address; None if there is none or it is not known.

    The kernel makes the connection and names the process, so this also finds a process that cannot answer. A process
    without the channel "local" (`RPCDIST_CHANNELS`) is not found.
    """
    if not has_abstract_sockets():
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(MIN_ATTEMPT_S)
        with suppress(OSError):
            connection.connect(f"\0{local_name(address)}")
            found = peer_process(connection)
            return found.pid if found.pid > 0 and found.uid == os.getuid() else None
    return None


def local_addresses() -> list[str]:
    """The addresses at which processes of this host serve, including processes of other users."""
    prefix = f"@{local_name('')}"
    try:
        with open(_LISTED) as file:
            names = [line.rstrip("\n").rpartition(" ")[2] for line in file]
    except OSError:
        return []
    return sorted({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
