"""What peers without the job token get, and what those with it get when they break the protocol."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
import rpc_victim_functions as functions
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from leak_guard import LeakGuard
from rpc_victims import CALM_S, UNIT_S, Victims, World, forkserver_pid, join, until

from rpcdist import rpc
from rpcdist._proto import handshake_pb2, membership_pb2, rpc_pb2, rref_pb2, store_pb2, value_pb2
from rpcdist.errors import AuthenticationFailed, RpcdistError
from rpcdist.ids import Identity
from rpcdist.transport._frames import frame, piece_envelope
from rpcdist.transport._grpc import CHANNEL_OPTIONS
from rpcdist.transport.handshake import ClientHandshake, SessionKeys, request_proof
from rpcdist.transport.link import COUNTER_KEY, PROOF_KEY, SESSION_KEY

pytestmark = pytest.mark.multiproc

SESSION = "/rpcdist.Rpc/Session"
DESCRIPTORS = [file.DESCRIPTOR for file in (membership_pb2, rpc_pb2, rref_pb2, store_pb2)]
T = TypeVar("T")
STRANGER = Identity("stranger", 77, 12345)


_runner: list[asyncio.Runner] = []


@pytest.fixture(scope="module", autouse=True)
def one_loop() -> Iterator[None]:
    """gRPC's poller keeps the loop that it has seen first; a test that closes it makes noise in the next one."""
    with asyncio.Runner() as runner:
        _runner.append(runner)
        yield
        _runner.clear()


def run_on_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    return _runner[0].run(coroutine)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def victims(leak_guard: LeakGuard) -> Iterator[Victims]:
    leak_guard.exempt_child(forkserver_pid())
    with Victims() as victims:
        yield victims


@pytest.fixture(scope="module")
def world(victims: Victims) -> Iterator[World]:
    """These workers outlive everything that is done to them here."""
    world = victims.world("a", "b", url=f"tcp://127.0.0.1:{free_port()}", peer_timeout=CALM_S)
    yield world
    world.shutdown()


@pytest.fixture
def address(world: World) -> Iterator[str]:
    """Where worker a listens. It and its connection to the other worker come out of each test as they went in."""
    before = world["a"].run(functions.connection_to, "b"), world["b"].run(functions.connection_to, "a")
    yield world["a"].run(functions.address)
    assert (world["a"].run(functions.connection_to, "b"), world["b"].run(functions.connection_to, "a")) == before
    assert world["b"].run(rpc.rpc_sync, "a", functions.pid) == world["a"].pid
    until(lambda: world["a"].run(functions.num_unproven) == 0, "no handshake is open")
    assert "Traceback" not in world["a"].log(), world["a"].log()


# ---------------------------------------------------------------- without the token


