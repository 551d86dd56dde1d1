"""The plain codec: what goes round, what is refused, and what damaged or hostile bytes get."""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from full_sets import num_examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from parameter_ids import short_repr
from values_helpers import Box, encode, round_trip, wire

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values import codec
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer, copy_of
from rpcdist.rpc._values.codec import decode, encode_into
from rpcdist.rpc._values.plain import MAX_DEPTH, read_plain
from rpcdist.transport._framing.message_parts import parsed

PLAIN = value_pb2.Value.PLAIN
PICKLE = value_pb2.Value.PICKLE

SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    127,
    128,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**300,
    -(10**300),
    0.0,
    -0.0,
    1.5,
    math.inf,
    -math.inf,
    1j,
    complex(-0.0, math.inf),
    "",
    "a",
    "é" * 200,
    "x" * 255,
    "x" * 256,
    "\ud800 lone surrogate",
    "y" * (INLINE_LIMIT + 1),
    b"",
    b"\0\xff",
    b"z" * 256,
    b"z" * (INLINE_LIMIT + 1),
    bytearray(b"ab"),
    bytearray(INLINE_LIMIT + 1),
    torch.Size([]),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda", 1),
    torch.device("meta"),
]


@pytest.mark.parametrize("obj", SCALARS, ids=lambda obj: f"{type(obj).__name__}-{obj!r:.20}")
def test_scalars_go_round(obj: object) -> None:
    encoded, result = round_trip(obj, plain_only=True)
    assert encoded.value.encoding == PLAIN
    assert type(result) is type(obj)
    assert result == obj
    assert repr(result) == repr(obj)  # tells -0.0 from 0.0


def test_nan_goes_round() -> None:
    assert math.isnan(round_trip(math.nan)[1])


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=40,
)


@settings(max_examples=num_examples(100, 300), deadline=None)
@given(plain_values)
@example(())
@example({})
@example(((), {}))
@example({(1, "a"): [(), {}, [[]]]})
@example(tuple(range(15)))
@example(tuple(range(16)))
@example({n: n for n in range(15)})
@example({n: n for n in range(16)})
def test_containers_go_round(obj: object) -> None:
    for plain_only in (False, True):
        _, result = round_trip(obj, plain_only=plain_only)
        assert result == obj
        assert repr(result) == repr(obj)


def test_dicts_keep_their_order() -> None:
    assert list(round_trip({"b": 1, "a": 2}, plain_only=True)[1]) == ["b", "a"]


def test_identity_and_cycles_are_kept() -> None:
    shared: list[Any] = [1]
    raw = bytearray(b"x")
    mapping: dict[str, Any] = {"shared": shared, "raw": raw}
    mapping["self"] = mapping
    shared.append(mapping)
    tensor = torch.ones(2)
    _, result = round_trip((shared, mapping, raw, tensor, [tensor]), plain_only=True)
    assert result[0][1] is result[1]
    assert result[1]["self"] is result[1]
    assert result[1]["shared"] is result[0]
    assert result[1]["raw"] is result[2]
    assert result[3] is result[4][0]


def test_long_and_deep_values_are_pickled_unless_only_plain_ones_may_pass() -> None:
    numbers = list(range(1000))
    assert encode(numbers).value.encoding == PICKLE
    assert encode(numbers, plain_only=True).value.encoding == PLAIN
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    assert encode(deep).value.encoding == PICKLE
    assert round_trip(deep)[1] == deep
    with pytest.raises(SerializationError, match=f"nested deeper than {MAX_DEPTH}"):
        encode(deep, plain_only=True)


def test_many_parts_are_refused_where_only_plain_values_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ITEMS", 300_000)
    twice: tuple[Any, ...] = ()
    for _ in range(40):
        twice = (twice, twice)  # a trillion parts in 40 objects
    with pytest.raises(SerializationError, match=r"more than \d+ parts, the limit without pickle"):
        encode(twice, plain_only=True)


def iter_of_nothing() -> Iterator[int]:
    """A generator, which nothing can send."""
    yield from ()


Point = collections.namedtuple("Point", "x y")


