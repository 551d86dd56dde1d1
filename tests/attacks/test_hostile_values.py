"""Values that cost the receiver far more than the sender, without a pickle: the work for each is bounded."""

from __future__ import annotations

import ctypes
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from values_helpers import encode, round_trip

from rpcdist._proto import rpc_pb2, rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import Demultiplexer, Lifetime
from rpcdist.rpc._rref.messages import decode_messages
from rpcdist.rpc._values.buffers import copy_of
from rpcdist.rpc._values.codec import decode, encode_into
from rpcdist.rpc._values.rebuild import MAX_UNTRUSTED_TENSORS, TENSOR_BYTES
from rpcdist.rpc.options import RpcOptions
from rpcdist.testing import WorkerPool
from rpcdist.transport._framing.frames import Chunk, parse
from rpcdist.transport._framing.incoming import BUFFER_BYTES, TRANSFER_BYTES, Incoming, IncomingBuffer, heap_buffer
from rpcdist.transport._framing.message_parts import parsed, parsed_cost
from rpcdist.transport.announced_bytes import AnnouncedBytes
from rpcdist.transport.wire_messages import CallMessage

MODULUS = 2**61 - 1  # of Python's hash of numbers
INT64, BIG, COMPLEX, NONE, LIST, TUPLE, DICT, TUPLE0 = 0x83, 0x84, 0x86, 0x80, 0x8C, 0x8D, 0x8E, 0xA0


def dict_of(keys: list[bytes]) -> value_pb2.Value:
    """A dict with keys that are written already, and None for values; it weighs enough for its objects."""
    body = pack("<BI", DICT, len(keys)) + b"".join(key + bytes([NONE]) for key in keys)
    return value_pb2.Value(body=body, weight=bytes(200 * len(keys)))


