"""Sessions over TCP whose large messages travel on connections of their own."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from transport_nodes import (
    LIMIT_S,
    UNIT_S,
    Memory,
    Nodes,
    Recorder,
    open_link,
    payload_connections,
    payload_sockets,
    tcp_port,
)

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ConfigError, ProtocolViolation, TransportError
from rpcdist.testing import eventually, eventually_async
from rpcdist.transport import Link, Node, Session, connector, striping
from rpcdist.transport._channels import proving, stream_sockets
from rpcdist.transport._channels.proving import prove_client
from rpcdist.transport._framing.frames import frame
from rpcdist.transport._framing.incoming import Delivery
from rpcdist.transport._server import admission
from rpcdist.transport.connector import Connector
from rpcdist.transport.hub_connector import HubAddress, connect_to_hub
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.striping import (
    MIN_STRIPED_BYTES,
    PAYLOAD_CONNECTIONS_VARIABLE,
    PAYLOAD_TAKER,
    PIECE_BYTES,
    num_connections,
    payload_purpose,
)
from rpcdist.transport.wire_messages import WireMessage

LARGE = bytes(range(256)) * (MIN_STRIPED_BYTES // 256) + b"and a little more"
_ids = itertools.count(1_000_000)


@pytest.fixture(autouse=True)
def channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCDIST_CHANNELS", "tcp")


def serve(nodes: Nodes, taker: Recorder | None = None) -> tuple[Node, Recorder]:
    """A server and what takes its messages: by default an echo."""
    server, taker = nodes.make("server", serve=True), taker or Recorder(echo=True)
    server.handle_role("echo", taker)
    return server, taker


def send(session: Session, id: int, *buffers: bytes) -> int:
    return session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=id)), [Memory(data) for data in buffers])


def echo(link: Link, answers: Recorder, *buffers: bytes) -> None:
    id = next(_ids)
    send(link.session, id, *buffers)
    eventually(lambda: id in received(answers))
    assert received(answers)[id] == list(buffers)


def received(answers: Recorder) -> dict[int, list[bytes]]:
    """The buffers of all answers, by the number of the call."""
    return {message.id: data for message, data in answers.taken()}


def num_open(session: Session) -> int:
    return len(payload_connections(session))


def own_bytes(session: Session) -> int:
    """The bytes so far that its own connection has carried."""
    assert session.striping is not None
    return session.traffic().total() - sum(session.striping.traffic)


def opened(link: Link, answers: Recorder, taker: Recorder) -> list[Session]:
    """Both ends of the session, once they have their payload connections."""
    for _ in range(2):
        echo(link, answers, LARGE)
    sessions = [link.session, taker.sessions[0]]
    eventually(lambda: all(num_open(session) for session in sessions))
    return sessions


@pytest.fixture
def payload_threads() -> Callable[[], list[str]]:
    """The names of the test's own threads: the process may have others, of a pool that other tests share."""
    others = set(threading.enumerate())

    def names() -> list[str]:
        own = (thread.name for thread in threading.enumerate() if thread not in others)
        return [name for name in own if name.startswith("rpcdist payload ")]

    return names


# ---------------------------------------------------------------- in use


@pytest.mark.parametrize("tls", ["off", "always"])
@pytest.mark.parametrize("count", ["1", "2", "16"])
def test_large_messages_travel_in_stripes(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, tls: str, count: str, payload_threads: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("RPCDIST_TLS", tls)
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, count)
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    sessions = opened(link, answers, taker)
    assert [num_open(session) for session in sessions] == [int(count)] * 2
    before = [own_bytes(session) for session in sessions]
    many = [bytes([number]) * 40_000 for number in range(100)]
    echo(link, answers, LARGE, b"", b"x", LARGE[1:])
    echo(link, answers, *many)
    assert all(
        own_bytes(session) - bytes_before < 40_000 for session, bytes_before in zip(sessions, before, strict=True)
    )
    echo(link, answers, b"small")
    assert len(payload_threads()) == 4 * int(count)
    link.session.close("that was all")
    eventually(lambda: not payload_threads())
    answers.wait_closed()
    assert "that was all" in taker.wait_closed()


