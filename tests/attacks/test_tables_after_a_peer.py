"""Peers with the token send messages of all kinds; after their leases, the tables of the worker are as before."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import table_functions as functions
from full_sets import num_examples
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from peer_timeouts import UNIT_S
from rpc_raw_peer import RawClient, connected, run_on_loop, status_of

from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.testing import WorkerPool, eventually
from rpcdist.transport._framing.frames import call_frame, frame, pass_frame, reply_frame
from rpcdist.transport.wire_messages import CallMessage, CompactPass, ReplyMessage

pytestmark = pytest.mark.multiproc

QUESTION = rpc_pb2.Message(call_question=rpc_pb2.CallQuestion(id=999))
NUM_PEERS = 6
NUM_OF_KIND = 6
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}


def fill(message: Message, chance: random.Random, depth: int = 0) -> None:
    """Sets fields at random: numbers are often those of something that exists, such as a rank or a first call."""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and depth == 0:  # the body, which the caller has chosen
            continue
        if chance.random() < 0.2 or depth > 4:
            continue
        if field.is_repeated:
            place: Any = getattr(message, field.name)
            if field.message_type is None:
                place.extend(value_of(field, chance) for _ in range(chance.randrange(3)))
            elif not field.message_type.GetOptions().map_entry:
                for _ in range(chance.randrange(3)):
                    fill(place.add(), chance, depth + 1)
        elif field.message_type is not None:
            fill(getattr(message, field.name), chance, depth + 1)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, value_of(field, chance))


def value_of(field: Any, chance: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.randbytes(chance.randrange(60))
    if field.cpp_type in _NUMBERS:
        return chance.choice([0, 1, 1, 2, 3, 77, chance.getrandbits(30)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return chance.choice(["a", "b", "nobody", "builtins:pow", "torch:add", f"name{chance.getrandbits(20)}"])
    return chance.random()


def envelopes(chance: random.Random, num_of_kind: int = NUM_OF_KIND) -> Iterator[bytes]:
    """One message of a kind in each."""
    kinds = rpc_pb2.Message.DESCRIPTOR.oneofs_by_name["body"].fields
    for _ in range(num_of_kind):
        for kind in kinds:
            message = rpc_pb2.Message()
            body: Any = getattr(message, kind.name)
            body.SetInParent()
            if body.DESCRIPTOR.oneofs:
                chosen = chance.choice(chance.choice(body.DESCRIPTOR.oneofs).fields)
                if chosen.message_type is not None:
                    fill(getattr(body, chosen.name), chance, 1)
                    getattr(body, chosen.name).SetInParent()
                else:
                    setattr(body, chosen.name, value_of(chosen, chance))
            fill(body, chance)
            if kind.name in ("rref", "autograd", "membership"):
                message.control_seq = chance.choice([0, 1])
            yield frame(message)
        ids: Any = tuple(chance.choice([0, 1, 77, chance.getrandbits(40)]) for _ in range(6))
        number = chance.randrange(4)
        yield bytes(call_frame(CallMessage(number, "builtins:pow", 0, b"", 0, ids, None), 0, b"builtins:pow"))
        yield bytes(call_frame(CallMessage(number, "", 0, b"", 0, None, ids), 0))
        yield bytes(reply_frame(ReplyMessage(number, chance.randbytes(20), 1)))
        yield bytes(pass_frame(CompactPass(chance.getrandbits(50), chance.getrandbits(50), chance.randbytes(40))))


async def attack(address: str, peer: Identity, chance: random.Random) -> int:
    """A session for each message, since many end theirs; returns how many went on."""
    num_open = 0
    async with connected(address) as channel:
        for envelope in envelopes(chance):
            client = RawClient(channel, identity=peer)
            await client.prove()
            await client.call.write(envelope)
            with contextlib.suppress(asyncio.InvalidStateError):  # the session has ended already
                await status_of(client.call.write(frame(QUESTION)))
            await status_of(client.call.read())
            num_open += not client.call.done()
            client.call.cancel()
    return num_open


@pytest.mark.parametrize("seed", range(num_examples(1, 2)))
def test_messages_of_all_kinds_leave_the_tables_as_they_were(worker_pool: WorkerPool, seed: int) -> None:
    world = worker_pool.world("a", "b", peer_timeout=UNIT_S, allow_pickle=False, allow_functions=["builtins:pow"])
    chance = random.Random(seed)
    address = world["a"].run(functions.address)
    run_on_loop(attack(address, Identity("first", 70, 1), chance))  # tables that come with the first use
    eventually(lambda: world["a"].run(functions.num_sessions) <= 2)
    assert world["a"].run(functions.remember) > 100
    for number in range(NUM_PEERS):
        peer = Identity(f"evil{number}", 77 + number, chance.getrandbits(60))
        assert run_on_loop(attack(address, peer, chance)) > 0
    eventually(lambda: world["a"].run(functions.has_no_larger_tables), within_s=30 * UNIT_S)
    assert world["a"].run(functions.larger_tables) == {}
    assert world["b"].run(functions.call, "a") == 8
    world.shutdown()
