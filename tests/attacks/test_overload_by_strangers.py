"""The cost of a stranger to a living worker: little, and not for long, however much it sends and however often it
connects.

While he goes on, peers with the token are let in, and the worker's loop and pool answer.
"""

from __future__ import annotations

import asyncio
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import pack

import grpc
import grpc.aio
import pytest
import rpc_victim_functions as functions
from full_sets import FULL
from peer_timeouts import CALM_S
from rpc_raw_peer import RawClient, connected, run_on_loop
from stall_detector import STALL_LIMIT_S, longest_stalls, start_stall_detector

from rpcdist import rpc
from rpcdist.testing import RpcWorld, Worker, WorkerPool, eventually, free_port
from rpcdist.transport._server.admission import MAX_UNPROVEN
from rpcdist.transport.addresses import split_address

pytestmark = pytest.mark.multiproc

MAX_COST_MIB = 64.0
NUM_CONNECTIONS = 1500
NUM_DESCRIPTORS = 1024
NUM_SENDERS = 20
SENT_BYTES = 4 << 20  # by each; a server that buffered it would take 80 MiB
NUM_JOINS = 5
JOIN_LIMIT_S = 60.0
MARGIN = 64  # descriptors of the worker's own doings meanwhile


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """Its workers may have as many descriptors as most systems give a process."""
    world = module_pool.new_world(2, f"tcp://127.0.0.1:{free_port()}", peer_timeout=CALM_S)
    joining = []
    for rank, name in enumerate("ab"):
        joining.append(world.begin_join(name, rank))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(world[name].pid, resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, hard))  # long before it listens
    for pending in joining:
        pending.result()
    yield world
    world.shutdown()


@pytest.fixture
def victim(world: RpcWorld) -> Iterator[Worker]:
    """Worker a. It must have answered throughout, and have as many descriptors as before."""
    victim = world["a"]
    join(victim)  # what is loaded for the first connection is no stranger's cost
    pid, before = world["b"].run(rpc.rpc_sync, "a", functions.pid), num_descriptors(victim)
    victim.run(start_stall_detector)
    yield victim
    eventually(lambda: num_descriptors(victim) <= before + 4, "the strangers' connections are closed")
    asked, stalls_s = victim.run(longest_stalls)
    assert asked > 0 and max(stalls_s.values()) < STALL_LIMIT_S, stalls_s
    assert world["b"].run(rpc.rpc_sync, "a", functions.pid) == pid
    assert "Traceback" not in victim.output(), victim.output()


@pytest.fixture
def stranger() -> Iterator[ExitStack]:
    """His connections, for which this process gets the descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as held:
        yield held
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def join(victim: Worker) -> None:
    """A session with the token, over gRPC and TLS; whom gRPC is too busy for tries again, as workers do."""

    async def attempt(address: str) -> None:
        async with asyncio.timeout(JOIN_LIMIT_S):
            while True:
                async with connected(address) as channel:
                    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                        await RawClient(channel).prove()
                        return

    run_on_loop(attempt(victim.run(functions.address)))


def num_descriptors(worker: Worker) -> int:
    return len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))


def resident_mib(worker: Worker) -> float:
    pages = Path(f"/proc/{worker.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize() / 2**20


def num_ended(connections: list[socket.socket]) -> int:
    """Connections that the other side has closed, or on which it has said why it will."""
    poller = select.poll()
    for connection in connections:
        poller.register(connection, select.POLLIN)
    return len(poller.poll(0))


def assert_cheap(victim: Worker, attack: Callable[[], list[socket.socket]], most_descriptors: int) -> None:
    """Attacks, lets peers with the token in beside that, and looks at what it costs.

    Args:
        victim: the worker that is attacked.
        attack: connects, and returns the connections; the cost counts once the victim has taken or ended each.
        most_descriptors: that the victim may hold.
    """
    mib, descriptors = resident_mib(victim), num_descriptors(victim)
    connections = attack()
    eventually(
        lambda: num_descriptors(victim) - descriptors + num_ended(connections) >= len(connections),
        "the strangers' connections are taken or ended",
    )
    for _ in range(NUM_JOINS):
        cost_mib, began = resident_mib(victim) - mib, time.monotonic()
        assert cost_mib < MAX_COST_MIB
        join(victim)
        print(f"{cost_mib:.0f} MiB, a newcomer is let in after {time.monotonic() - began:.2f} s")
    eventually(
        lambda: num_descriptors(victim) - descriptors <= most_descriptors + MARGIN, "those that are too many are closed"
    )


def connect(held: ExitStack, address: tuple[str, int], greeting: bytes, host: str = "") -> socket.socket:
    connection = held.enter_context(socket.create_connection(address, JOIN_LIMIT_S, (host, 0)))
    with suppress(OSError):  # closed already
        connection.sendall(greeting)
    return connection


def client_hello() -> tuple[bytes, ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """TLS from the side of somebody without a certificate, as far as the first message."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read(), tls, incoming, outgoing


