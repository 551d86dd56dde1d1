"""A stranger without the token passes a handshake on between two victims, from every kind of socket to every kind.

He holds sockets on which the victims' own processes called `listen()` and `connect()`, as a launcher or a fork server
in the same process may: `SO_PEERCRED` names the victims on both. gRPC is tried in test_tls_strangers.py.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from transport_nodes import LIMIT_S, Nodes, Recorder, kind_of, open_link

from rpcdist._proto import rpc_pb2
from rpcdist.errors import TransportError
from rpcdist.testing import free_port
from rpcdist.transport import Node, connector
from rpcdist.transport._channels.stream_sockets import connect_tcp, listen_tcp
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.sockets import SocketHub
from rpcdist.transport.unix_sockets import has_abstract_sockets, local_name

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not has_abstract_sockets(), reason="there are no abstract sockets"),
]

SECRET = b"a payload that nobody else should read"

RELAY = """
import socket, sys, threading
listener, server = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
for end in (listener, server):
    end.settimeout(30)
victim, heard = listener.accept()[0], open(sys.argv[3], "wb", buffering=0)
victim.settimeout(30)
def pass_on(here, there):
    try:
        while data := here.recv(65536):
            heard.write(data)
            there.sendall(data)
    except OSError:
        pass
    there.shutdown(socket.SHUT_WR)
threads = [threading.Thread(target=pass_on, args=ends, daemon=True) for ends in ((victim, server), (server, victim))]
[thread.start() for thread in threads]
threads[1].join(30)
print("the server hung up", flush=True)
"""


@pytest.fixture
def hub(nodes: Nodes) -> Iterator[SocketHub]:
    """Of the server, which other Unix sockets lead to as well."""
    hub = SocketHub(nodes.make("server"))
    hub.open("127.0.0.1")
    yield hub
    hub.close()


@contextmanager
def relayed(listener: socket.socket, hub: SocketHub, to_unix: bool, heard: Path) -> Iterator[None]:
    """The listener leads, through a process of a stranger, to the process of the hub, which connects itself."""
    address = HubAddress.parse(hub.address)
    onward = socket.socket(socket.AF_UNIX) if to_unix else socket.create_connection((address.host, address.port))
    with onward:
        if to_unix:
            onward.connect("\0" + address.unix_name)
        descriptors = [listener.fileno(), onward.fileno()]
        command = [sys.executable, "-c", RELAY, *map(str, descriptors), str(heard)]
        stranger = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE, text=True)
    listener.close()
    with stranger:
        try:
            yield
            assert stranger.stdout is not None and stranger.stdout.readline() == "the server hung up\n"
        finally:
            stranger.kill()


def listening(unix_name: str | None) -> socket.socket:
    """Where victims come to; this process, which is one of them, calls `listen()`."""
    if unix_name is None:
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + unix_name)
    listener.listen()
    return listener


@pytest.mark.parametrize("to_unix", [True, False], ids=["to unix", "to tcp"])
@pytest.mark.parametrize("from_unix", [True, False], ids=["from unix", "from tcp"])
def test_a_session_is_not_relayed(
    nodes: Nodes,
    hub: SocketHub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    from_unix: bool,
    to_unix: bool,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RPCDIST_CHANNELS", "local" if from_unix else "tcp")
    server, answers, port, heard = hub._node, Recorder(), free_port(), tmp_path / "heard"
    assert isinstance(server, Node)
    listener = listening(local_name(f"127.0.0.1:{port}") if from_unix else None)
    place = listener.getsockname()

    async def connect(host: str, wanted: int) -> socket.socket:
        return await connect_tcp(*place)

    with relayed(listener, hub, to_unix, heard):
        server.serve("127.0.0.1", port)
        server.handle_role("echo", Recorder(echo=True))
        with monkeypatch.context() as patch:
            if not from_unix:
                patch.setattr(connector, "connect_tcp", connect)
            link = open_link(nodes.make("client"), server, handler=answers)
        link.session.send(rpc_pb2.Message(call=rpc_pb2.Call(id=1, function=SECRET.decode())))
        answers.wait()
        assert kind_of(link) == "grpc" and len(server.sessions) == 1
    assert "relays it" in caplog.text
    assert heard.read_bytes() and SECRET not in heard.read_bytes()


@pytest.mark.parametrize("to_unix", [True, False], ids=["to unix", "to tcp"])
@pytest.mark.parametrize("from_unix", [True, False], ids=["from unix", "from tcp"])
def test_a_socket_of_the_collectives_is_not_relayed(
    nodes: Nodes, hub: SocketHub, tmp_path: Path, from_unix: bool, to_unix: bool
) -> None:
    other, heard = SocketHub(nodes.make("client")), tmp_path / "heard"
    other.open("127.0.0.1")
    listener = listening("the name of somebody who has ended" if from_unix else None)
    address = HubAddress.parse(hub.address)
    if from_unix:
        address = replace(address, unix_name="the name of somebody who has ended")
    else:
        address = replace(address, port=listener.getsockname()[1])
    with relayed(listener, hub, to_unix, heard):
        with pytest.raises(TransportError, match="relays it"):
            other.connect(str(address), "data", LIMIT_S, unix=from_unix)
    other.close()
    assert heard.read_bytes()


def test_a_port_has_one_owner_while_connections_through_it_last() -> None:
    """Else the earlier owner could pass on what he has accepted, and both ends would name the same port."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        place = earlier.getsockname()
        victim = socket.create_connection(place)
        accepted = earlier.accept()[0]
    with victim, accepted, pytest.raises(OSError):
        listen_tcp(*place)