def test_they_are_opened_at_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, 8 of them took 40 round trips: more than the limit of 3 s over a link of 100 ms."""
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, "8")
    (server, taker), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    all_begun = asyncio.Barrier(8)

    async def connect(host: str, port: int) -> socket.socket:
        await all_begun.wait()
        return await stream_sockets.connect_tcp(host, port)

    monkeypatch.setattr(connector, "connect_tcp", connect)
    sessions = opened(link, answers, taker)
    assert [num_open(session) for session in sessions] == [8, 8]


def test_those_that_a_busy_peer_refuses_are_opened_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 workers of one host that open 8 each at the same time are more than the peer lets in from a host at once."""
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, "8")
    for module in (connector, striping):
        monkeypatch.setattr(module, "SIDE_ATTEMPT_LIMIT_S", LIMIT_S)
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    echo(link, answers, b"x")

    async def prove_when_some_are_refused(*arguments: Any) -> Any:
        await eventually_async(lambda: server.strangers.refused >= 4)
        return await prove_client(*arguments)

    monkeypatch.setattr(admission, "MAX_UNPROVEN", 8)  # and half of them for one host
    monkeypatch.setattr(proving, "prove_client", prove_when_some_are_refused)
    sessions = opened(link, answers, taker)
    assert [num_open(session) for session in sessions] == [8, 8]


def test_many_messages_from_many_threads_arrive_whole(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    already = len(answers.messages)

    def work(number: int) -> None:
        for turn in range(5):
            id = 10 * number + turn + 100
            send(link.session, id, bytes([id % 251]) * (MIN_STRIPED_BYTES + 1000 * id))
            send(link.session, id + 1000, bytes([id % 251]) * 70_000)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    answers.wait(already + 40)
    for thread in threads:
        thread.join(LIMIT_S)
    got = {id: data[0] for id, data in received(answers).items()}
    for id in range(100, 140):
        if id % 10 < 5:
            assert got[id] == bytes([id % 251]) * (MIN_STRIPED_BYTES + 1000 * id)
            assert got[id + 1000] == bytes([id % 251]) * 70_000


def test_nothing_keeps_a_payload_after_it_was_delivered_or_sent(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    counted = [0]

    class Counted(Memory):
        def __del__(self) -> None:
            counted[0] += 1

    link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=9)), [Counted(LARGE)])
    answers.wait(3)
    eventually(lambda: counted == [1])