SILENCES = {
    "nothing at all": b"",
    "half a handshake": client_hello()[0][:-1],
    "a length, and nothing of it": b"\x00\x10\x00\x00",
}


@pytest.mark.parametrize("silence", SILENCES if FULL else ["half a handshake"])
def test_silent_connections_to_grpc(victim: Worker, stranger: ExitStack, silence: str) -> None:
    address = split_address(victim.run(functions.address))

    def attack() -> list[socket.socket]:
        return [connect(stranger, address, SILENCES[silence]) for _ in range(NUM_CONNECTIONS)]

    assert_cheap(victim, attack, MAX_UNPROVEN)


def test_silent_connections_end_no_connection_that_has_made_a_call(victim: Worker, stranger: ExitStack) -> None:
    """Those that prove themselves over gRPC before the strangers come are there afterwards."""
    address = victim.run(functions.address)

    async def attempt() -> None:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            silent = [connect(stranger, split_address(address), SILENCES["half a handshake"]) for _ in range(600)]
            async with asyncio.timeout(JOIN_LIMIT_S):
                while num_ended(silent) < 600 - MAX_UNPROVEN:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # the kernel does not tell this loop
            await RawClient(channel).prove()  # on the same connection

    run_on_loop(attempt())


@pytest.mark.parametrize("silence", SILENCES if FULL else ["a length, and nothing of it"])
def test_silent_connections_to_the_raw_port(victim: Worker, stranger: ExitStack, silence: str) -> None:
    address = split_address(victim.run(functions.address))[0], victim.run(functions.raw_port)

    def attack() -> list[socket.socket]:
        return [connect(stranger, address, SILENCES[silence]) for _ in range(NUM_CONNECTIONS)]

    assert_cheap(victim, attack, MAX_UNPROVEN)


@pytest.mark.parametrize("num_bytes", [31_000, 127_000] if FULL else [31_000])
def test_long_greetings_to_the_raw_port(victim: Worker, stranger: ExitStack, num_bytes: int) -> None:
    """OpenSSL keeps a first message of up to 128 KiB, and the buffer into which it was read took as much: 110 MiB."""
    address = split_address(victim.run(functions.address))[0], victim.run(functions.raw_port)
    message = b"\x01" + (130_000).to_bytes(3, "big") + bytes(num_bytes)
    records = (message[at : at + (1 << 14)] for at in range(0, len(message), 1 << 14))
    greeting = b"".join(b"\x16\x03\x01" + pack("!H", len(record)) + record for record in records)

    def attack() -> list[socket.socket]:
        hosts = [f"127.0.0.{1 + number % 2}" for number in range(MAX_UNPROVEN)]
        return [connect(stranger, address, greeting, host) for host in hosts]

    assert_cheap(victim, attack, MAX_UNPROVEN)


def flood(connection: socket.socket, block: bytes) -> None:
    connection.settimeout(1.0)  # who reads nothing takes nothing
    with suppress(OSError):
        for _ in range(SENT_BYTES // len(block)):
            connection.sendall(block)


BLOCKS = {
    "zeros": bytes(1 << 16),
    "records of a handshake": (b"\x16\x03\x01\x40\x00" + bytes(1 << 14)) * 4,
    "a message that does not end": b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + bytes((1 << 14) - 4),
}


@pytest.mark.parametrize("port", ["grpc", "raw"])
@pytest.mark.parametrize("block", BLOCKS if FULL else ["records of a handshake"])
def test_bytes_from_many_connections(victim: Worker, stranger: ExitStack, port: str, block: str) -> None:
    address = split_address(victim.run(functions.address))
    if port == "raw":
        address = address[0], victim.run(functions.raw_port)

    def attack() -> list[socket.socket]:
        connections = [connect(stranger, address, b"") for _ in range(NUM_SENDERS)]
        for connection in connections:
            flood(connection, BLOCKS[block])
        return connections

    assert_cheap(victim, attack, NUM_SENDERS)


def test_bytes_after_a_handshake_without_certificate(victim: Worker, stranger: ExitStack) -> None:
    """In TLS 1.3 a client is done, and may send, before the server has found out that it shows nothing."""
    address = split_address(victim.run(functions.address))

    def attack() -> list[socket.socket]:
        connections = []
        for _ in range(NUM_SENDERS):
            hello, tls, incoming, outgoing = client_hello()
            connection = connect(stranger, address, hello)
            connections.append(connection)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    got = connection.recv(1 << 16)
                    assert got, "the server ended the handshake before it was asked for a certificate"
                    incoming.write(got)
            tls.write(bytes(1 << 18))
            flood(connection, outgoing.read())
        return connections

    assert_cheap(victim, attack, NUM_SENDERS)
