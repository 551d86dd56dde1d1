"""Socket hubs for tests: each with a node, and so an I/O loop, of its own."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rpcdist.transport._tls.tls_socket import StreamSocket
from rpcdist.transport.node import Node, NodeOptions
from rpcdist.transport.sockets import SocketHub

__all__ = ["LIMIT_S", "expect", "hubs", "open_hub", "read_exactly", "read_some", "running_node", "write_all"]

LIMIT_S = 20.0


@contextmanager
def running_node(token: str | None = None, job: str = "default") -> Iterator[Node]:
    node = Node(NodeOptions(token=token, job=job)).start_loop()
    try:
        yield node
    finally:
        node.release()


@contextmanager
def open_hub(token: str | None = None, job: str = "default", host: str = "127.0.0.1") -> Iterator[SocketHub]:
    with running_node(token, job) as node:
        hub = SocketHub(node)
        try:
            hub.open(host)
            yield hub
        finally:
            hub.close()


@contextmanager
def hubs(number: int) -> Iterator[list[SocketHub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(open_hub()) for _ in range(number)]


def expect(hub: SocketHub, purpose: str, timeout_s: float = LIMIT_S) -> StreamSocket:
    """The connection that a peer opens for this purpose."""
    found: dict[str, StreamSocket] = {}
    hub.collect(purpose, [""], found, timeout_s)
    return found[""]


def read_exactly(connection: StreamSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = read_some(connection, size - len(data))
        assert chunk, f"the connection ended after {len(data)} of {size} bytes"
        data += chunk
    return data


def read_some(connection: StreamSocket, size: int) -> bytes:
    """Waits for bytes, or for the end, which is none."""
    while True:
        try:
            return connection.recv(size)
        except BlockingIOError:
            assert select.select([connection], [], [], LIMIT_S)[0], "nothing came"


def write_all(connection: StreamSocket, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            assert select.select([], [connection], [], LIMIT_S)[1], "nothing moved"
