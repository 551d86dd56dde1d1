"""Nodes in the process of the test, which talk over loopback or the local channel, and takers of their messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rpcdist.ids import Identity, new_incarnation
from rpcdist.transport import Link, Node, NodeOptions, Session
from rpcdist.transport._framing.incoming import IncomingBuffer
from rpcdist.transport._server.server import Server
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import NullHandler
from rpcdist.transport.striping import StripeConnection
from rpcdist.transport.wire_messages import ReplyMessage

__all__ = [
    "LIMIT_S",
    "TOKEN",
    "UNIT_S",
    "Memory",
    "Nodes",
    "Recorder",
    "channel_of",
    "is_local",
    "kind_of",
    "nodes",
    "open_link",
    "payload_connections",
    "payload_sockets",
    "pretend_idle",
    "server_of",
    "socket_of",
    "tcp_port",
    "unary_call",
]

TOKEN = "a token for these tests only"
LIMIT_S = 20.0
UNIT_S = 0.4


class Memory(LargeBuffer):
    """Bytes to be sent."""

    def __init__(self, data: bytes) -> None:
        super().__init__(memoryview(data))


class Recorder(NullHandler):
    """Takes what a session brings; answers calls by their id if it is an echo."""

    limit_bytes = None

    def __init__(self, echo: bool = False) -> None:
        self.messages: list[Any] = []
        self.buffers: list[list[bytes]] = []
        self.sessions: list[Session] = []
        self.closed: list[str] = []
        self._echo = echo
        self._changed = threading.Condition()

    def on_opened(self, session: Session) -> None:
        with self._changed:
            self.sessions.append(session)
            self._changed.notify_all()

    def on_messages(self, session: Session, messages: list[tuple[Any, list[IncomingBuffer]]]) -> None:
        with self._changed:
            for message, buffers in messages:
                self.messages.append(message)
                self.buffers.append([bytes(buffer.view) for buffer in buffers])
                if self._echo:
                    session.send(ReplyMessage(message.id), [Memory(bytes(buffer.view)) for buffer in buffers])
            self._changed.notify_all()

    def on_closed(self, session: Session, reason: str) -> None:
        with self._changed:
            self.closed.append(reason)
            self._changed.notify_all()

    def taken(self) -> list[tuple[Any, list[bytes]]]:
        """The messages so far, with their buffers."""
        with self._changed:
            return list(zip(self.messages, self.buffers, strict=True))

    def wait(self, count: int = 1) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, LIMIT_S)
            return list(self.messages)

    def wait_closed(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed, LIMIT_S)
            return self.closed[0]


class Nodes:
    """Several nodes in one process.

    Args:
        options: of all of them.
    """

    def __init__(self, **options: Any) -> None:
        self._running: list[Node] = []
        self._options = options

    def make(self, name: str, serve: bool = False, **options: Any) -> Node:
        node = Node(NodeOptions(**{"token": TOKEN, "peer_timeout_s": LIMIT_S, **self._options, **options})).start_loop()
        node.identity = Identity(name, -1, new_incarnation())
        self._running.append(node)
        if serve:
            node.serve("127.0.0.1", 0)
        return node

    def stop(self, node: Node) -> None:
        self._running.remove(node)
        node.release()

    def close(self) -> None:
        for node in list(self._running):
            self.stop(node)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """With the options of an unsuspecting user."""
    made = Nodes()
    yield made
    made.close()


def open_link(client: Node, server: Node, role: str = "echo", **arguments: Any) -> Link:
    assert server.address is not None
    return client.run(client.connect(server.address, role, **{"timeout_s": LIMIT_S, **arguments}), LIMIT_S)


def kind_of(link: Link) -> str:
    """The channel of the session: "local", "tcp" or "grpc"."""
    return link.session.channel_kind


def is_local(link: Link) -> bool:
    """Whether the session runs over a Unix socket."""
    return kind_of(link) == "local"


# Users see no sockets and no ports for raw sockets. The tests that break a connection, or speak like a stranger, reach
# them by way of the following functions only.


def server_of(node: Node) -> Server:
    return node._server


def tcp_port(node: Node) -> int:
    """The port for raw sockets; 0 if it has none."""
    return server_of(node)._streams.tcp_port


def pretend_idle(session: Session, for_s: float) -> None:
    """As if it had sent nothing for so long: then the next message is a lone one."""
    session._writer.last_sent -= for_s


def channel_of(session: Session) -> Any:
    return session._channel


def socket_of(session: Session) -> Any:
    """The socket, or the `TlsSocket`, of a session that has one."""
    return channel_of(session)._socket


@contextmanager
def unary_call(link: Link, path: str) -> Iterator[Callable[..., Any]]:
    """Begins a call of a unary service whose request and reply the caller sends and reads by pieces; on the loop."""
    with link._calling(path) as metadata:
        yield partial(link._for_unary().stream_stream(path), metadata=metadata)


def payload_connections(session: Session) -> list[StripeConnection]:
    return [] if session.striping is None else list(session.striping._connections)


def payload_sockets(session: Session) -> list[Any]:
    return [connection._socket for connection in payload_connections(session)]