def connected(address: str) -> Any:
    """A channel for bytes; grpc's types know only those of messages."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def every_method() -> dict[str, tuple[bool, bool]]:
    """The path of each method of our services: whether requests and replies are streams."""
    found = {}
    for descriptor in DESCRIPTORS:
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                found[path] = (method.client_streaming, method.server_streaming)
    return found


async def status_of(awaitable: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    try:
        result = await asyncio.wait_for(awaitable, 20.0)
    except grpc.aio.AioRpcError as exc:
        return exc.code(), exc.details() or ""
    return grpc.StatusCode.OK, repr(result)


async def call_raw(channel: Any, path: str, request: bytes, metadata: Any = ()) -> tuple[Any, str]:
    if path == SESSION:

        async def session() -> object:
            call = channel.stream_stream(path)(metadata=metadata)
            await call.write(request)
            while (reply := await call.read()) is not grpc.aio.EOF:
                pass
            return reply

        return await status_of(session())
    return await status_of(channel.unary_unary(path)(request, metadata=metadata))


def test_every_method_needs_the_token(address: str) -> None:
    methods = every_method()
    assert len(methods) > 15 and SESSION in methods
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
        rpc_pb2.Message(call=rpc_pb2.Call(id=1, function_pickle=body)),
        rpc_pb2.Message(call=rpc_pb2.Call(id=2, function="builtins:print", arguments=value)),
        rpc_pb2.Message(reply=rpc_pb2.Reply(id=1, value=value)),
        rpc_pb2.Message(reply=rpc_pb2.Reply(id=1, failure=rpc_pb2.Failure(exception=value))),
        rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(id=1, value=value)),
    ]


def test_nothing_of_an_unproven_peer_is_unpickled(world: World, address: str, tmp_path: Path) -> None:
    path = tmp_path / "unpickled"
    messages = deadly_messages(path)
    hello = ClientHandshake(b"a wrong token, but long enough", "default", "rpc", STRANGER).start()
    handshake = rpc_pb2.Envelope(handshake=hello).SerializeToString()
    starts = [
        [rpc_pb2.Envelope(messages=messages).SerializeToString()],
        [rpc_pb2.Envelope(messages=messages, handshake=hello).SerializeToString()],
        [handshake, rpc_pb2.Envelope(messages=messages).SerializeToString()],
        [handshake, handshake],
        [piece_envelope(1, 0, 0, memoryview(b"x" * 100))],
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
    call_of_proven_peer(world, address, messages[:1])
    until(path.exists, "a proven peer's function is unpickled")


def test_a_half_open_handshake_is_dropped(victims: Victims) -> None:
    world = victims.world("x")
    world["x"].run(functions.limit_handshakes, 0.5)
    host, port = world["x"].run(functions.address).rsplit(":", 1)

    async def run() -> None:
        async with connected(f"{host}:{port}") as channel:
            silent = channel.stream_stream(SESSION)()
            started = time.monotonic()
            half = channel.stream_stream(SESSION)()
            hello = ClientHandshake(b"a wrong token, but long enough", "default", "rpc", STRANGER).start()
            await half.write(rpc_pb2.Envelope(handshake=hello).SerializeToString())
            assert b"" != await half.read()
            for call in (half, silent):
                code, details = await status_of(call.read())
                assert code is grpc.StatusCode.UNAUTHENTICATED and "handshake took longer than 0.5 s" in details
            assert time.monotonic() - started < 5.0

    run_on_loop(run())
    until(lambda: world["x"].run(functions.num_unproven) == 0, "the handshakes are forgotten")
    # There is a limit for those who are in the middle of it, and it is free again afterwards.
    world["x"].run(functions.limit_handshakes, 10.0, 3)

    async def crowd() -> grpc.StatusCode:
        async with connected(f"{host}:{port}") as channel:
            calls = [channel.stream_stream(SESSION)() for _ in range(3)]
            hello = ClientHandshake(b"a wrong token, but long enough", "default", "rpc", STRANGER).start()
            for call in calls:
                await call.write(rpc_pb2.Envelope(handshake=hello).SerializeToString())
                await call.read()
            code, _ = await status_of(channel.stream_stream(SESSION)().read())
            for call in calls:
                call.cancel()
            return code

    assert run_on_loop(crowd()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    until(lambda: world["x"].run(functions.num_unproven) == 0, "the handshakes are forgotten")
    world.shutdown()


# ---------------------------------------------------------------- wrong tokens


def test_different_tokens_fail_on_both_sides_and_say_what_to_set(victims: Victims) -> None:
    url = victims.url()
    coordinator = victims.start("a", {"RPCDIST_TOKEN": "one-token-for-some-of-them"})
    stranger = victims.start("b", {"RPCDIST_TOKEN": "another-token-for-the-rest"})
    waiting = coordinator.begin(join, "a", 0, 2, url, rpc_timeout=4.0)
    started = time.monotonic()
    error = stranger.begin(join, "b", 1, 2, url, rpc_timeout=4.0).error(AuthenticationFailed)
    assert time.monotonic() - started < 3.0
    assert "did not prove the job token" in str(error) and "RPCDIST_TOKEN" in str(error)
    assert "another-token" not in str(error)
    error = waiting.error(RpcdistError)
    assert "these ranks have not come: 1" in str(error)
    assert "job tokens differ" in coordinator.log() and "RPCDIST_TOKEN" in coordinator.log()
    assert "one-token" not in coordinator.log()


def test_the_token_of_the_options_counts(victims: Victims) -> None:
    world = victims.new_world(2, token="x" * 32)
    joining = [world.begin_join(name, rank) for rank, name in enumerate("ab")]
    for pending in joining:
        pending.result()
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    world.shutdown()


def test_a_store_with_another_token(victims: Victims, tmp_path: Path) -> None:
    """With tcp:// the store comes first."""
    url = f"tcp://127.0.0.1:{free_port()}"
    coordinator = victims.start("a", {"RPCDIST_TOKEN": "one-token-for-some-of-them"})
    stranger = victims.start("b", {"RPCDIST_TOKEN": "another-token-for-the-rest"})
    waiting = coordinator.begin(join, "a", 0, 2, url, rpc_timeout=4.0)
    error = stranger.begin(join, "b", 1, 2, url, rpc_timeout=4.0).error(RpcdistError)
    assert isinstance(error, AuthenticationFailed) and "RPCDIST_TOKEN" in str(error), repr(error)
    waiting.error(RpcdistError)


