"""The outcome for peers without the job token."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import rpc_victim_functions as functions
from chunk_envelopes import chunk_envelope
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from peer_timeouts import CALM_S
from rpc_raw_peer import (
    SESSION,
    STRANGER,
    answers_of,
    call_raw,
    connected,
    run_on_loop,
    status_of,
    unharmed,
)

from rpcdist import rpc
from rpcdist._proto import membership_pb2, rpc_pb2, rref_pb2, store_pb2, value_pb2
from rpcdist.errors import AuthenticationFailed, ConfigError, RpcdistError, WorldMismatch
from rpcdist.testing import RpcWorld, WorkerPool, eventually, free_port
from rpcdist.testing.worker_pool import join, leave
from rpcdist.transport._framing.frames import frame
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.keys import COUNTER_KEY, PROOF_KEY, SESSION_KEY

pytestmark = pytest.mark.multiproc

WRONG = Credentials(b"a wrong token, but long enough", "default", STRANGER)
DESCRIPTORS = [file.DESCRIPTOR for file in (membership_pb2, rpc_pb2, rref_pb2, store_pb2)]


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """These workers outlive everything that is done to them here."""
    world = module_pool.world("a", "b", url=f"tcp://127.0.0.1:{free_port()}", peer_timeout=CALM_S)
    yield world
    world.shutdown()


@pytest.fixture
def address(world: RpcWorld) -> Iterator[str]:
    with unharmed(world) as address:
        yield address


def every_method() -> dict[str, tuple[bool, bool]]:
    """The path of each method of our services: whether requests and replies are streams."""
    found = {}
    for descriptor in DESCRIPTORS:
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                found[path] = (method.client_streaming, method.server_streaming)
    return found


def test_every_method_needs_the_token(address: str) -> None:
    methods = every_method()
    assert len(methods) > 5 and SESSION in methods
    forged: list[Any] = [
        (),
        ((SESSION_KEY, b"x" * 16),),
        ((SESSION_KEY, b"x" * 16), (COUNTER_KEY, "1"), (PROOF_KEY, b"y" * 32)),
        ((SESSION_KEY, b""), (COUNTER_KEY, "-1"), (PROOF_KEY, b"")),
        ((SESSION_KEY, b"x" * 16), (COUNTER_KEY, "9" * 30), (PROOF_KEY, b"y" * 32)),
    ]

    async def run() -> None:
        async with connected(address) as channel:
            for path in methods:
                for metadata in forged:
                    for request in (b"", b"\xff\xff\xff", secrets.token_bytes(100)):
                        code, details = await call_raw(channel, path, request, metadata)
                        assert code is grpc.StatusCode.UNAUTHENTICATED, (path, metadata, request, code, details)
                        assert details
            code, _ = await call_raw(channel, "/rpcdist.Rpc/NoSuchMethod", b"")
            assert code is grpc.StatusCode.UNIMPLEMENTED

    run_on_loop(run())


def test_health_and_reflection_answer_everybody(address: str) -> None:
    async def run() -> tuple[int, set[str], list[bytes]]:
        async with connected(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

            async def ask(request: reflection_pb2.ServerReflectionRequest) -> Any:
                return await stub.ServerReflectionInfo(iter([request])).read()

            services = await ask(reflection_pb2.ServerReflectionRequest(list_services=""))
            found = await ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol="rpcdist.Rpc"))
            names = {service.name for service in services.list_services_response.service}
            return status, names, list(found.file_descriptor_response.file_descriptor_proto)

    status, services, files = run_on_loop(run())
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert {"rpcdist.Rpc", "rpcdist.RRef", "rpcdist.Membership", "grpc.health.v1.Health"} <= services
    assert any(name.startswith("grpc.reflection.") for name in services)
    assert any(b"Session" in file for file in files)


def test_random_bytes_are_ignored(address: str) -> None:
    host, port = address.rsplit(":", 1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    noises = [b"", b"\0" * 100, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", preface, preface + secrets.token_bytes(5000)]
    noises += [secrets.token_bytes(size) for size in (1, 100, 10_000, 1_000_000)]
    for noise in noises:
        with socket.create_connection((host, int(port)), timeout=10.0) as connection:
            with suppress(OSError):
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10.0)
                while connection.recv(65536):
                    pass


class Touch:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def deadly_messages(path: Path) -> list[rpc_pb2.Message]:
    """Calls and replies whose unpickling creates a folder."""
    body = pickle.dumps(Touch(path), 5)
    value = value_pb2.Value(encoding=value_pb2.Value.PICKLE, body=body)
    return [
        rpc_pb2.Message(call=rpc_pb2.Call(id=1, by_value=True, arguments=value)),
        rpc_pb2.Message(call=rpc_pb2.Call(id=2, function="builtins:print", arguments=value)),
        rpc_pb2.Message(reply=rpc_pb2.Reply(id=1, value=value)),
        rpc_pb2.Message(reply=rpc_pb2.Reply(id=1, failure=rpc_pb2.Failure(exception=value))),
        rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(id=1, value=value)),
    ]


def test_nothing_of_an_unproven_peer_is_unpickled(world: RpcWorld, address: str, tmp_path: Path) -> None:
    path = tmp_path / "unpickled"
    messages = deadly_messages(path)
    hello = ClientHandshake(WRONG.token, WRONG.job, "rpc", WRONG.identity).start()
    handshake = hello.SerializeToString()
    starts = [
        [b"".join(map(frame, messages))],
        [handshake + b"".join(map(frame, messages))],
        [handshake, b"".join(map(frame, messages))],
        [handshake, handshake],
        [chunk_envelope(1, 0, 0, memoryview(b"x" * 100))],
        [b"\x0a" + b"\xff" * 50],
        [b"x" * 100_000],
    ]

    async def run() -> None:
        async with connected(address) as channel:
            for envelopes in starts:

                async def session(envelopes: list[bytes] = envelopes) -> None:
                    call = channel.stream_stream(SESSION)()
                    for envelope in envelopes:
                        await call.write(envelope)
                    while await call.read() is not grpc.aio.EOF:
                        pass

                code, details = await status_of(session())
                assert code is grpc.StatusCode.UNAUTHENTICATED, (code, details)

    run_on_loop(run())
    assert world["b"].run(rpc.rpc_sync, "a", functions.pid) == world["a"].pid
    assert not path.exists()
    # The payload is deadly for those who may send it.
    answers_of(address, messages[:1])
    eventually(path.exists, "a proven peer's function is unpickled")


def test_a_half_open_handshake_is_dropped(module_pool: WorkerPool) -> None:
    world = module_pool.world("x")
    world["x"].run(functions.limit_handshakes, 0.5)
    host, port = world["x"].run(functions.address).rsplit(":", 1)

    async def run() -> None:
        async with connected(f"{host}:{port}") as channel:
            silent = channel.stream_stream(SESSION)()
            started = time.monotonic()
            half = channel.stream_stream(SESSION)()
            hello = ClientHandshake(WRONG.token, WRONG.job, "rpc", WRONG.identity).start()
            await half.write(hello.SerializeToString())
            assert b"" != await half.read()
            for call in (half, silent):
                code, details = await status_of(call.read())
                assert code is grpc.StatusCode.UNAUTHENTICATED and "handshake took longer than 0.5 s" in details
            assert time.monotonic() - started < 5.0

    run_on_loop(run())
    eventually(lambda: world["x"].run(functions.num_unproven) == 0, "the handshakes are forgotten")
    # There is a limit for those who are in the middle of it: half of it for each host. The oldest makes room.
    world["x"].run(functions.limit_handshakes, 10.0, 6)

    async def crowd() -> tuple[grpc.StatusCode, str]:
        async with connected(f"{host}:{port}") as channel:
            calls = []
            for _ in range(4):
                calls.append(call := channel.stream_stream(SESSION)())
                hello = ClientHandshake(WRONG.token, WRONG.job, "rpc", WRONG.identity).start()
                await call.write(hello.SerializeToString())
                await call.read()
            status = await status_of(calls[0].read())
            for call in calls[1:]:
                call.cancel()
            return status

    assert run_on_loop(crowd()) == (grpc.StatusCode.UNAVAILABLE, "too many handshakes at once; try again")
    eventually(lambda: world["x"].run(functions.num_unproven) == 0, "the handshakes are forgotten")
    world.shutdown()


# ---------------------------------------------------------------- wrong tokens


def test_a_different_token_fails_and_says_what_to_set(module_pool: WorkerPool) -> None:
    url = module_pool.new_url()
    coordinator = module_pool.start("a", {"RPCDIST_TOKEN": "one-token-for-some-of-them"})
    stranger = module_pool.start("b", {"RPCDIST_TOKEN": "another-token-for-the-rest"})
    waiting = coordinator.begin(join, "a", 0, 2, url, init_timeout=4.0)
    started = time.monotonic()
    error = stranger.begin(join, "b", 1, 2, url, init_timeout=60.0).error(AuthenticationFailed)
    assert time.monotonic() - started < 30.0  # it was told, and did not wait
    # With file:// the record of the coordinator's address is the first thing that its token signed.
    assert "the record" in str(error) and "RPCDIST_TOKEN" in str(error)
    assert "another-token" not in str(error)
    error = waiting.error(RpcdistError)
    assert "these ranks have not joined: 1" in str(error)
    assert "one-token" not in coordinator.output()


def test_the_token_of_the_options_counts(module_pool: WorkerPool) -> None:
    world = module_pool.new_world(2, token="a token of the options alone")
    joining = [world.begin_join(name, rank) for rank, name in enumerate("ab")]
    for pending in joining:
        pending.result()
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    world.shutdown()


def test_a_store_with_another_token(module_pool: WorkerPool, tmp_path: Path) -> None:
    """With tcp:// the store comes first."""
    url = f"tcp://127.0.0.1:{free_port()}"
    coordinator = module_pool.start("a", {"RPCDIST_TOKEN": "one-token-for-some-of-them"})
    stranger = module_pool.start("b", {"RPCDIST_TOKEN": "another-token-for-the-rest"})
    waiting = coordinator.begin(join, "a", 0, 2, url, init_timeout=4.0)
    error = stranger.begin(join, "b", 1, 2, url, init_timeout=4.0).error(RpcdistError)
    assert isinstance(error, AuthenticationFailed) and "RPCDIST_TOKEN" in str(error), repr(error)
    assert "these ranks have not joined: 1" in str(waiting.error(RpcdistError))


def test_the_token_of_the_options_counts_for_the_store(module_pool: WorkerPool) -> None:
    """With tcp:// a store is served and called before the options of RPC would be looked at."""
    url = f"tcp://127.0.0.1:{free_port()}"
    workers = [module_pool.start(name) for name in "ab"]
    joining = [
        worker.begin(join, worker.name, rank, 2, url, token="one of the options") for rank, worker in enumerate(workers)
    ]
    for pending in joining:
        pending.result()
    assert workers[0].run(rpc.rpc_sync, "b", functions.pid) == workers[1].pid
    leaving = [worker.begin(leave) for worker in workers]
    for pending in leaving:
        pending.result()


def test_world_sizes_that_differ_are_named_over_tcp(module_pool: WorkerPool) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    joining = [module_pool.start(name).begin(join, name, rank, 2 + rank, url) for rank, name in enumerate("ab")]
    for pending in joining:
        assert "the world sizes differ" in str(pending.error(WorldMismatch))


def test_a_bad_name_is_refused_before_anybody_is_waited_for(module_pool: WorkerPool) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    module_pool.start("a").begin(join, "not a name", 0, 2, url).error(ConfigError)
