"""The work of a worker for a message is bounded by its bytes and a few ordinary calls, whatever its kind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from struct import pack
from typing import Any

import pytest
import table_functions as functions
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from peer_timeouts import LIMIT_S
from rpc_raw_peer import STRANGER, RawClient, connected, run_on_loop, status_of
from rpc_victim_functions import raw_port
from test_tables_after_a_peer import QUESTION, envelopes, value_of

from rpcdist._proto import rpc_pb2
from rpcdist._proto.handshake_pb2 import Handshake
from rpcdist.testing import RpcWorld, Worker, WorkerPool
from rpcdist.transport._framing.frames import call_frame, frame
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.handshake import ClientHandshake
from rpcdist.transport.handshake_side import MAX_HANDSHAKE_BYTES
from rpcdist.transport.wire_messages import CallMessage

pytestmark = [pytest.mark.multiproc, pytest.mark.stress]

NUM_SMALL = 100
NUM_PARTS = 250_000
NUM_CONNECTIONS = 5
MAX_FRAME_BYTES = 2_400_000
CALLS_FOR_SMALL = 10
"""A message of less than a KiB costs at most so many ordinary calls."""
CALLS_FOR_LARGE = 50
CALLS_PER_MIB = 400
"""A larger one costs at most `CALLS_FOR_LARGE`, and so many for each MiB: some 50 ms."""
POW_2_3 = b"\xa2\xa2\x02\x03\xb0"

Path = tuple[FieldDescriptor, ...]


def paths_of_long_fields(kind: Descriptor, before: Path = (), seen: set[str] | None = None) -> Iterator[Path]:
    """The ways to all fields that can be long, one to each."""
    seen = set() if seen is None else seen
    for field in kind.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        is_long = field.is_repeated or field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)
        if is_map or field.full_name in seen:
            continue
        seen.add(field.full_name)
        path = (*before, field)
        if is_long:
            yield path
        if field.message_type is not None:
            yield from paths_of_long_fields(field.message_type, path, seen)


def with_long_field(
    message: Any, path: Path, chance: random.Random, num_parts: int = NUM_PARTS, num_bytes: int = 1_000_000
) -> Any:
    """The message, in which the field has so many parts, or bytes."""
    place = message
    for field in path[:-1]:
        place = getattr(place, field.name).add() if field.is_repeated else getattr(place, field.name)
        place.SetInParent()
    last = path[-1]
    if not last.is_repeated:
        setattr(place, last.name, b"\x01" * num_bytes if last.type == FieldDescriptor.TYPE_BYTES else "x" * num_bytes)
    elif last.message_type is None:
        short: Any = {FieldDescriptor.TYPE_BYTES: b"a", FieldDescriptor.TYPE_STRING: "a"}.get(last.type)
        getattr(place, last.name).extend([value_of(last, chance) if short is None else short] * num_parts)
    else:
        for _ in range(num_parts):
            getattr(place, last.name).add()
    return message


def processor_time(worker: Worker) -> float:
    """The processor time of the worker, in seconds, when it has nothing left to do."""
    while True:
        before = worker.run(time.process_time)
        time.sleep(0.02)  # the worker is idle if it does nothing for so long
        if (now := worker.run(time.process_time)) - before < 0.003:
            return now


def work(world: RpcWorld, address: str, data: Sequence[bytes]) -> float:
    """The processor time that a worker takes for envelopes on one session; some may end it."""

    async def talk() -> float:
        async with connected(address) as channel:
            client = RawClient(channel)
            await client.prove()
            before = processor_time(world["a"])
            with contextlib.suppress(asyncio.InvalidStateError):  # the session has ended already
                for one in [*data, frame(QUESTION)]:
                    await status_of(client.call.write(one))
            await status_of(client.call.read())
            done = processor_time(world["a"]) - before
            client.call.cancel()
            return done

    return run_on_loop(talk())


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    world = module_pool.world("a", "b", allow_pickle=False, allow_functions=["builtins:pow"])
    yield world
    world.shutdown()


def of_one_call(world: RpcWorld, address: str) -> float:
    """The processor time that a worker takes for one ordinary call, in seconds."""
    calls = [CallMessage(number, "builtins:pow", 0, POW_2_3) for number in range(1, NUM_SMALL + 1)]
    ordinary = [bytes(call_frame(call, 0, b"builtins:pow")) for call in calls]
    work(world, address, ordinary)  # what comes with the first use
    return min(work(world, address, ordinary) for _ in range(3)) / NUM_SMALL


def test_what_a_worker_computes_is_bounded_by_the_bytes_of_the_message(world: RpcWorld) -> None:
    address = world["a"].run(functions.address)
    one_call = of_one_call(world, address)
    too_much = {}
    chance = random.Random(1)
    for envelope in envelopes(chance, 1):
        each = work(world, address, [envelope * NUM_SMALL]) / NUM_SMALL
        if each > CALLS_FOR_SMALL * one_call:
            too_much[envelope[:200]] = f"{each / one_call:.0f} calls"
    message: Any = rpc_pb2.Message.DESCRIPTOR  # its type varies with the stubs of protobuf
    for path in paths_of_long_fields(message):
        data = frame(with_long_field(rpc_pb2.Message(), path, chance))
        assert len(data) < MAX_FRAME_BYTES
        limit = CALLS_FOR_LARGE + CALLS_PER_MIB * len(data) / 2**20
        if (taken := work(world, address, [data]) / one_call) > limit:
            too_much[".".join(field.name for field in path).encode()] = f"{taken:.0f} calls, and not {limit:.0f}"
    assert not too_much, f"{too_much}, of {one_call * 1e6:.0f} us each"


def work_for_stranger(world: RpcWorld, place: tuple[str, int], steps: Sequence[Handshake]) -> float:
    """The processor time that a worker takes for a raw connection whose messages these are; it waits for no answer."""
    before = processor_time(world["a"])
    for _ in range(NUM_CONNECTIONS):
        with socket.create_connection(place, LIMIT_S) as connection, contextlib.suppress(ConnectionError):
            for step in steps:
                data = step.SerializeToString()
                connection.sendall(pack("<I", len(data)) + data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    return (processor_time(world["a"]) - before) / NUM_CONNECTIONS


def test_what_a_worker_computes_for_strangers_is_bounded_by_their_bytes(world: RpcWorld) -> None:
    """Each step of a handshake, at the beginning and after a hello that any stranger can make."""
    one_call = of_one_call(world, world["a"].run(functions.address))
    place = "127.0.0.1", world["a"].run(raw_port)
    stranger = Credentials(b"of another job, and long enough", "default", STRANGER)
    hello = ClientHandshake(stranger.token, stranger.job, "rpc", stranger.identity, channel="tcp").start()
    kind: Any = Handshake.DESCRIPTOR
    too_much = {}
    work_for_stranger(world, place, [hello])
    for path in chain.from_iterable(paths_of_long_fields(step.message_type, (step,)) for step in kind.fields):
        num_parts, num_bytes = MAX_HANDSHAKE_BYTES // 4, MAX_HANDSHAKE_BYTES - 100
        long_one = with_long_field(Handshake(), path, random.Random(1), num_parts, num_bytes)
        assert long_one.ByteSize() <= MAX_HANDSHAKE_BYTES
        for steps in ([long_one], [hello, long_one]):
            if (taken := work_for_stranger(world, place, steps) / one_call) > CALLS_FOR_LARGE:
                too_much[".".join(field.name for field in path), len(steps)] = f"{taken:.0f} calls"
    assert not too_much, f"{too_much}, of {one_call * 1e6:.0f} us each, and not {CALLS_FOR_LARGE}"