def big_int(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return pack("<BI", BIG, len(data)) + data


def colliding_ints(count: int) -> list[bytes]:
    return [big_int(factor * MODULUS) for factor in range(count)]


def colliding_complexes(count: int) -> list[bytes]:
    """The hash is that of the real part plus 1,000,003 times that of the imaginary one."""
    total = 1_000_003 * count
    numbers = [complex(total - 1_000_003 * factor, factor) for factor in range(count)]
    assert len(set(map(hash, numbers))) == 1
    return [pack("<Bdd", COMPLEX, number.real, number.imag) for number in numbers]


def colliding_tuples(length: int) -> list[bytes]:
    """-1 and -2 have the same hash, and so have all tuples of them."""
    numbers = [pack("<Bq", INT64, -1), pack("<Bq", INT64, -2)]
    return [bytes([TUPLE0 + length]) + b"".join(items) for items in product(numbers, repeat=length)]


@pytest.mark.parametrize(
    "keys",
    [colliding_ints(20_000), colliding_complexes(20_000), colliding_tuples(14)],
    ids=["integers", "complex numbers", "tuples"],
)
def test_a_dict_of_colliding_keys_is_refused(keys: list[bytes]) -> None:
    """319 KB of them held the interpreter for five seconds."""
    with pytest.raises(SerializationError, match=r"colliding hashes.*list of pairs"):
        decode(dict_of(keys), plain_only=True)


def test_colliding_dicts_in_one_value_share_one_limit() -> None:
    one = dict_of(colliding_ints(200)).body
    decode(value_pb2.Value(body=one), plain_only=True)
    many = value_pb2.Value(body=pack("<BI", LIST, 400) + one * 400, weight=bytes(10_000_000))
    with pytest.raises(SerializationError, match="colliding hashes"):
        decode(many, plain_only=True)


def long_tuples(count: int, length: int) -> list[bytes]:
    """Keys of one hash that differ in their last numbers."""
    ends = list(product([pack("<Bq", INT64, -1), pack("<Bq", INT64, -2)], repeat=7))[:count]
    return [pack("<BI", TUPLE, length + 7) + bytes(length) + b"".join(end) for end in ends]


def count_of(one: value_pb2.Value) -> int:
    return int.from_bytes(one.body[1:5], "little")


@pytest.mark.parametrize(
    "one",
    [
        dict_of(colliding_ints(15)),
        dict_of(colliding_ints(120)),
        dict_of(long_tuples(15, 100)),
        dict_of(long_tuples(100, 100)),
        dict_of(long_tuples(15, 4000)),
        dict_of(long_tuples(120, 4000)),
        dict_of(colliding_complexes(120)),
    ],
    ids=["few integers", "integers", "few tuples", "tuples", "few long tuples", "long tuples", "complex numbers"],
)
def test_small_dicts_of_colliding_keys_take_no_more_time_than_they_weigh(one: value_pb2.Value) -> None:
    """Dicts of fewer than 128 entries were not watched: 100 long tuples of one hash took 0.2 s for each MiB.

    The time is compared with that of reading the same keys into tuples; filling may take 40 ms a MiB more.
    """
    count = max(1, 400_000 // len(one.body))
    body = pack("<BI", LIST, count) + one.body * count
    weight = bytes(10 * len(body))
    began = time.thread_time()
    with suppress(SerializationError):
        decode(value_pb2.Value(body=body, weight=weight), plain_only=True)
    colliding = time.thread_time() - began
    keys_and_values = pack("<BI", TUPLE, 2 * count_of(one)) + one.body[5:]
    began = time.thread_time()
    decode(value_pb2.Value(body=pack("<BI", LIST, count) + keys_and_values * count, weight=weight), plain_only=True)
    ordinary = time.thread_time() - began
    assert colliding < 4 * ordinary + 0.1


@pytest.mark.parametrize(
    "wanted",
    [
        {number * 2**40: number for number in range(100_000)},
        {(x, y, z): 0 for x in range(-20, 20) for y in range(-20, 20) for z in range(-20, 20)},
        {number / 7: str(number) for number in range(50_000)},
        {str(number): number for number in range(100_000)},
        {number: number for number in range(127)},
        {number: number for number in range(129)},
    ],
    ids=["spread integers", "coordinates", "floats", "strings", "127", "129"],
)
def test_large_dicts_of_ordinary_keys_arrive(wanted: dict[object, object]) -> None:
    value = encode(wanted, plain_only=True)
    received = decode(value.value, [copy_of(buffer) for buffer in value.large], plain_only=True)
    assert received == wanted and list(received) == list(wanted)


def test_an_announcement_takes_no_memory() -> None:
    """400 KB that announced 400,000 buffers took 6 s and 546 MiB."""
    taken: list[int] = []

    def allocate(size_bytes: int) -> IncomingBuffer:
        taken.append(size_bytes)
        return heap_buffer(size_bytes)

    incoming = Incoming(allocate)
    announced = rpc_pb2.Message(transfer=1, large=[1] * 65_536)
    assert incoming.announce(announced) is None
    assert taken == []
    assert incoming.chunk(Chunk(1, 7, 0, memoryview(b"x"))) is None
    assert taken == [1]
    with pytest.raises(ProtocolViolation, match="400000 buffers"):
        incoming.announce(rpc_pb2.Message(transfer=2, large=[1] * 400_000))


def test_a_reason_that_is_none_ends_the_session_by_name() -> None:
    """It was a `ValueError`, with a traceback in the log; found by `make fuzz`."""
    with pytest.raises(ProtocolViolation, match="24 is not a valid Reason"):
        decode_messages(rref_pb2.RRefMessage(fork_refused=rref_pb2.ForkRefused(reason=24)), lambda rref, fork: False)  # type: ignore[arg-type]


def test_deletions_that_are_cut_off_end_the_session_by_name() -> None:
    with pytest.raises(ProtocolViolation, match="has 47 bytes"):
        decode_messages(
            rref_pb2.RRefMessage(users_deleted=rref_pb2.UsersDeleted(ids=bytes(47))), lambda rref, fork: False
        )


OWN_BYTES = TRANSFER_BYTES + BUFFER_BYTES
LIMIT_BYTES = 10 * OWN_BYTES


def is_taken(incoming: Incoming, transfer: int, num_bytes: int) -> bool:
    """Announces one buffer; whether its bytes are kept as they come."""
    assert incoming.announce(rpc_pb2.Message(transfer=transfer, large=[num_bytes])) is None
    return incoming.place(transfer, 0, 0, 1) is not None


def test_announcements_of_one_session_share_one_limit() -> None:
    incoming = Incoming(announced=AnnouncedBytes(LIMIT_BYTES))
    assert is_taken(incoming, 1, 6 * OWN_BYTES)
    assert not is_taken(incoming, 2, 5 * OWN_BYTES)
    incoming.chunk(Chunk(1, 0, 0, memoryview(bytes(5 * OWN_BYTES))))
    assert is_taken(incoming, 3, 5 * OWN_BYTES)  # what has arrived does not count
    incoming.abort(1)
    incoming.abort(2)
    assert is_taken(incoming, 4, 3 * OWN_BYTES)
    with pytest.raises(ProtocolViolation, match=r"1088 bytes.*accepts 10880.*max_incoming_bytes"):
        incoming.announce(rpc_pb2.Message(transfer=5, large=[1]))  # the account of it takes more than it says


def test_announcements_of_a_few_bytes_count_for_more() -> None:
    """Each buffer of one byte that was announced kept a kilobyte at the receiver for as long as the session stood."""
    incoming = Incoming(announced=AnnouncedBytes(100 * OWN_BYTES))
    with pytest.raises(ProtocolViolation, match="max_incoming_bytes"):
        for transfer in range(1, 102):
            incoming.announce(rpc_pb2.Message(transfer=transfer, large=[1]))
    assert "99 transfers" in repr(incoming)


def test_sessions_of_one_peer_share_one_limit() -> None:
    """Ten sessions took ten times `max_incoming_bytes`. All peers that are not members share one allowance."""
    options = RpcOptions(max_incoming_bytes=LIMIT_BYTES)
    sessions = Demultiplexer(lambda *_: None, Lifetime(), options, {0: "a", 1: "b"}.get)
    first, second = (Incoming(announced=sessions.announced_by(Identity("a", 0, n))) for n in (1, 2))
    assert is_taken(first, 1, 6 * OWN_BYTES) and not is_taken(second, 1, 5 * OWN_BYTES)
    other = Incoming(announced=sessions.announced_by(Identity("b", 1, 1)))
    assert is_taken(other, 1, 9 * OWN_BYTES)
    strangers = [Incoming(announced=sessions.announced_by(Identity(f"x{n}", 7 + n, 1))) for n in range(2)]
    assert is_taken(strangers[0], 1, 6 * OWN_BYTES) and not is_taken(strangers[1], 1, 5 * OWN_BYTES)
    first.close()
    second.abort(1)
    assert is_taken(second, 2, 9 * OWN_BYTES)


def field(number: int, data: bytes) -> bytes:
    """A field of protobuf with a length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


ARGUMENTS, TENSORS, BUFFERS, RREFS = 5, 3, 4, 5
BOMBS = {
    "tensors": field(1, field(ARGUMENTS, field(TENSORS, b"") * 1_000_000)),
    "buffers": field(1, field(ARGUMENTS, field(BUFFERS, b"") * 1_000_000)),
    "references": field(1, field(ARGUMENTS, field(RREFS, b"") * 1_000_000)),
    "a number again and again": field(1, field(ARGUMENTS, b"\x08\x01" * 1_000_000)),
    "of an exception": field(2, field(3, field(6, field(TENSORS, b"") * 1_000_000))),
    "names of devices": field(22, field(1, b"") * 1_000_000),
    "loans": field(17, b"") * 1_000_000,
    "deep": field(1, field(ARGUMENTS, b"") * 1_000_000),
}
"""Each took 60 to 250 MB when it was parsed."""


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_fields_are_counted_before_there_is_an_object_for_each(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="too many very small"):
        parse(pack("<IBBHIQQ", len(data), 1, 0, 0, 0, 0, 0) + data, [])
    incoming = Incoming()
    assert incoming.announce(rpc_pb2.Message(transfer=1, large=[len(data)], wrapped=True)) is None
    with pytest.raises(ProtocolViolation, match="too many very small"):
        incoming.chunk(Chunk(1, 0, 0, memoryview(data)))


def test_what_the_fields_of_a_message_cost_counts_for_its_sender() -> None:
    message = rpc_pb2.Message(call=rpc_pb2.Call(id=1))
    message.call.arguments.tensors.extend([value_pb2.Tensor(dtype=5, buffer=1, shape=[7, 7])] * 10_000)
    message.call.arguments.weight = bytes(5_000_000)
    data = message.SerializeToString()
    for limit, is_enough in ((1_000_000, False), (20_000_000, True)):
        incoming = Incoming(announced=AnnouncedBytes(limit))
        assert incoming.announce(rpc_pb2.Message(transfer=1, large=[len(data)], wrapped=True)) is None
        if is_enough:
            delivered = incoming.chunk(Chunk(1, 0, 0, memoryview(data)))
            assert delivered is not None and isinstance(call := delivered[0], CallMessage)
            assert (call.id, call.value) == (1, message.call.arguments)
        else:
            with pytest.raises(ProtocolViolation, match="max_incoming_bytes"):
                incoming.chunk(Chunk(1, 0, 0, memoryview(data)))


@pytest.mark.parametrize("count", [1, 100, 20_000])
def test_a_value_of_small_tensors_of_many_kinds_is_not_too_many_fields(count: int) -> None:
    """The tensors are as unlike one another as small ones can be, so there are no runs."""
    dtypes = (torch.bool, torch.uint8, torch.int16, torch.float32)
    value = encode([torch.ones((), dtype=dtypes[i % 4]).expand((1,) * (i % 3)) for i in range(count)]).value
    message = rpc_pb2.Message(call=rpc_pb2.Call(id=1, arguments=value))
    data = message.SerializeToString()
    assert parsed(rpc_pb2.Message, data) == message
    if count > 1000:
        assert parsed_cost(rpc_pb2.Message, data) >= 200 * count


@given(st.binary(min_size=1, max_size=60), st.integers(0, 4096))
def test_counting_fields_of_any_bytes_ends_as_parsing_does(piece: bytes, at: int) -> None:
    """For any damage: only the two errors, and no other message than protobuf's."""
    data = piece * (5000 // len(piece))
    whole = rpc_pb2.Message(call=rpc_pb2.Call(function="f" * 4096)).SerializeToString()
    for mutated in (data, whole[:at] + data, field(1, data), field(1, field(ARGUMENTS, data))):
        with suppress(ProtocolViolation, DecodeError):
            assert parsed(rpc_pb2.Message, mutated) == rpc_pb2.Message.FromString(mutated)


def test_a_session_that_has_ended_holds_no_buffers() -> None:
    """A caller that was killed in 16 transfers of 64 MiB left 290 MiB behind for 14 s."""
    incoming = Incoming()
    incoming.announce(rpc_pb2.Message(transfer=1, large=[1 << 20]))
    view = incoming.place(1, 0, 0, 10)
    assert view is not None
    incoming.close()
    assert incoming.placed(1, 0, 10) is None and "0 transfers" in repr(incoming)


def test_more_tensors_than_an_untrusted_peer_may_send_are_refused() -> None:
    value = encode(torch.ones(())).value
    value.tensors.extend([value.tensors[0]] * 1024)
    with pytest.raises(SerializationError, match=r"a value of \d+ bytes arrived that would take more than 1048"):
        decode(value, plain_only=True)
    value.weight = bytes(MAX_UNTRUSTED_TENSORS * TENSOR_BYTES)
    decode(value, plain_only=True)
    value.tensors.extend([value.tensors[0]] * MAX_UNTRUSTED_TENSORS)
    with pytest.raises(SerializationError, match=f"a peer that may send at most {MAX_UNTRUSTED_TENSORS}"):
        decode(value, plain_only=True)


COUNT = 40_000
COSTLY: dict[str, Callable[[], object]] = {
    "ints": lambda: list(range(1000, 1000 + COUNT)),
    "floats": lambda: [number / 7 for number in range(COUNT)],
    "complex numbers": lambda: [complex(number, 1) for number in range(COUNT)],
    "long ints": lambda: [1 << 200 + number % 8 for number in range(COUNT)],
    "bools": lambda: [True, False] * (3 * COUNT),
    "None": lambda: (None,) * (5 * COUNT),
    "short texts": lambda: [f"ab{number}" for number in range(COUNT)],
    "short Cyrillic texts": lambda: [f"\u0416{number}" for number in range(COUNT)],
    "a text": lambda: "x" * (2 << 20),
    "a text with an emoji": lambda: "x" * (1 << 20) + "\U0001f600",
    "bytes": lambda: bytes(2 << 20),
    "short bytes": lambda: [number.to_bytes(4, "big") for number in range(COUNT)],
    "a bytearray": lambda: bytearray(2 << 20),
    "empty tuples": lambda: [()] * (3 * COUNT),
    "empty lists": lambda: [[] for _ in range(COUNT)],
    "empty dicts": lambda: [{} for _ in range(COUNT)],
    "lists in lists": lambda: [[[[]]] for _ in range(COUNT // 3)],
    "pairs": lambda: [(1, 2) for _ in range(COUNT)],
    "small dicts": lambda: [{1: 2} for _ in range(COUNT // 3)],
    "dicts of 6": lambda: [dict.fromkeys(range(6)) for _ in range(COUNT // 6)],
    "a dict of ints": lambda: {number * 1000: None for number in range(COUNT)},
    "a dict that has just grown": lambda: {number * 1000: None for number in range(43_700)},
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_value_costs_three_times_its_weight_and_1_mib(kind: str) -> None:
    """Of one byte each, a million empty dicts took 72 MiB. Honest values that take more come with enough weight."""
    value = COSTLY[kind]()
    message, large = encode(value, plain_only=True)
    received = [copy_of(buffer) for buffer in large]  # torch's memory, which is not traced
    weight = len(message.body) + sum(buffer.size for buffer in received)
    tracemalloc.start()
    try:
        made = decode(message, received, plain_only=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made == value
    assert weight + peak <= 3 * weight + (1 << 20)
    if message.buffers and len(message.buffers) > 1 and isinstance(value, list):  # its last one is nothing but weight
        with pytest.raises(SerializationError, match="would take more than"):
            del message.buffers[-1]
            decode(message, received[:-1], plain_only=True)


MANY_TENSORS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "empty": lambda: [torch.zeros(0) for _ in range(6_000)],
    "many dimensions": lambda: [torch.zeros((1,) * 40 + (0,)) for _ in range(6_000)],
    "strided": lambda: [torch.empty_strided((1,) * 63 + (0,), (3,) * 64) for _ in range(3_000)],
    "small": lambda: [torch.ones(index % 3 + 1) for index in range(6_000)],
    "parameters": lambda: [torch.nn.Parameter(torch.ones(index % 3 + 1)) for index in range(6_000)],
    "run": lambda: [torch.ones(1) for _ in range(6_000)],
}


def resident_bytes() -> int:
    """The memory of this process that is no file's."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon")) << 10


def weight_and_memory(kind: str) -> tuple[int, int]:
    sent = MANY_TENSORS[kind]()
    message = value_pb2.Value()
    large = encode_into(message, sent, plain_only=True)
    data = message.SerializeToString()
    weight = len(data) + sum(buffer.size for buffer in large)
    ctypes.CDLL(None).malloc_trim(0)  # what is used again counts
    before = resident_bytes()
    received = [copy_of(buffer) for buffer in large]
    arrived = parsed(value_pb2.Value, data)
    made: Any = decode(arrived, received, plain_only=True)
    taken = len(data) + resident_bytes() - before
    assert len(made) == len(sent)
    return weight, taken


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", MANY_TENSORS)
def test_tensors_cost_three_times_their_weight_and_1_mib(worker_pool: WorkerPool, kind: str) -> None:
    """The headers of 1 MiB took 64. In a process of its own: what torch and protobuf take is seen in its size alone."""
    weight, taken = worker_pool.start("alone").run(weight_and_memory, kind)
    room = 1 << 20  # of the allocators
    assert taken <= 3 * weight + (1 << 20) + room, f"{taken / 2**20:.1f} MiB for {weight / 2**20:.1f}"


def test_many_tensors_that_weigh_something_pass() -> None:
    tensors = [torch.full((1 + index % 7, 100), float(index)) for index in range(30_000)]
    assert all(map(torch.equal, round_trip(tensors, plain_only=True)[1], tensors))
