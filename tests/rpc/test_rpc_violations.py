"""The outcome for peers that have the job token and break the protocol, or are not the worker that they claim to be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
import rpc_victim_functions as functions
from chunk_envelopes import chunk_envelope, messages_of
from peer_timeouts import CALM_S
from rpc_raw_peer import (
    RawClient,
    call_raw,
    connected,
    end_of_session,
    run_on_loop,
    unharmed,
)

from rpcdist import rpc
from rpcdist._proto import autograd_pb2, handshake_pb2, membership_pb2, rpc_pb2, rref_pb2, value_pb2
from rpcdist.testing import RpcWorld, WorkerPool, eventually, free_port
from rpcdist.testing.worker_pool import join, leave
from rpcdist.time_limits import REFUSED_GRACE_S
from rpcdist.transport._framing.frames import call_frame, frame, reply_frame
from rpcdist.transport.keys import COUNTER_KEY, PROOF_KEY, SESSION_KEY, request_proof
from rpcdist.transport.wire_messages import CallMessage, Loan, ReplyMessage

pytestmark = pytest.mark.multiproc


BIG = rpc_pb2.Message(call=rpc_pb2.Call(id=1, function="builtins:print"), transfer=1, large=[1000])
LENT = ReplyMessage(1)
LENT.transfer, LENT.large, LENT.loans = 1, [100_000], [Loan(0, 7)]
MANY_ENDS = autograd_pb2.AutogradMessage(context=1, release=autograd_pb2.ContextRelease(others=[1] * 257))
VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "the ends of too many contexts": ([frame(rpc_pb2.Message(autograd=MANY_ENDS))], "the end of 257 contexts"),
    "more than announced": (
        [frame(BIG), chunk_envelope(1, 0, 0, memoryview(b"x" * 1001))],
        "a chunk of 1001 bytes arrived at offset 0",
    ),
    "more than announced, in chunks": (
        [frame(BIG), *(chunk_envelope(1, 0, at, memoryview(b"x" * 300)) for at in (0, 300, 600, 900))],
        "a chunk of 300 bytes arrived at offset 900",
    ),
    "a chunk at the wrong place": (
        [frame(BIG), chunk_envelope(1, 0, 5, memoryview(b"x"))],
        "a chunk of 1 bytes arrived at offset 5",
    ),
    "a buffer that was not announced": ([frame(BIG), chunk_envelope(1, 3, 0, memoryview(b"x"))], "buffer 3 of 1"),
    "announced twice": ([frame(BIG), frame(BIG)], "transfer 1 was announced twice"),
    "no envelope": ([b"\x0a\xff\xff\xff\xff\xff"], "that are not an envelope"),
    "a second handshake": (
        [handshake_pb2.Handshake(hello=handshake_pb2.Hello()).SerializeToString()],
        "that are not an envelope",
    ),
    "a function that has no name": (
        [bytes(call_frame(CallMessage(1, ""), 3))],
        "function 3 arrived; the peer has named 0",
    ),
    "functions out of order": (
        [bytes(call_frame(CallMessage(1, "m:f"), 2, b"m:f"))],
        "number 2 was given a name after 0",
    ),
    "a reply that lends memory": ([reply_frame(LENT)], "refers to lent memory on a channel that cannot lend"),
    "control messages out of order": (
        [
            frame(rpc_pb2.Message(control_seq=number, rref=rref_pb2.RRefMessage(fork_request=rref_pb2.ForkRequest())))
            for number in (1, 7)
        ],
        "control message 7 arrived after 1",
    ),
    "a control message without content": ([frame(rpc_pb2.Message(control_seq=2, rref=rref_pb2.RRefMessage()))], ""),
    "an item of a stream that is none": (
        [frame(rpc_pb2.Message(wrapped=True, transfer=1, large=[3])), chunk_envelope(1, 0, 0, memoryview(b"\xff" * 3))],
        "a wrapped message cannot be parsed",
    ),
}


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


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_ends_its_session_with_a_named_error(address: str, what: str) -> None:
    envelopes, says = VIOLATIONS[what]
    code, details = end_of_session(address, envelopes)
    assert code is grpc.StatusCode.ABORTED and says in details, (code, details)


def test_messages_that_make_no_sense_harm_nobody(world: RpcWorld, address: str) -> None:
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
        rpc_pb2.Call(id=6, by_value=True),
        rpc_pb2.Call(
            id=15, by_value=True, arguments=value_pb2.Value(encoding=value_pb2.Value.PICKLE, body=b"no pickle")
        ),
        rpc_pb2.Call(id=16, by_value=True, arguments=value_pb2.Value(body=b"\x01")),
        rpc_pb2.Call(id=7, function="os:getpid", arguments=value_pb2.Value(body=b"no value")),
        rpc_pb2.Call(
            id=8, function="os:getpid", arguments=value_pb2.Value(encoding=value_pb2.Value.PICKLE, body=b"no pickle")
        ),
        rpc_pb2.Call(id=9, function="os:getpid", arguments=value_pb2.Value(body_buffer=9)),
        rpc_pb2.Call(id=10, fetch=rpc_pb2.RRefFetch()),
    ]
    messages = [rpc_pb2.Message(call=call) for call in calls]
    compact = [
        call_frame(CallMessage(11, "os:no_such_function"), 1, b"os:no_such_function"),
        call_frame(CallMessage(12, "os:getpid", body=b"no value"), 2, b"os:getpid"),
        call_frame(CallMessage(13, "os:getpid", body=b"\x01", num_tensors=9), 2),
        call_frame(CallMessage(14, "", target=(0, 0, 0, 0, 0, 0)), 0),
        reply_frame(ReplyMessage(12345, b"\x01")),
        reply_frame(ReplyMessage(12345, created=True)),
    ]

    async def run() -> dict[int, ReplyMessage]:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            await client.call.write(b"".join([*map(frame, [*odd, *messages]), *compact]))
            got: dict[int, ReplyMessage] = {}
            with suppress(TimeoutError):
                async with asyncio.timeout(20.0):
                    while len(got) < 16:
                        found = messages_of(await client.call.read())
                        got.update({m.id: m for m in found if isinstance(m, ReplyMessage)})
            client.call.cancel()
            return got

    got = run_on_loop(run())
    assert sorted(got) == list(range(1, 17))
    assert all(reply.failure is not None and reply.failure.text for reply in got.values()), got


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


def test_a_worker_cannot_be_taken_out_by_another(world: RpcWorld, address: str) -> None:
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
            other = membership_pb2.MemberList.FromString(reply.members).members[1]
            request = membership_pb2.LeaveRequest(identity=other.identity).SerializeToString()
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


def test_the_same_token_but_another_process_at_the_address(module_pool: WorkerPool) -> None:
    """A port that was given to somebody else is noticed by the handshake, not by wrong results."""
    world = module_pool.world("a", "b", peer_timeout=CALM_S)  # so much time the other one has to listen
    _, port = world["b"].run(functions.address).rsplit(":", 1)
    other = module_pool.start("c")
    other.run(functions.pid)  # it has imported all
    world["a"].run(functions.set_refused_grace, CALM_S)
    world["b"].kill()
    other.run(join, "c", 0, 1, module_pool.new_url(), port=int(port))
    kind, text, _ = world["a"].run(functions.error_of, rpc.rpc_sync, "b", functions.pid)
    world["a"].run(functions.set_refused_grace, REFUSED_GRACE_S)
    assert kind == "WorkerLost" and "'c'" in text and "answers at the address of" in text
    other.run(leave)


def test_memory_of_gpus_lent_by_who_is_no_worker_stops_nothing(world: RpcWorld, address: str) -> None:
    """The answer to its lender, whom nobody knows, was an error in the callback that also ends leases and old calls."""
    value = value_pb2.Value(body=b"1", gpu_loans=[value_pb2.GpuLoan(number=5)])
    reply = rpc_pb2.Message(reply=rpc_pb2.Reply(id=3, value=value))
    assert "that are not an envelope" in end_of_session(address, [frame(reply), b"\xff"])[1]
    eventually(lambda: not world["a"].run(functions.has_news_of_loans), "the lender has its answer")


def test_calls_before_a_message_that_ends_the_session_are_over(world: RpcWorld, address: str) -> None:
    """They came in one envelope: what they left for the pool to do was dropped, and a shutdown waited for them."""
    call = rpc_pb2.Call(id=3, function="builtins:abs", arguments=value_pb2.Value(body=b"1"))
    again = frame(rpc_pb2.Message(call=call))
    compact = bytes(call_frame(CallMessage(4, "builtins:abs", 0, b"1"), 0, b"builtins:abs"))
    assert "with the number 3 of a call that has not ended" in end_of_session(address, [again + compact + again])[1]
    eventually(lambda: world["a"].run(functions.num_calls) == 0, "nothing is left of them")
