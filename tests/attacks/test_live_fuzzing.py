"""Random and nearly right bytes, from a peer with the token, at a worker that lives: it answers all the time.

`make stress` tries forty times as many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from struct import pack
from typing import Any

import grpc
import pytest
import rpc_victim_functions as functions
from full_sets import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_timeouts import CALM_S
from rpc_raw_peer import RawClient, connected, run_on_loop
from stall_detector import STALL_LIMIT_S, longest_stalls, start_stall_detector

from rpcdist import rpc
from rpcdist._proto import autograd_pb2, rpc_pb2, rref_pb2, value_pb2
from rpcdist.testing import RpcWorld, WorkerPool, free_port
from rpcdist.transport._framing.frames import call_frame, chunk_head, frame, reply_frame
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(1800 if FULL else 120)]

NUM_SESSIONS = 1000 if FULL else 25
ANSWER_LIMIT_S = 60.0  # for a session, its connection included; the detector has the limit of the worker
MODULUS = 2**61 - 1


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """Worker a takes no pickles: what fuzzing finds there runs in the codec, and not in code of its choice."""
    url = f"tcp://127.0.0.1:{free_port()}"
    world = module_pool.world("a", "b", url=url, peer_timeout=CALM_S, allow_pickle=False)
    world["a"].run(exec, f"import {functions.__name__}")  # nothing is imported for b
    yield world
    world.shutdown()


@pytest.fixture
def address(world: RpcWorld) -> Iterator[str]:
    """Where worker a listens. It must have answered within the limit throughout, and be as it was."""
    pid = world["b"].run(rpc.rpc_sync, "a", functions.pid)
    world["a"].run(start_stall_detector)
    yield world["a"].run(functions.address)
    asked, stalls_s = world["a"].run(longest_stalls)
    assert asked > 0 and max(stalls_s.values()) < STALL_LIMIT_S, stalls_s
    assert world["b"].run(rpc.rpc_sync, "a", functions.pid) == pid
    assert "Traceback" not in world["a"].output(), world["a"].output()


async def _talk(address: str, envelopes: list[bytes]) -> None:
    async with connected(address) as channel, asyncio.timeout(ANSWER_LIMIT_S):
        client = await _proven(channel)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the worker has ended the session
            for envelope in envelopes:
                await client.call.write(envelope)
            await client.call.done_writing()
        await client.end()


async def _proven(channel: Any) -> RawClient:
    """A session. On a busy machine a connection may take more than gRPC's own patience; workers try again, too."""
    while True:
        client = RawClient(channel)
        try:
            await client.prove()
            return client
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as exc:
            if isinstance(exc, grpc.aio.AioRpcError) and exc.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


def talk(address: str, envelopes: list[bytes]) -> None:
    """One session with the token; how it ends is the worker's business, that it ends is checked."""
    run_on_loop(_talk(address, envelopes))


numbers = st.integers(0, 300) | st.integers(0, 2**63 - 1)
bodies = st.binary(max_size=200) | st.lists(st.integers(0x80, 0xE0) | st.integers(0, 8), max_size=60).map(bytes)
values = st.builds(
    value_pb2.Value,
    encoding=st.sampled_from([0, 0, 0, 1, 7]),
    body=bodies,
    tensors=st.lists(
        st.builds(
            value_pb2.Tensor, dtype=st.integers(0, 60), buffer=st.integers(0, 3), shape=st.lists(numbers, max_size=3)
        ),
        max_size=4,
    ),
    buffers=st.lists(st.builds(value_pb2.Buffer, inline=st.binary(max_size=50)), max_size=3),
    body_buffer=st.integers(0, 3),
)
calls = st.builds(
    rpc_pb2.Call,
    id=numbers,
    function=st.sampled_from(["builtins:len", "torch:zeros", "os:getpid", "", ":", "a" * 5000]) | st.text(max_size=20),
    arguments=values,
    timeout_us=numbers,
    by_value=st.booleans(),
)
messages = st.one_of(
    st.builds(rpc_pb2.Message, call=calls, transfer=numbers, large=st.lists(numbers, max_size=4)),
    st.builds(rpc_pb2.Message, reply=st.builds(rpc_pb2.Reply, id=numbers, value=values)),
    st.builds(rpc_pb2.Message, stream_item=st.builds(rpc_pb2.StreamItem, id=numbers, value=values)),
    st.builds(rpc_pb2.Message, cancel=st.builds(rpc_pb2.Cancel, id=numbers)),
    st.builds(rpc_pb2.Message, control_seq=numbers, rref=st.builds(rref_pb2.RRefMessage)),
    st.builds(rpc_pb2.Message, control_seq=numbers, autograd=st.builds(autograd_pb2.AutogradMessage)),
    st.builds(rpc_pb2.Message, transfer=numbers, wrapped=st.just(True), large=st.lists(st.integers(0, 9), max_size=2)),
)
compact_calls = st.builds(
    lambda id, timeout, body, tensors, number, name: call_frame(
        CallMessage(id, "builtins:len", timeout, body, tensors), number, name
    ),
    st.integers(0, 2**32),
    st.integers(0, 2**40),
    bodies,
    st.integers(0, 40),
    st.integers(0, 5),
    st.sampled_from([b"", b"builtins:len", b"\xff\xfe"]),
)
compact_replies = st.builds(
    lambda id, body, tensors: reply_frame(ReplyMessage(id, body, tensors)),
    st.integers(0, 99),
    bodies,
    st.integers(0, 40),
)
chunks = st.builds(
    lambda transfer, buffer, offset, data: chunk_head(transfer, buffer, offset, len(data)) + data,
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 99),
    st.binary(max_size=99),
)
frames = st.one_of(messages.map(frame), compact_calls, compact_replies, chunks, st.binary(max_size=300))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A frame of which some bytes are others."""
    data = bytearray(draw(frames))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(
    max_examples=NUM_SESSIONS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(damaged(), min_size=1, max_size=8))
def test_a_living_worker_answers_while_it_is_fuzzed(address: str, envelopes: list[bytes]) -> None:
    talk(address, envelopes)


def hostile_values() -> list[value_pb2.Value]:
    """Those that used to hold a worker up."""
    numbers = [factor * MODULUS for factor in range(20_000)]
    written = [number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True) for number in numbers]
    dict_body = pack("<BI", 0x8E, len(numbers)) + b"".join(pack("<BI", 0x84, len(n)) + n + b"\x80" for n in written)
    return [
        value_pb2.Value(body=dict_body),
        value_pb2.Value(body=b"\xa1" * 60_000),
        value_pb2.Value(body=pack("<BI", 0x8C, 2**32 - 1)),
        value_pb2.Value(body=b"\xc0", tensors=[value_pb2.Tensor(shape=[2**40])] * 1000),
    ]


def test_a_living_worker_answers_while_values_cost_more_than_they_weigh(address: str) -> None:
    envelopes = [
        frame(rpc_pb2.Message(call=rpc_pb2.Call(id=id, function="builtins:len", arguments=value)))
        for id, value in enumerate(hostile_values(), 1)
    ]
    talk(address, envelopes)
    for transfer in range(1, 21):  # 400 KB that announced 400,000 buffers took 6 s each
        call = rpc_pb2.Call(id=transfer, function="builtins:len")
        announcement = rpc_pb2.Message(call=call, transfer=transfer, large=[1] * 400_000)
        talk(address, [frame(announcement)])
    many = [
        rpc_pb2.Message(call=rpc_pb2.Call(id=1), transfer=transfer, large=[1] * 60_000) for transfer in range(1, 21)
    ]
    talk(address, list(map(frame, many)))