class Number(int):
    pass


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        ({1, 2}, r"value is a builtins\.set,"),
        (([{"x": {3}}], {}), r"value\[0\]\[0\]\['x'\] is a builtins\.set"),
        (Point(1, 2), r"Point"),
        ([Number(3)], r"value\[0\] is a .*Number"),
        ({frozenset(): 1}, r"value\.key\(frozenset\(\)\)"),
        ((torch.ones(2).to_sparse(),), r"value\[0\] is a tensor of torch\.sparse_coo"),
        ((Box("b"),), r"Box"),
    ],
    ids=short_repr,
)
def test_what_is_not_plain_is_refused_by_its_path(obj: object, where: str) -> None:
    with pytest.raises(SerializationError, match=where):
        encode(obj, plain_only=True)


def test_subclasses_keep_their_type() -> None:
    for obj in (Point(1, 2), Number(3), collections.OrderedDict(a=1), [Number(3)]):
        encoded, result = round_trip(obj)
        assert encoded.value.encoding == PICKLE
        assert type(result) is type(obj)
        assert result == obj


def test_a_pickle_is_refused_where_only_plain_values_may_pass() -> None:
    with pytest.raises(SerializationError, match="may send plain values only"):
        decode(encode({1}).value, plain_only=True)


def test_an_unknown_encoding_is_refused() -> None:
    value = value_pb2.Value(body=b"\0")
    value.encoding = 7  # type: ignore[assignment]
    with pytest.raises(SerializationError, match="encoding 7"):
        decode(value)


def test_encode_into_writes_a_submessage_and_leaves_it_empty_after_an_error() -> None:
    value = value_pb2.Value()
    assert encode_into(value, ("a", torch.ones(2))) == []
    assert decode(value)[0] == "a"  # type: ignore[index]
    broken = value_pb2.Value()
    with pytest.raises(TypeError):
        encode_into(broken, (torch.ones(2), b"x" * 100_000, iter_of_nothing()))
    assert broken == value_pb2.Value()


def arrived_box(shared: list[Box], index: int) -> Box:
    return Box(shared[index].name)


def test_references_go_round_in_both_encodings() -> None:
    first, second = Box("first"), Box("second")
    for obj in ((first, [second, {"k": first}]), (first, [second, {"k": first}], {1}), [*range(100), first]):
        shared: list[Box] = []
        encoded = encode(obj, shared)
        result: Any = decode(wire(encoded), internalize=partial(arrived_box, shared))
        if isinstance(obj, list):
            assert result[-1].name == "first"
            continue
        assert [box.name for box in shared] == ["first", "second"]
        assert (result[0].name, result[1][0].name, result[1][1]["k"].name) == ("first", "second", "first")


def test_no_reference_is_shared_when_the_value_cannot_be() -> None:
    for obj in ((Box("b"), iter_of_nothing()), (Box("b"), torch.ones(2, device="meta"), {1}, iter_of_nothing())):
        shared: list[Box] = []
        with pytest.raises(TypeError):
            encode(obj, shared)
        assert shared == []


def test_references_are_refused_where_there_are_none() -> None:
    for obj in ((Box("b"),), (Box("b"), {1})):
        with pytest.raises(SerializationError, match="remote reference"):
            decode(encode(obj, []).value)


def test_a_large_body_travels_beside_the_message() -> None:
    obj = [f"text {n} " * 8 for n in range(2000)]
    for plain_only in (True, False):
        encoded, result = round_trip(obj, plain_only=plain_only)
        assert result == obj
        assert encoded.value.ByteSize() < 100
        assert [buffer.size for buffer in encoded.value.buffers if buffer.size] == [
            buffer.size for buffer in encoded.large
        ]


# Hostile bytes


def decode_whatever(body: bytes, **parts: Any) -> None:
    try:
        read_plain(body, parts.get("tensors", []), parts.get("buffers", []), None)
    except SerializationError:
        pass


@settings(max_examples=num_examples(500, 1500), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60))
def test_random_bodies_never_crash(body: bytes) -> None:
    decode_whatever(body, tensors=[torch.ones(1)], buffers=[b"abc"])