# ---------------------------------------------------------------- proven peers that break the protocol


class RawClient:
    """A hand-written peer that holds the token."""

    def __init__(self, channel: Any, role: str = "rpc", identity: Identity = STRANGER) -> None:
        self.call = channel.stream_stream(SESSION)()
        token = os.environ["RPCDIST_TOKEN"].encode()
        self._handshake = ClientHandshake(token, "default", role, identity)

    async def prove(self) -> SessionKeys:
        await self._send(self._handshake.start())
        while not self._handshake.done:
            reply = self._handshake.receive(rpc_pb2.Envelope.FromString(await self.call.read()).handshake)
            if reply is not None:
                await self._send(reply)
            self._handshake.check()
        return self._handshake.session

    async def _send(self, step: handshake_pb2.Handshake) -> None:
        await self.call.write(rpc_pb2.Envelope(handshake=step).SerializeToString())

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """How the server ended the session."""

        async def read() -> None:
            while await self.call.read() is not grpc.aio.EOF:
                pass

        return await status_of(read())


def end_of_session(address: str, envelopes: list[bytes], role: str = "rpc") -> tuple[grpc.StatusCode, str]:
    async def run() -> tuple[grpc.StatusCode, str]:
        async with connected(address) as channel:
            client = RawClient(channel, role)
            await client.prove()
            for envelope in envelopes:
                await client.call.write(envelope)
            return await client.end()

    return run_on_loop(run())


def call_of_proven_peer(world: World, address: str, messages: list[rpc_pb2.Message]) -> list[rpc_pb2.Message]:
    """What a worker answers to messages of a peer with the token."""

    async def run() -> list[rpc_pb2.Message]:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            await client.call.write(b"".join(map(frame, messages)))
            got: list[rpc_pb2.Message] = []
            async with asyncio.timeout(20.0):
                while len(got) < len(messages):
                    envelope = rpc_pb2.Envelope.FromString(await client.call.read())
                    got += [message for message in envelope.messages if not message.HasField("heartbeat")]
            client.call.cancel()
            return got

    return run_on_loop(run())


