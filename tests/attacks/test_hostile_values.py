"""Values that cost the receiver far more than the sender, without a pickle: the work for each is bounded."""

from __future__ import annotations

from itertools import product
from struct import pack

import pytest
import torch
from values_helpers import encode

from rpcdist._proto import rpc_pb2, rref_pb2, value_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._peers.announcements import Announcements
from rpcdist.rpc._rref.protobuf import decode_messages
from rpcdist.rpc._values import decode
from rpcdist.rpc._values.rebuild import MAX_UNTRUSTED_TENSORS
from rpcdist.transport._framing.frames import Chunk
from rpcdist.transport._framing.incoming import Incoming, IncomingBuffer, heap_buffer
from rpcdist.transport.announced_bytes import AnnouncedBytes

MODULUS = 2**61 - 1  # of Python's hash of numbers
INT64, BIG, COMPLEX, NONE, LIST, DICT, TUPLE0 = 0x83, 0x84, 0x86, 0x80, 0x8C, 0x8E, 0xA0


def dict_of(keys: list[bytes]) -> value_pb2.Value:
    """A dict with keys that are written already, and None for values."""
    return value_pb2.Value(body=pack("<BI", DICT, len(keys)) + b"".join(key + bytes([NONE]) for key in keys))


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
    with pytest.raises(SerializationError, match=r"hashes collide.*list of pairs"):
        decode(dict_of(keys), plain_only=True)


def test_colliding_dicts_in_one_value_share_one_limit() -> None:
    one = dict_of(colliding_ints(1_500)).body
    decode(value_pb2.Value(body=one), plain_only=True)
    with pytest.raises(SerializationError, match="hashes collide"):
        decode(value_pb2.Value(body=pack("<BI", LIST, 100) + one * 100), plain_only=True)


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
    received = decode(value.value, [buffer.copy() for buffer in value.large], plain_only=True)
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
        decode_messages(rref_pb2.RRefMessage(fork_refused=rref_pb2.ForkRefused(reason=24)))  # type: ignore[arg-type]


def test_deletions_that_are_cut_off_end_the_session_by_name() -> None:
    with pytest.raises(ProtocolViolation, match="arrived in 47 bytes"):
        decode_messages(rref_pb2.RRefMessage(users_deleted=rref_pb2.UsersDeleted(ids=bytes(47))))


def test_announcements_of_one_session_share_one_limit() -> None:
    incoming = Incoming(announced=AnnouncedBytes(1000))
    assert incoming.announce(rpc_pb2.Message(transfer=1, large=[600])) is None
    with pytest.raises(ProtocolViolation, match=r"500 bytes.*600.*takes 1000.*max_incoming_bytes"):
        incoming.announce(rpc_pb2.Message(transfer=2, large=[500]))
    incoming.chunk(Chunk(1, 0, 0, memoryview(bytes(150))))
    assert incoming.announce(rpc_pb2.Message(transfer=3, large=[500])) is None  # what has arrived does not count
    incoming.abort(1)
    assert incoming.announce(rpc_pb2.Message(transfer=4, large=[500])) is None


def test_sessions_of_one_peer_share_one_limit() -> None:
    """Ten sessions took ten times `max_incoming_bytes`. Whoever is no member shares his with all such."""
    announcements = Announcements(1000, {0: "a", 1: "b"}.get)
    first, second = (Incoming(announced=announcements.of(Identity("a", 0, n))) for n in (1, 2))
    assert first.announce(rpc_pb2.Message(transfer=1, large=[600])) is None
    with pytest.raises(ProtocolViolation, match="max_incoming_bytes"):
        second.announce(rpc_pb2.Message(transfer=1, large=[500]))
    other = Incoming(announced=announcements.of(Identity("b", 1, 1)))
    assert other.announce(rpc_pb2.Message(transfer=1, large=[1000])) is None
    strangers = [Incoming(announced=announcements.of(Identity(f"x{n}", 7 + n, 1))) for n in range(2)]
    assert strangers[0].announce(rpc_pb2.Message(transfer=1, large=[600])) is None
    with pytest.raises(ProtocolViolation, match="max_incoming_bytes"):
        strangers[1].announce(rpc_pb2.Message(transfer=1, large=[500]))
    first.close()
    assert second.announce(rpc_pb2.Message(transfer=2, large=[1000])) is None


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
    value.tensors.extend([value.tensors[0]] * MAX_UNTRUSTED_TENSORS)
    with pytest.raises(SerializationError, match="131073 tensors"):
        decode(value, plain_only=True)