def test_an_aborted_message_does_not_arrive_and_the_next_one_does(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    for id in range(20, 30):
        link.session.abort_transfer(send(link.session, id, LARGE * 8), "not wanted")
    echo(link, answers, LARGE)
    eventually(lambda: not any(session._incoming.missing for session in (link.session, taker.sessions[0])))
    assert len(answers.messages) < 13  # some were perhaps faster


# ---------------------------------------------------------------- where there are none


def test_the_variable_is_checked(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("17", "-1", "two", ""):
        monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, text)
        with pytest.raises(ConfigError, match="a number from 0 to 16"):
            num_connections()
        with pytest.raises(ConfigError, match=PAYLOAD_CONNECTIONS_VARIABLE):
            nodes.make("server", serve=True)


def test_without_them_one_connection_carries_everything(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAYLOAD_CONNECTIONS_VARIABLE, "0")
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    for _ in range(4):
        echo(link, answers, LARGE)
    assert num_open(link.session) == num_open(taker.sessions[0]) == 0


def test_a_peer_that_takes_none_is_asked_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (server, taker), answers = serve(nodes), Recorder()
    server.end_sockets(PAYLOAD_TAKER)
    link = open_link(nodes.make("client"), server, handler=answers)
    for _ in range(4):
        echo(link, answers, LARGE)
    eventually(lambda: "no payload connections to server" in caplog.text)
    echo(link, answers, LARGE)
    assert caplog.text.count("no payload connections to server") == 1
    assert num_open(link.session) == num_open(taker.sessions[0]) == 0


@pytest.mark.parametrize("num_started", range(4))
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_process_without_threads_does_without_them(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    num_started: int,
    caplog: pytest.LogCaptureFixture,
    payload_threads: Callable[[], list[str]],
) -> None:
    """One connection had readers and the other had none, and what was sent on that was waited for in vain."""
    left, start = [num_started], IoLoop.start_worker
    peer = "server" if side == "client" else "client"

    def start_worker(io: IoLoop, work: Callable[[], None], name: str) -> None:
        if name.endswith(f" of {peer}"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(io, work, name)

    monkeypatch.setattr(IoLoop, "start_worker", start_worker)
    link, answers, taker = refused_them(nodes, caplog)
    assert f"no payload connections with {peer}" in caplog.text
    eventually(lambda: not payload_threads())
    goes_on(link, answers, taker)


@pytest.mark.parametrize("num_set", range(2))
def test_sockets_that_take_no_option_are_done_without(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    num_set: int,
    caplog: pytest.LogCaptureFixture,
    payload_threads: Callable[[], list[str]],
) -> None:
    """The threads of the first connection stayed for ever, and so did the peer's."""
    left, set_option = [num_set], stream_sockets.break_when_silent

    def refuse(connection: Any, limit_s: float) -> None:
        left[0] -= 1
        if left[0] == -1:  # once, so that the other side uses them
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        set_option(connection, limit_s)

    monkeypatch.setattr("rpcdist.transport.striping.break_when_silent", refuse)
    link, answers, taker = refused_them(nodes, caplog)
    assert "no payload connections with " in caplog.text and os.strerror(errno.ENOPROTOOPT) in caplog.text
    eventually(lambda: not payload_threads())
    goes_on(link, answers, taker)


def test_who_gave_up_waiting_for_them_ends_no_session(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    payload_threads: Callable[[], list[str]],
) -> None:
    """The last one was proven at the other end when the time was over."""
    connecting = Connector._open_payload_connections

    async def open(*args: Any) -> Any:
        for connection in await connecting(*args):
            connection.close()
        raise TimeoutError

    monkeypatch.setattr(Connector, "_open_payload_connections", open)
    link, answers, taker = refused_them(nodes, caplog)
    eventually(lambda: not payload_threads())
    goes_on(link, answers, taker)


def refused_them(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> tuple[Link, Recorder, Recorder]:
    """A session whose payload connections were opened, and closed by one side before anything went on them."""
    caplog.set_level(logging.INFO)
    (server, taker), answers = serve(nodes, Recorder()), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    for id in range(2):
        send(link.session, id, LARGE)
    taker.wait(2)
    eventually(lambda: "has closed its payload connections" in caplog.text)  # logged by the side that found them closed
    return link, answers, taker


def goes_on(link: Link, answers: Recorder, taker: Recorder) -> None:
    """Both ways, and without payload connections."""
    for id in range(2, 5):
        send(link.session, id, LARGE)
        send(taker.sessions[0], id, LARGE)
    taker.wait(5)
    answers.wait(3)
    assert num_open(link.session) == num_open(taker.sessions[0]) == 0
    assert not answers.closed and not taker.closed


# ---------------------------------------------------------------- the end


def test_what_was_sent_before_the_end_arrives(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    _, there = opened(link, answers, taker)
    for id in range(5):
        send(there, id, LARGE * 4)
    assert server.run(there.drain(LIMIT_S), LIMIT_S)
    there.close("all is sent")
    assert "all is sent" in answers.wait_closed()
    assert [data for [data] in answers.buffers[2:]] == [LARGE * 4] * 5


def test_a_payload_connection_that_breaks_ends_the_session_by_name(
    nodes: Nodes, payload_threads: Callable[[], list[str]]
) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    echo(link, answers, LARGE)
    payload_sockets(link.session)[0].shutdown(socket.SHUT_RDWR)
    reasons = answers.wait_closed() + taker.wait_closed()
    assert "a payload connection with" in reasons and "broke" in reasons
    eventually(lambda: not payload_threads())


def test_a_peer_that_reads_nothing_holds_no_thread_after_the_end(
    nodes: Nodes, payload_threads: Callable[[], list[str]]
) -> None:
    reading, is_over = threading.Event(), MemoryError("the test is over")

    class Taker(Recorder):
        reads = True

        def allocate(self, size_bytes: int) -> Any:
            if self.reads:
                return super().allocate(size_bytes)
            reading.wait(LIMIT_S)
            raise is_over

    taker, answers = Taker(echo=True), Recorder()
    server, _ = serve(nodes, taker)
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    taker.reads = False
    for id in range(4):
        send(link.session, id, LARGE * 16)
    eventually(lambda: link.session.striping is not None and link.session.striping.is_busy)
    link.session.close("enough")
    answers.wait_closed()
    eventually(lambda: not [name for name in payload_threads() if name.endswith("of server")])
    reading.set()
    taker.wait_closed()
    eventually(lambda: not payload_threads())


# ---------------------------------------------------------------- who may open one, and what it may send


def payload_socket(client: Node, server: Node, purpose: str) -> socket.socket:
    """A proven connection that says it is one for payloads."""
    host, port = "127.0.0.1", tcp_port(server)
    opening = connect_to_hub(client.credentials, HubAddress(host, port, "", PAYLOAD_TAKER), purpose, unix=False)
    opened = client.run(opening, LIMIT_S)
    assert isinstance(opened, socket.socket)
    return opened


@pytest.mark.parametrize(
    "purpose", ["", "0/2", "ab/0/2", "{id}/2/2", "{id}/0/17", "{id}/-1/2", "{id}/0/2/3", "{id}/0/0", "{id}/x/2", "é"]
)
def test_what_names_no_payload_connection_is_refused(nodes: Nodes, purpose: str) -> None:
    (server, _), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    echo(link, answers, b"x")
    with pytest.raises(ProtocolViolation, match=r"not name a payload connection|no such session in this process"):
        payload_socket(client, server, purpose.format(id=link.session.id.hex())).close()
    echo(link, answers, b"x")


def test_nobody_joins_the_session_of_another(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    echo(link, answers, b"x")
    purpose = payload_purpose(link.session.id, (0, 1))
    with pytest.raises(ProtocolViolation, match="mallory has no such session in this process"):
        payload_socket(nodes.make("mallory"), server, purpose).close()
    opened(link, answers, taker)


def test_a_connection_is_taken_once_and_one_too_few_are_closed_with_the_session(nodes: Nodes) -> None:
    (server, _), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    echo(link, answers, b"x")
    first = payload_socket(client, server, payload_purpose(link.session.id, (0, 3)))
    for place in ((0, 3), (1, 2)):
        with pytest.raises(ProtocolViolation, match="is already open"):
            payload_socket(client, server, payload_purpose(link.session.id, place)).close()
    link.session.close("enough")
    first.settimeout(LIMIT_S)
    assert first.recv(1) == b""
    first.close()


def test_one_too_few_are_not_kept_for_long(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each session whose second one had not come in time, the first stayed here as long as the session."""
    (server, taker), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    echo(link, answers, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(striping, "SIDE_ATTEMPT_LIMIT_S", UNIT_S)
        first = payload_socket(client, server, payload_purpose(link.session.id, (0, 2)))
        first.settimeout(LIMIT_S)
        assert first.recv(1) == b""
        first.close()
    opened(link, answers, taker)


def hostile(nodes: Nodes) -> tuple[Link, Recorder, Recorder, socket.socket]:
    """A session, and the one payload connection that its peer has: a bare socket."""
    (server, taker), answers = serve(nodes), Recorder()
    client = nodes.make("client")
    link = open_link(client, server, handler=answers)
    echo(link, answers, b"x")
    bare = payload_socket(client, server, payload_purpose(link.session.id, (0, 1)))
    bare.setblocking(True)
    eventually(lambda: num_open(taker.sessions[0]) == 1)
    return link, answers, taker, bare


def announce(link: Link, size: int) -> None:
    """Announces a large buffer, and sends nothing of it."""
    message = rpc_pb2.Message(call=rpc_pb2.Call(id=1), transfer=77, large=[size])
    link.session.send(message)
    link.session.flush()


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (struct.pack("<QII", 2, 0, 0), "a piece of 0 bytes was announced"),
        (struct.pack("<QII", 2, 0, PIECE_BYTES + 1), f"a piece of {PIECE_BYTES + 1} bytes was announced"),
        (struct.pack("<QII", 2, 0, 2**32 - 1), "bytes was announced"),
        (struct.pack("<QII", 2, 1, 1), "1 bytes arrived for a stripe with 0 bytes left"),
        (struct.pack("<QII", 2, 2**32 - 1, 1), "1 bytes arrived for a stripe with 0 bytes left"),
        (struct.pack("<QII", 2, 0, 1001), "1001 bytes arrived for a stripe with 1000 bytes left"),
        (struct.pack("<QII", 2, 0, 1000) + b"x" * 1000 + struct.pack("<QII", 3, 0, 1), None),
        (b"GET / HTTP/1.1\r\n\r\n", "bytes was announced"),
    ],
)
def test_pieces_that_cannot_be_end_the_session(
    nodes: Nodes, piece: bytes, text: str | None, payload_threads: Callable[[], list[str]]
) -> None:
    link, _, taker, bare = hostile(nodes)
    announce(link, 1000)  # the second: the first was an echo
    bare.sendall(piece)
    if text is None:  # the whole message, and a piece of one that is never announced: nobody waits for it for ever
        taker.wait(2)
        assert taker.buffers[1] == [b"x" * 1000]
        link.session.close("enough")
        taker.wait_closed()
    else:
        assert text in taker.wait_closed()
    bare.close()
    eventually(lambda: not payload_threads())


def test_a_piece_that_stops_in_its_middle_hides_nothing(nodes: Nodes) -> None:
    link, answers, taker, bare = hostile(nodes)
    announce(link, 1000)
    bare.sendall(struct.pack("<QII", 2, 0, 1000) + b"x" * 500)
    send(link.session, 2)
    taker.wait(2)  # other messages pass
    bare.close()
    assert "broke: it ended in the middle of a piece" in taker.wait_closed()
    assert "payload connection" in answers.wait_closed()


HALF_A_RECORD = b"\x17\x03\x03\x40\x00" + bytes(100)  # announces 16 KiB


@pytest.mark.parametrize(
    "injected", [struct.pack("<QII", 3, 0, 1000) + b"x" * 1000, HALF_A_RECORD, b"\x17\x03\x03\x00\x20" + bytes(32)]
)
def test_bytes_that_nobody_encrypted_end_a_session_over_tls(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, injected: bytes, payload_threads: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    echo(link, answers, LARGE)
    announce(link, MIN_STRIPED_BYTES)
    num_before = len(taker.messages)
    connection = payload_sockets(link.session)[0]
    os.write(connection.fileno(), injected)  # as somebody on the way would put it there
    connection.shutdown(socket.SHUT_WR)
    reasons = answers.wait_closed() + taker.wait_closed()  # the client hears of it by an alert, perhaps first
    assert "a payload connection with" in reasons and "broke" in reasons
    assert len(taker.messages) == num_before
    eventually(lambda: not payload_threads())


def test_half_a_record_of_tls_holds_nothing_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, payload_threads: Callable[[], list[str]]
) -> None:
    monkeypatch.setenv("RPCDIST_TLS", "always")
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    opened(link, answers, taker)
    os.write(payload_sockets(link.session)[0].fileno(), HALF_A_RECORD)
    echo(link, answers, b"x")  # other messages pass
    link.session.close("enough")
    assert "enough" in taker.wait_closed()
    eventually(lambda: not payload_threads())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system's kernel cannot do that")
def test_a_peer_that_takes_nothing_is_lost_though_its_heart_beats() -> None:
    """A firewall that had forgotten the payload connections let every large call wait for its deadline, for ever."""
    nodes = Nodes(peer_timeout_s=10 * UNIT_S)  # long enough for a busy machine's heartbeats
    try:
        _, answers, taker, bare = hostile(nodes)
        send(taker.sessions[0], 1, LARGE * 8)
        assert "a payload connection with client broke" in taker.wait_closed()
        assert "a payload connection with client broke" in answers.wait_closed()
        bare.close()
    finally:
        nodes.close()


def test_strangers_learn_nothing(nodes: Nodes) -> None:
    (server, taker), answers = serve(nodes), Recorder()
    link = open_link(nodes.make("client"), server, handler=answers)
    echo(link, answers, b"x")
    stranger = nodes.make("client", token="another token, which is not that of the job")
    with pytest.raises(TransportError):
        payload_socket(stranger, server, payload_purpose(link.session.id, (0, 1))).close()
    assert num_open(taker.sessions[0]) == 0


def test_what_came_before_a_striped_message_is_handed_on_first(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one envelope: a reader of a payload connection may have the last bytes of the large one at any moment."""
    server, taker = serve(nodes, Recorder())
    open_link(nodes.make("client"), server, handler=Recorder())
    eventually(lambda: bool(taker.sessions))
    session, announce, before = taker.sessions[0], Session._announce, list[int]()
    assert session.striping is not None

    def note(session: Session, message: WireMessage) -> Delivery | None:
        before.append(len(taker.messages))
        return announce(session, message)

    monkeypatch.setattr(Session, "_announce", note)
    small, large = (rpc_pb2.Message(call=rpc_pb2.Call(id=id)) for id in (1, 2))
    large.transfer, large.large[:] = 7, [MIN_STRIPED_BYTES]
    server.io.run(receive_there(session, frame(small) + frame(large)), LIMIT_S)
    assert before == [1]


async def receive_there(session: Session, envelope: bytes) -> None:
    session.receive(envelope)