BIG = rpc_pb2.Message(call=rpc_pb2.Call(id=1, function="builtins:print"), transfer=1, large=[1000])
VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "more than announced": (
        [frame(BIG), piece_envelope(1, 0, 0, memoryview(b"x" * 1001))],
        "a piece of 1001 bytes at 0",
    ),
    "more than announced, in pieces": (
        [frame(BIG), *(piece_envelope(1, 0, at, memoryview(b"x" * 300)) for at in (0, 300, 600, 900))],
        "a piece of 300 bytes at 900",
    ),
    "a piece at the wrong place": ([frame(BIG), piece_envelope(1, 0, 5, memoryview(b"x"))], "a piece of 1 bytes at 5"),
    "a buffer that was not announced": ([frame(BIG), piece_envelope(1, 3, 0, memoryview(b"x"))], "buffer 3 of 1"),
    "announced twice": ([frame(BIG), frame(BIG)], "transfer 1 was announced twice"),
    "more than there is memory": (
        [frame(rpc_pb2.Message(call=rpc_pb2.Call(id=1), transfer=1, large=[1 << 62]))],
        "no memory for 4611686018427387904 announced bytes",
    ),
    "no envelope": ([b"\x0a\xff\xff\xff\xff\xff"], "that are no envelope"),
    "a second handshake": (
        [rpc_pb2.Envelope(handshake=handshake_pb2.Handshake(hello=handshake_pb2.Hello())).SerializeToString()],
        "a handshake message arrived after the handshake was finished",
    ),
    "control messages out of order": (
        [frame(rpc_pb2.Message(control_seq=7, rref=rref_pb2.RRefMessage(fork_request=rref_pb2.ForkRequest())))],
        "control message 7 arrived after 0",
    ),
    "a control message without content": ([frame(rpc_pb2.Message(control_seq=1, rref=rref_pb2.RRefMessage()))], ""),
    "an item of a stream that is none": (
        [frame(rpc_pb2.Message(wrapped=True, transfer=1, large=[3])), piece_envelope(1, 0, 0, memoryview(b"\xff" * 3))],
        "a wrapped message cannot be parsed",
    ),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_ends_its_session_with_a_named_error(address: str, what: str) -> None:
    envelopes, says = VIOLATIONS[what]
    code, details = end_of_session(address, envelopes)
    assert code is grpc.StatusCode.ABORTED and says in details, (code, details)


def test_messages_that_make_no_sense_harm_nobody(world: World, address: str) -> None:
    odd = [
        rpc_pb2.Message(),
        rpc_pb2.Message(reply=rpc_pb2.Reply(id=12345)),
        rpc_pb2.Message(cancel=rpc_pb2.Cancel(id=12345)),
        rpc_pb2.Message(stream_item=rpc_pb2.StreamItem(id=12345)),
        rpc_pb2.Message(stream_end=rpc_pb2.StreamEnd(id=12345)),
        rpc_pb2.Message(stream_credit=rpc_pb2.StreamCredit(id=12345, items=1)),
        rpc_pb2.Message(ack=rpc_pb2.Ack(control_seq=12345)),
        rpc_pb2.Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=12345)),
    ]
    calls = [
        rpc_pb2.Call(id=1),
        rpc_pb2.Call(id=2, function=""),
        rpc_pb2.Call(id=3, function="no colon"),
        rpc_pb2.Call(id=4, function="os:no_such_function"),
        rpc_pb2.Call(id=5, function=":"),
        rpc_pb2.Call(id=6, function_pickle=b"no pickle"),
        rpc_pb2.Call(id=7, function="os:getpid", arguments=value_pb2.Value(body=b"no value")),
        rpc_pb2.Call(
            id=8, function="os:getpid", arguments=value_pb2.Value(encoding=value_pb2.Value.PICKLE, body=b"no pickle")
        ),
        rpc_pb2.Call(id=9, function="os:getpid", arguments=value_pb2.Value(body_buffer=9)),
        rpc_pb2.Call(id=10, fetch=rpc_pb2.RRefFetch()),
    ]
    messages = [rpc_pb2.Message(call=call) for call in calls]

    async def run() -> dict[int, rpc_pb2.Reply]:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            await client.call.write(b"".join(map(frame, [*odd, *messages])))
            got: dict[int, rpc_pb2.Reply] = {}
            with suppress(TimeoutError):
                async with asyncio.timeout(3.0):
                    while len(got) < len(calls):
                        envelope = rpc_pb2.Envelope.FromString(await client.call.read())
                        got.update({m.reply.id: m.reply for m in envelope.messages if m.HasField("reply")})
            client.call.cancel()
            return got

    got = run_on_loop(run())
    assert sorted(got) == list(range(1, 11))
    assert all(reply.HasField("failure") and reply.failure.text for reply in got.values()), got


