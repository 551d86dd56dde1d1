"""Reachability over the local channel: names that others took, strangers, limits, fallbacks and forks."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import transport_nodes
from transport_nodes import LIMIT_S, TOKEN, UNIT_S, Memory, Nodes, Recorder, is_local, open_link

from rpcdist import own_shortage
from rpcdist._proto import handshake_pb2, rpc_pb2, value_pb2
from rpcdist.errors import AuthenticationFailed, ConfigError, ConnectFailed
from rpcdist.ids import Identity
from rpcdist.testing import free_port
from rpcdist.transport import Node, connector
from rpcdist.transport._channels import channel, stream_sockets
from rpcdist.transport._channels.stream_sockets import accept, accepted_ends, connect_unix, listen_unix
from rpcdist.transport._framing.frames import frame
from rpcdist.transport._server import admission, stream_listeners
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ServerHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.unix_sockets import local_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no local channel without abstract sockets")

LENGTH = struct.Struct("<I")


@pytest.fixture(autouse=True)
def channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "local")


@pytest.fixture
def server(nodes: Nodes) -> Node:
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    return server


def works(client: Node, server: Node) -> bool:
    """Opens a link, and sends something there and back; whether it went over the channel."""
    answers = Recorder()
    link = open_link(client, server, handler=answers)
    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1)), [Memory(b"x" * 100_000)])
    assert answers.wait()[0].id == 1 and answers.buffers == [[b"x" * 100_000]]
    client.run(link.close(), LIMIT_S)
    return is_local(link)


# ---------------------------------------------------------------- which channel


def test_neighbours_meet_on_the_channel_and_find_it_gone_with_the_server(nodes: Nodes, server: Node) -> None:
    client = nodes.make("client")
    assert works(client, server) and works(client, server)
    address = server.address
    assert address is not None
    nodes.stop(server)

    with pytest.raises(ConnectionRefusedError):
        client.run(connect_unix(local_name(address)), LIMIT_S)
    with pytest.raises(ConnectFailed, match="refused"):
        client.run(client.connect(address, "echo", LIMIT_S, handler=Recorder(), retry=False), LIMIT_S)


@pytest.mark.parametrize("side", ["client", "server"])
def test_either_side_may_want_grpc_only(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc" if side == "server" else "local")
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    monkeypatch.setenv("RPCDIST_CHANNELS", "grpc" if side == "client" else "local")
    assert not works(nodes.make("client"), server)


def test_without_abstract_sockets_there_is_grpc(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "has_abstract_sockets", lambda: False)
    server = nodes.make("server", serve=True)
    server.handle_role("echo", Recorder(echo=True))
    assert not works(nodes.make("client"), server)


def test_a_user_who_looks_like_all_strangers_stays_on_grpc(
    nodes: Nodes, server: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "overflowuid").write_text(f"{os.getuid()}\n")
    monkeypatch.setattr(channel, "_OVERFLOW_UID", tmp_path / "overflowuid")
    assert not works(nodes.make("client"), server)


def test_a_channel_that_there_is_not(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "pigeons")
    node = nodes.make("server")
    with pytest.raises(
        ConfigError, match="RPCDIST_CHANNELS must be 'auto', 'local', 'tcp' or 'grpc', but it is 'pigeons'"
    ):
        node.serve("127.0.0.1", 0)
    assert node.address is None


# ---------------------------------------------------------------- names that others took


class Squatter:
    """Listens under the name of a worker's channel before that does, and keeps what it is told.

    Args:
        answer: what it does with a connection.
    """

    def __init__(self, port: int, answer: Callable[[Squatter, socket.socket], None]) -> None:
        self.heard = b""
        self.ended = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + local_name(f"127.0.0.1:{port}"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, args=(answer,))
        self._thread.start()

    def _serve(self, answer: Callable[[Squatter, socket.socket], None]) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(LIMIT_S)
        with connection, suppress(OSError):
            answer(self, connection)

    def receive(self, connection: socket.socket) -> bytes:
        data = connection.recv(1 << 16)
        self.heard += data
        return data

    def close(self) -> None:
        self.ended.set()
        self._thread.join(LIMIT_S)
        self._listener.close()


def be_silent(squatter: Squatter, connection: socket.socket) -> None:
    while squatter.receive(connection):
        pass


def talk_nonsense(squatter: Squatter, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    be_silent(squatter, connection)


def announce_too_much(squatter: Squatter, connection: socket.socket) -> None:
    connection.sendall(LENGTH.pack(1 << 30))
    be_silent(squatter, connection)


def hang_up(squatter: Squatter, connection: socket.socket) -> None:
    squatter.receive(connection)


def answer_as(squatter: Squatter, connection: socket.socket, token: bytes) -> None:
    side = ServerHandshake(Credentials(token, "default", Identity("other", 3, 4)), channel=accepted_ends(connection))
    while data := squatter.receive(connection):
        reply = side.receive(handshake_pb2.Handshake.FromString(data[LENGTH.size :]))
        if reply is None:
            break
        connection.sendall(framed(reply.SerializeToString()))


def belong_to_another_job(squatter: Squatter, connection: socket.socket) -> None:
    """Answers like a worker that holds another token."""
    answer_as(squatter, connection, b"the token of another job")


def take_a_neighbours_place(squatter: Squatter, connection: socket.socket) -> None:
    """Answers with the right token, but is somebody else than the one expected."""
    answer_as(squatter, connection, TOKEN.encode())


@pytest.mark.parametrize(
    "answer",
    [be_silent, talk_nonsense, announce_too_much, hang_up, belong_to_another_job, take_a_neighbours_place],
    ids=lambda answer: answer.__name__,
)
def test_who_took_the_name_first_learns_nothing_and_stops_nobody(
    nodes: Nodes,
    answer: Callable[[Squatter, socket.socket], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connector, "ATTEMPT_LIMIT_S", UNIT_S)  # of the one that is silent; the others are told sooner
    caplog.set_level(logging.INFO)
    server, client, answers = nodes.make("server"), nodes.make("client"), Recorder()
    port = free_port()
    squatter = Squatter(port, answer)
    try:
        server.serve("127.0.0.1", port)
        assert "its name is in use" in caplog.text
        server.handle_role("echo", Recorder(echo=True))
        link = open_link(client, server, handler=answers, expected=server.identity)
        assert link.peer == server.identity and not is_local(link)
        link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1, function="a secret")))
        assert answers.wait()[0].id == 1
    finally:
        squatter.close()
    assert f"no local channel to 127.0.0.1:{port}, so the network is used: " in caplog.text
    assert squatter.heard and TOKEN.encode() not in squatter.heard and b"a secret" not in squatter.heard


def test_another_users_process_under_the_name_is_not_spoken_to(
    nodes: Nodes, server: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stream_sockets, "same_user", lambda connection: False)
    assert not works(nodes.make("client"), server)
    assert "another user's process listens under the name" in caplog.text


# ---------------------------------------------------------------- strangers


@contextmanager
def stranger(server: Node) -> Iterator[socket.socket]:
    assert server.address is not None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect("\0" + local_name(server.address))
        yield connection


def all_of(connection: socket.socket) -> bytes:
    """The bytes that come until the server hangs up."""
    data = b""
    with suppress(ConnectionResetError):  # something that was sent was not read
        while more := connection.recv(1 << 16):
            data += more
    return data


def framed(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


CALL = frame(rpc_pb2.Message(call=rpc_pb2.Call(id=1, arguments=value_pb2.Value(body=b"cos\nabort\n(tR."))))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (framed(CALL), b" bytes that arrived are not a handshake"),
        (framed(b"\xff" * 100), b"100 bytes that arrived are not a handshake"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"announced a handshake message of"),
        (
            LENGTH.pack(MAX_HANDSHAKE_BYTES + 1),
            b"announced a handshake message of %d bytes" % (MAX_HANDSHAKE_BYTES + 1),
        ),
        (framed(b""), b"a handshake message is empty"),
    ],
    ids=["a call", "not a handshake", "http", "too large", "empty"],
)
def test_strangers_are_told_and_shown_out(
    nodes: Nodes, server: Node, data: bytes, says: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with stranger(server) as connection:
            connection.sendall(data)
            assert says in all_of(connection)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and f"refused a connection from process {os.getpid()} of this host" in warnings[0]
    assert works(nodes.make("client"), server)
    assert server.strangers.unproven == 0


def test_a_stranger_has_limited_time(monkeypatch: pytest.MonkeyPatch, server: Node) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_LIMIT_S", UNIT_S)
    with stranger(server) as silent:
        assert b"the handshake took longer than 0.4 s" in all_of(silent)


def test_processes_of_other_users_are_closed_unread(
    nodes: Nodes, server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stream_listeners, "same_user", lambda connection: False)
        with stranger(server) as connection:
            assert all_of(connection) == b""
    assert works(nodes.make("client"), server)


def test_the_wrong_token_fails_on_the_channel_and_grpc_says_so(nodes: Nodes, server: Node) -> None:
    client = nodes.make("client", token="another token, just as long")
    with pytest.raises(AuthenticationFailed, match="did not prove the job token"):
        open_link(client, server, handler=Recorder())


def test_the_listener_outlives_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    attempts: list[Any] = [OSError(24, "Too many open files"), OSError(24, "Too many open files"), (ours, "")]

    class Listener:
        def accept(self) -> Any:
            attempt = attempts.pop(0)
            if isinstance(attempt, OSError):
                raise attempt
            return attempt

    async def run() -> None:
        listener: Any = Listener()
        (await accept(listener)).close()

    monkeypatch.setattr(stream_sockets, "TICK_S", 0.0)
    monkeypatch.setattr(own_shortage, "_logged", {})
    asyncio.run(run())
    theirs.close()
    assert caplog.text.count("no free file descriptor") == 1


def test_a_stopped_listener_gives_its_name_back(nodes: Nodes) -> None:
    node = nodes.make("server", serve=True)
    first, second = node.address, node.serve("127.0.0.1", free_port())
    assert first is not None and node.serve("127.0.0.1", 0) == first
    node.stop_serving(second)
    listen_unix(local_name(second)).close()
    node.stop_serving(first)
    assert node.address == first  # it has another user
    node.stop_serving(first)
    assert node.address is None
    listen_unix(local_name(first)).close()


# ---------------------------------------------------------------- forks


FORKS = """
    import os, socket, sys
    sys.path.insert(0, {tests!r})
    from transport_nodes import Memory, Recorder, is_local, LIMIT_S
    from rpcdist._proto import rpc_pb2
    from rpcdist.transport import NodeOptions, acquire_node

    node = acquire_node(NodeOptions(token="a token for this test only"))
    address = node.serve("127.0.0.1", 0)
    node.handle_role("echo", Recorder(echo=True))
    answers = Recorder()
    link = node.run(node.connect(address, "echo", LIMIT_S, handler=answers), LIMIT_S)
    assert is_local(link)

    def channels():
        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                copy = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue
            with copy:
                if copy.family == socket.AF_UNIX:
                    names = [copy.getsockname()]
                    try:
                        names.append(copy.getpeername())
                    except OSError:
                        pass
                    found += any(b"rpcdist-channel" in (n if isinstance(n, bytes) else n.encode()) for n in names)
        return found

    assert channels() == 3, channels()                        # the listener, and both ends
    for number in range(1, 4):
        link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=number)), [Memory(b"x" * (8 << 20))])
        child = os.fork()                               # in the middle of a transfer
        if child == 0:
            link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=99)))    # goes nowhere
            os._exit(3 if channels() == 0 else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert sorted(message.id for message in answers.wait(3)) == [1, 2, 3]
    assert all(buffers == [b"x" * (8 << 20)] for buffers in answers.buffers)
    node.release()
    print("done")
"""


@pytest.mark.multiproc
def test_a_forked_child_has_no_part_in_the_channel_and_does_not_disturb_it() -> None:
    script = textwrap.dedent(FORKS).format(tests=os.path.dirname(transport_nodes.__file__))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