@settings(max_examples=num_examples(200, 1000), deadline=None)
@given(plain_values, st.data())
def test_damaged_bodies_never_crash(obj: object, data: st.DataObject) -> None:
    body = bytearray(encode(obj, plain_only=True).value.body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    decode_whatever(bytes(body))
    decode_whatever(bytes(body[:cut]))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_messages_never_crash(data: bytes) -> None:
    try:
        value = value_pb2.Value.FromString(data)
    except Exception:
        return
    value.encoding = PLAIN
    try:
        decode(value, plain_only=True)
    except SerializationError:
        pass


LENGTH = struct.Struct("<I").pack

HOSTILE = {
    "nothing": b"",
    "left over": b"\x01\x01",
    "unknown tag": b"\xff" + LENGTH(0),
    "endless list": b"\x8c" + LENGTH(2**32 - 1) + b"\x01" * 100,
    "endless dict": b"\x8e" + LENGTH(2**32 - 1) + b"\x01" * 100,
    "endless string": b"\x88" + LENGTH(2**32 - 1) + b"x",
    "endless integer": b"\x84" + LENGTH(2**32 - 1) + b"x",
    "cut float": b"\x85\0\0",
    "deep": b"\xa1" * 100_000,
    "deep lists": (b"\x8c" + LENGTH(1)) * 100_000,
    "unhashable key": b"\xb1\x8c" + LENGTH(0) + b"\x01",
    "no such tensor": b"\xc5",
    "no such tensor, long": b"\x90" + LENGTH(9),
    "no such object": b"\x92" + LENGTH(0),
    "no such buffer": b"\x96" + LENGTH(3),
    "no references": b"\x91" + LENGTH(0),
    "no such dtype": b"\x93\xee",
    "no such device": b"\x94\x04warp",
    "bad text": b"\x87\x01\xff",
    "size of text": b"\x8f" + LENGTH(1) + b"\x87\x01a",
    "one buffer twice": b"\xa2" + (b"\x96" + LENGTH(0)) * 2,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(SerializationError):
        read_plain(body, [], [b"abc"], None)


@pytest.mark.parametrize("count", [40_000, 400_000, 2 << 20])
def test_many_small_objects_are_refused(count: int) -> None:
    """Each byte is an empty dict, which takes 72."""
    body = b"\x8c" + LENGTH(count) + b"\xb0" * count
    with pytest.raises(SerializationError, match="would take more than"):
        read_plain(body, [], [], None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [True] * 300_000,
        lambda: list(range(1000, 501_000)),
        lambda: {f"{number:x}": number for number in range(150_000)},
        lambda: [[number, None] for number in range(100_000)],
        lambda: [0.5] * 500_000,
        lambda: ["a longer text " * 4] * 500_000,
    ],
    ids=["bools", "numbers", "dict", "lists", "floats", "texts"],
)
def test_large_values_of_honest_programs_pass_without_pickle(make: Callable[[], object]) -> None:
    value = make()
    assert round_trip(value, plain_only=True)[1] == value


@pytest.mark.parametrize(
    "make",
    [
        lambda: [{} for _ in range(400_000)],
        lambda: [None] * 1_500_000,
        lambda: [()] * 500_000,
        lambda: ["x" * 200_000 + "\U0001f600"] * 3,
        lambda: "\u0416" * 1_000_000,
        lambda: {number: () for number in range(50_000)},
        lambda: [[[[]]] for _ in range(30_000)],
        lambda: (torch.zeros(0),) * 100_000,
        lambda: [torch.zeros(index % 5 + 1, 1) for index in range(5_000)],
        lambda: [torch.Size([1, 2, 3])] * 50_000,
    ],
    ids=["dicts", "None", "tuples", "emoji", "Cyrillic", "numbers to ()", "nested", "one tensor", "tensors", "sizes"],
)
def test_what_takes_much_for_its_size_is_sent_with_enough_weight(make: Callable[[], object]) -> None:
    value = make()
    encoded = encode(value, plain_only=True)
    message = parsed(value_pb2.Value, encoded.value.SerializeToString())
    received = decode(message, [copy_of(buffer) for buffer in encoded.large], plain_only=True)
    assert str(received) == str(value)


def test_buffers_that_did_not_arrive_as_announced_are_refused() -> None:
    value = encode("x" * 100_000).value
    for large in ([], [ReceiveBuffer.allocate(5)], [ReceiveBuffer.allocate(100_000)] * 2):
        with pytest.raises(SerializationError, match="arrive"):
            decode(value, large)
    value.body_buffer = 9
    with pytest.raises(SerializationError, match="body is missing"):
        decode(value, [ReceiveBuffer.allocate(100_000)])


def test_impossible_sizes_are_refused() -> None:
    for size in (-1, 2**62):
        with pytest.raises(SerializationError, match="no buffer can be that large"):
            ReceiveBuffer.allocate(size)
    with pytest.raises(
        SerializationError, match=rf"{2**47} bytes does not fit into memory, of which \d+ bytes are free"
    ):
        ReceiveBuffer.allocate(2**47)
