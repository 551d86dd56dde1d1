"""A member with the token that misbehaves: it speaks for others, wants more than it sends, and sends broken bytes.

It runs in a process of its own, opens sessions to a living worker, and draws what it says there from a seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from struct import pack

import grpc
from rpc_raw_peer import RawClient, connected, run_on_loop

from rpcdist._proto import autograd_pb2, rpc_pb2, rref_pb2, value_pb2
from rpcdist.testing import LIMIT_S
from rpcdist.transport._framing.frames import chunk_head, frame

__all__ = ["attack"]

NUM_SESSIONS = 8
MESSAGES_PER_SESSION = 12
FORGED = value_pb2.Value(body=b"\x87\x06forged")
LIST, DICT, BIG, MODULUS = 0x8C, 0x8E, 0x84, 2**61 - 1

Message = rpc_pb2.Message


def attack(address: str, seed: str) -> int:
    """Opens sessions to the worker that listens there, and misbehaves on each; how many of them were proven."""
    return run_on_loop(_attack(address, random.Random(seed)))


async def _attack(address: str, chance: random.Random) -> int:
    num_proven = 0
    async with asyncio.timeout(LIMIT_S), connected(address) as channel:
        for _ in range(NUM_SESSIONS):
            client = RawClient(channel)
            try:
                await client.prove()
                num_proven += 1
                for _ in range(MESSAGES_PER_SESSION):
                    await client.call.write(chance.choice(_ATTACKS)(chance))
                if chance.random() < 0.5:
                    await client.call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                continue  # the worker has ended the session, as it should
            finally:
                client.call.cancel()
    return num_proven


# ---------------------------------------------------------------- what it says


def _speaks_for_others(chance: random.Random) -> bytes:
    """Answers, ends, cancels and asks about calls that others have made: their numbers can be guessed."""
    id = chance.randrange(1, 2000)
    return frame(
        chance.choice(
            [
                Message(reply=rpc_pb2.Reply(id=id, value=FORGED)),
                Message(reply=rpc_pb2.Reply(id=id, failure=rpc_pb2.Failure(text="forged", worker="a"))),
                Message(stream_item=rpc_pb2.StreamItem(id=id, value=FORGED)),
                Message(stream_end=rpc_pb2.StreamEnd(id=id)),
                Message(stream_credit=rpc_pb2.StreamCredit(id=id, items=2**32 - 1)),
                Message(cancel=rpc_pb2.Cancel(id=id)),
                Message(call_question=rpc_pb2.CallQuestion(id=id)),
                Message(ack=rpc_pb2.Ack(control_seq=id)),
                Message(transfer_aborted=rpc_pb2.TransferAborted(transfer=id, reason="forged")),
            ]
        )
    )


def _ends_references(chance: random.Random) -> bytes:
    rref, fork = _unique(chance), _unique(chance)
    kind = chance.choice(
        [
            rref_pb2.RRefMessage(user_deleted=rref_pb2.UserDeleted(rref=rref, fork=fork)),
            rref_pb2.RRefMessage(fork_refused=rref_pb2.ForkRefused(rref=rref, fork=fork)),
            rref_pb2.RRefMessage(fork_request=rref_pb2.ForkRequest(rref=rref, fork=fork)),
            rref_pb2.RRefMessage(share_lost=rref_pb2.ShareLost(rref=rref, fork=fork)),
            rref_pb2.RRefMessage(creation_over=rref_pb2.CreationOver(rref=rref)),
            rref_pb2.RRefMessage(users_deleted=rref_pb2.UsersDeleted(ids=chance.randbytes(96))),
        ]
    )
    return frame(Message(control_seq=chance.randrange(1, 9), rref=kind))


def _unique(chance: random.Random) -> value_pb2.UniqueId:
    return value_pb2.UniqueId(
        created_on=chance.randrange(4), local_id=chance.randrange(1, 500), incarnation=chance.getrandbits(64)
    )


def _enters_contexts(chance: random.Random) -> bytes:
    """Calls in contexts that it never releases, and messages about passes of others."""
    context = chance.randrange(2**62)
    if chance.random() < 0.5:
        call = rpc_pb2.Call(id=chance.randrange(1, 99), function="builtins:len", autograd_context=context)
        return frame(Message(call=call))
    release = autograd_pb2.AutogradMessage(context=context, release=autograd_pb2.ContextRelease(others=[1, 2, 3]))
    return frame(Message(control_seq=chance.randrange(1, 9), autograd=release))


def _announces_buffers(chance: random.Random) -> bytes:
    """Buffers that never come, and pieces of buffers that nobody has announced."""
    call = rpc_pb2.Call(id=chance.randrange(1, 99), function="builtins:len")
    sizes = chance.choice([[1 << 40], [1 << 20] * 100, [1] * 60_000])
    chunk = chunk_head(chance.randrange(1, 9), 0, 0, 99) + bytes(99)
    return frame(Message(call=call, transfer=chance.randrange(1, 9), large=sizes)) + chunk


def _costs_more_than_it_weighs(chance: random.Random) -> bytes:
    keys = [(factor * MODULUS).to_bytes(10, "little", signed=True) for factor in range(5000)]
    value = chance.choice(
        [
            value_pb2.Value(body=pack("<BI", LIST, 200_000) + b"\xb0" * 200_000),
            value_pb2.Value(body=pack("<BI", LIST, 2**32 - 1)),
            value_pb2.Value(body=pack("<BI", DICT, 5000) + b"".join(pack("<BI", BIG, 10) + k + b"\x80" for k in keys)),
            value_pb2.Value(body=b"\xc0", tensors=[value_pb2.Tensor(shape=[2**40])] * 1000),
        ]
    )
    return frame(Message(call=rpc_pb2.Call(id=chance.randrange(1, 99), function="builtins:len", arguments=value)))


def _sends_no_message(chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return chance.randbytes(chance.randrange(1, 300))
    data = bytearray(_speaks_for_others(chance))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


_ATTACKS: list[Callable[[random.Random], bytes]] = [
    _speaks_for_others,
    _speaks_for_others,
    _ends_references,
    _enters_contexts,
    _announces_buffers,
    _costs_more_than_it_weighs,
    _sends_no_message,
]
