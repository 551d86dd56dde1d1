"""Messengers of one process, connected by socket pairs."""

from __future__ import annotations

import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rpcdist.collectives._transports.p2p.message_state import MessageState
from rpcdist.collectives._transports.p2p.messenger import Connect, Messenger
from rpcdist.collectives._transports.p2p.progress_engine import ProgressEngine
from rpcdist.collectives.work import Work

__all__ = [
    "BIG",
    "LIMIT_S",
    "Mesh",
    "engine_of",
    "in_threads",
    "irecv",
    "isend",
    "mesh",
    "number",
    "recv",
    "send",
    "slow_socket",
    "state_of",
    "tcp_pair",
]

LIMIT_S = 20.0
BIG = 6_000_000  # elements: more than all buffers of a socket and the limit of the mesh hold


class Mesh:
    """A group of messengers; each could be a process of its own.

    Attributes:
        members: by rank.
        sockets: the sender's socket, by (sender, receiver).
        far: the receiver's, by (sender, receiver).
    """

    def __init__(
        self, size: int, tcp: bool = False, buffer_limit_bytes: int = 1 << 20, num_ranks_here: int = 0
    ) -> None:
        self.tcp = tcp
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        self.far: dict[tuple[int, int], socket.socket] = {}
        self.members = [
            Messenger(
                "test",
                rank,
                range(size),
                self._connect_from(rank),
                buffer_limit_bytes=buffer_limit_bytes,
                num_ranks_here=num_ranks_here,
            )
            for rank in range(size)
        ]

    def _connect_from(self, rank: int) -> Connect:
        def connect(peer: int, timeout_s: float, check: Callable[[], None]) -> socket.socket:
            mine, theirs = tcp_pair() if self.tcp else socket.socketpair()
            self.sockets[rank, peer] = mine
            self.far[rank, peer] = theirs
            self.members[peer].attach(rank, theirs)
            return mine

        return connect

    def close(self) -> None:
        for member in self.members:
            member.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return mine, theirs


@contextmanager
def mesh(
    size: int = 2, tcp: bool = False, buffer_limit_bytes: int = 1 << 20, num_ranks_here: int = 0
) -> Iterator[Mesh]:
    """A `Mesh` for the length of a block."""
    made = Mesh(size, tcp, buffer_limit_bytes, num_ranks_here)
    try:
        yield made
    finally:
        made.close()


def in_threads(*functions: Callable[[], object], limit_s: float = LIMIT_S) -> list[object]:
    """Runs functions at once, each on a thread; returns their results, or raises the first error."""
    results: list[object] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    return results


def state_of(member: Messenger) -> MessageState:
    """The tables of connections and messages, which no public interface shows."""
    return member._state


def engine_of(member: Messenger) -> ProgressEngine:
    """The part that moves the bytes, on waiting threads or on a thread of its own."""
    return member._progress


_numbers: WeakKeyDictionary[Messenger, Counter[str]] = WeakKeyDictionary()


def title_of(member: Messenger, verb: str, peer: int | None, tag: int) -> str:
    """Names a call like the backend, and counts the calls of each kind."""
    numbers = _numbers.setdefault(member, Counter())
    numbers[verb] += 1
    whom = "any rank" if peer is None else f"rank {state_of(member).ranks[peer]}"
    return f"{verb} #{numbers[verb]} {'to' if verb == 'send' else 'from'} {whom} with tag {tag} of group 'test'"


def send(member: Messenger, tensor: torch.Tensor, peer: int, tag: int = 0, timeout_s: float = LIMIT_S) -> Work:
    title = title_of(member, "send", peer, tag)
    return member.send(title, tensor, peer, tag, asynchronous=False, timeout_s=timeout_s)


def recv(member: Messenger, tensor: torch.Tensor, peer: int | None, tag: int = 0, timeout_s: float = LIMIT_S) -> Work:
    title = title_of(member, "recv", peer, tag)
    return member.recv(title, tensor, peer, tag, asynchronous=False, timeout_s=timeout_s)


def isend(member: Messenger, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
    title = title_of(member, "send", peer, tag)
    return member.send(title, tensor, peer, tag, asynchronous=True, timeout_s=LIMIT_S)


def irecv(
    member: Messenger,
    tensor: torch.Tensor,
    peer: int | None,
    tag: int = 0,
    timeout_s: float = LIMIT_S,
    finish: Callable[[], None] | None = None,
) -> Work:
    title = title_of(member, "recv", peer, tag)
    return member.recv(title, tensor, peer, tag, asynchronous=True, timeout_s=timeout_s, finish=finish)


def number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


class Socket:
    """A socket that takes what `limits` say, one number of bytes for each send, or raises such an error."""

    def __init__(self, sock: Any, *limits: int | BaseException) -> None:
        self._sock = sock
        self.limits = list(limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: bytes, flags: int = 0) -> int:
        limit = self.limits.pop(0) if self.limits else len(data)
        if isinstance(limit, BaseException):
            raise limit
        return int(self._sock.send(data[:limit], flags))

    def sendmsg(self, parts: list[bytes], ancillary: object = (), flags: int = 0) -> int:
        return self.send(b"".join(parts), flags)


def slow_socket(made: Mesh, *limits: int | BaseException) -> Socket:
    """Opens the connection from rank 0 to rank 1, and limits what it takes from now on."""
    a, b = made.members
    send(a, number(0), 1)
    recv(b, number(0), 0)
    connection = state_of(a).outgoing[1]
    sock = Socket(connection.sock, *limits)
    connection.sock = sock  # type: ignore[assignment]
    if limits:
        connection.refusals_read_at = math.inf  # however slow the test is: the next message takes the short way
    return sock