def test_a_role_that_nobody_serves(address: str) -> None:
    code, details = end_of_session(address, [frame(rpc_pb2.Message(call=rpc_pb2.Call(id=1)))], role="nonsense")
    assert code is grpc.StatusCode.ABORTED and "unexpected message" in details, (code, details)


def test_a_proof_is_good_for_one_request(address: str) -> None:
    path = "/rpcdist.Membership/Members"
    other = "/rpcdist.Membership/Join"

    async def run() -> None:
        async with connected(address) as channel:
            client = RawClient(channel, role="membership")
            keys = await client.prove()

            def proof(path: str, counter: int, key: bytes = keys.key) -> Any:
                signed = request_proof(key, path, counter)
                return (SESSION_KEY, keys.session_id), (COUNTER_KEY, str(counter)), (PROOF_KEY, signed)

            assert (await call_raw(channel, path, b"", proof(path, 1)))[0] is grpc.StatusCode.OK
            refused = [
                proof(path, 1),  # again
                proof(other, 2),  # of another method
                proof(path, 3, b"k" * 32),  # with another key
                (*proof(path, 4)[:2], (PROOF_KEY, b"")),
                (proof(path, 5)[0], (COUNTER_KEY, "6"), proof(path, 5)[2]),  # with another number
            ]
            for metadata in refused:
                code, details = await call_raw(channel, path, b"", metadata)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (metadata, code, details)
            assert (await call_raw(channel, path, b"", proof(path, 5)))[0] is grpc.StatusCode.OK
            code, _ = await call_raw(channel, path, b"\xff\xff", proof(path, 7))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            client.call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await client.call.read()
            for counter in range(8, 200):  # the session is over, and its proofs with it
                code, _ = await call_raw(channel, path, b"", proof(path, counter))
                if code is grpc.StatusCode.UNAUTHENTICATED:
                    break
            assert code is grpc.StatusCode.UNAUTHENTICATED

    run_on_loop(run())


def test_a_worker_cannot_be_taken_out_by_another(world: World, address: str) -> None:
    path = "/rpcdist.Membership/Leave"

    async def run() -> tuple[grpc.StatusCode, str]:
        async with connected(address) as channel:
            client = RawClient(channel, role="membership")
            keys = await client.prove()
            members = "/rpcdist.Membership/Members"
            metadata = (
                (SESSION_KEY, keys.session_id),
                (COUNTER_KEY, "1"),
                (PROOF_KEY, request_proof(keys.key, members, 1)),
            )
            reply = membership_pb2.JoinReply.FromString(await channel.unary_unary(members)(b"", metadata=metadata))
            request = membership_pb2.LeaveRequest(identity=reply.members[1].identity).SerializeToString()
            metadata = (
                (SESSION_KEY, keys.session_id),
                (COUNTER_KEY, "2"),
                (PROOF_KEY, request_proof(keys.key, path, 2)),
            )
            outcome = await call_raw(channel, path, request, metadata)
            client.call.cancel()
            return outcome

    code, details = run_on_loop(run())
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "only its own process may" in details


def test_the_same_token_but_another_process_at_the_address(victims: Victims) -> None:
    """A port that was given to somebody else is noticed by the handshake, not by wrong results."""
    world = victims.world("a", "b", peer_timeout=UNIT_S)
    _, port = world["b"].run(functions.address).rsplit(":", 1)
    world["b"].kill()
    other = victims.world("c", port=int(port))
    kind, text, _ = world["a"].run(functions.error_of, rpc.rpc_sync, "b", functions.pid)
    assert kind == "WorkerLost" and "'c'" in text and "answers at the address of" in text
    other.shutdown()
