"""The messages of a backward pass arrive as they were sent, and damage is named."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rpcdist._proto import value_pb2
from rpcdist.autograd import _pass_message as pass_message
from rpcdist.autograd._pass_message import PassMessage, UnknownMessages, begins, read_message
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, copy_of
from rpcdist.rpc._values.codec import decode
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.transport._framing.frames import parse, pass_frame
from rpcdist.transport.wire_messages import CompactPass

SENDER = 3
ONE = torch.rand(2, 3)
LARGE = torch.rand(INLINE_LIMIT // 4 + 1)
SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
FLAGS = ("begins", "is_child", "fast", "retain_graph", "is_done", "is_heavy", "follows")
HEAD = struct.Struct("<HQ6I")


def sends(*counts: int, to: int = SENDER) -> Any:
    """Messages 1, 2, ... of so many tensors that were sent to a worker."""
    return {
        id: SimpleNamespace(to=to, node=SimpleNamespace(next_functions=(None,) * count), devices=None)
        for id, count in enumerate(counts, 1)
    }


def with_gradients(gradients: Sequence[Sequence[Tensor | None]]) -> PassMessage:
    message = PassMessage()
    for id, of_message in enumerate(gradients, 1):
        message.add_gradients(id, of_message)
    return message


def arrived(message: PassMessage, sent: Any, plain_only: bool = False) -> PassMessage:
    part, large, _ = message.encode(7, 9)
    buffers: Any = [copy_of(buffer) for buffer in large]
    if not large:
        [part] = parse(pass_frame(part), [])  # type: ignore[assignment]
    assert isinstance(part, CompactPass) and (part.context, part.backward) == (7, 9)
    assert begins(part, buffers) == message.begins
    found = read_message(part, buffers, SENDER, sent)
    found.read_gradients(plain_only)
    return found


@pytest.mark.parametrize(
    ("gradients", "is_table"),
    [
        ([[ONE]], True),
        ([[ONE, None], [None], [LARGE, None, ONE]], True),
        ([[None]], True),
        ([[ONE.sum().expand(5)], [ONE.t(), ONE[:, 1]]], True),
        ([[ONE], [ONE]], True),
        ([[LARGE, LARGE[5:]]], True),
        ([[ONE[0]]] * 20000, False),  # the message itself becomes a large buffer
        ([[LARGE.sum().expand(LARGE.shape)]], False),
        ([[ONE, None, SPARSE]], False),
        ([[torch.ones(2, dtype=torch.complex64)]], False),
        ([[torch.ones(2, requires_grad=True)]], True),
    ],
)
def test_gradients_come_back(gradients: list[list[Tensor | None]], is_table: bool) -> None:
    message = with_gradients(gradients)
    part, large, _ = message.encode(7, 9)
    assert bool((part.body or bytes(large[0].view))[0] & 128) != is_table
    found = arrived(message, sends(*map(len, gradients)))
    assert [len(of_message) for of_message in found.gradients] == [len(of_message) for of_message in gradients]
    for came, sent in zip(chain.from_iterable(found.gradients), chain.from_iterable(gradients), strict=True):
        assert (came is None) == (sent is None)
        if came is not None and sent is not None:
            assert torch.equal(came.to_dense(), sent.to_dense()) and not came.requires_grad


FIRST_GPU, SECOND_GPU, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


@pytest.mark.parametrize(
    ("gradients", "devices", "named", "gpus"),
    [
        ([[ONE], [LARGE]], [[SECOND_GPU], [SECOND_GPU]], ["cuda:1", "cuda:1"], [1]),
        ([[ONE, LARGE]], None, ["", ""], []),
        ([[LARGE, None, ONE]], [[FIRST_GPU, CPU, SECOND_GPU]], ["cuda:0", "cuda:1"], [0, 1]),
        ([[LARGE], [ONE]], [[CPU], [SECOND_GPU]], ["", "cuda:1"], [1]),
        ([[ONE], [ONE, LARGE]], [[FIRST_GPU], [FIRST_GPU, FIRST_GPU]], ["cuda:0", "cuda:0"], [0]),
        ([[ONE], [ONE]], [[FIRST_GPU], [SECOND_GPU]], ["cuda"], []),  # one object; it is moved later
        ([[SPARSE, ONE]], [[SECOND_GPU, CPU]], ["", "", "cuda:1", "cuda:1"], [1]),
        ([[LARGE]], [[torch.device("meta")]], ["cuda"], []),
    ],
    ids=["one GPU", "CPU", "absent", "both", "same object", "same object on two", "sparse", "elsewhere"],
)
def test_gradients_are_for_the_devices_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch, gradients: Any, devices: Any, named: list[str], gpus: list[int]
) -> None:
    """Their sender does not know the devices; it says only that they are on a GPU."""
    monkeypatch.setattr(pass_message, "compact_tensors", lambda *arguments, **options: None)
    route = DeviceRoute(None, back=True)
    route.moves_cpu = True  # as if all were on a GPU
    sent = sends(*map(len, gradients))
    for id, of_message in enumerate(devices or (), 1):
        sent[id].devices = of_message
    part, large, _ = with_gradients(gradients).encode(7, 9, lambda: route)
    value = pass_message.announced_gradients(part, SENDER, sent)
    assert value is not None
    assert ([header.device for header in value.tensors], list(value.gpus)) == (named, gpus)
    for header in value.tensors:
        header.device = ""
    assert isinstance(decode(value, [copy_of(buffer) for buffer in large]), list)


def test_a_loan_for_the_cpu_is_copied_from_its_gpu_first() -> None:
    value = value_pb2.Value(
        tensors=[value_pb2.Tensor(buffer=0, device="cuda"), value_pb2.Tensor(buffer=7, device="cuda")],
        buffers=[value_pb2.Buffer(size=5, gpu_loan=1)],
    )
    found = pass_message.value_for_devices(value.SerializeToString(), [CPU, CPU])
    assert [header.device for header in found.tensors] == ["cuda", ""]
    found = pass_message.value_for_devices(value.SerializeToString(), [SECOND_GPU, SECOND_GPU])
    assert [header.device for header in found.tensors] == ["cuda:1", "cuda:1"]
    with pytest.raises(SerializationError, match="gradients arrived that cannot be read"):
        pass_message.value_for_devices(b"not a value", [CPU])


def test_messages_without_gradients_in_a_value_announce_none() -> None:
    table, done = with_gradients([[LARGE]]), PassMessage()
    done.is_done = True
    large = with_gradients([[ONE[0]]] * 40000)  # a large buffer itself
    for message, sent in ((table, sends(1)), (done, sends()), (large, sends(*[1] * 40000))):
        assert pass_message.announced_gradients(message.encode(7, 9)[0], SENDER, sent) is None


@given(st.data())
def test_what_is_said_arrives(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 70), max_size=5))
    message = PassMessage()
    for field in FLAGS:
        setattr(message, field, data.draw(st.booleans()))
    message.timeout_us = data.draw(st.integers(0, 2**64 - 1))
    message.follow_up = data.draw(st.none() | st.binary(max_size=40))
    for id, count in enumerate(counts, 1):
        if data.draw(st.booleans()):
            message.verdicts[id] = data.draw(st.none() | st.integers(0, 2**count - 1))
        if count < 4 and data.draw(st.booleans()):
            message.add_gradients(id, [data.draw(st.sampled_from([None, ONE, LARGE])) for _ in range(count)])
    found = arrived(message, sends(*counts), plain_only=True)
    for field in (*FLAGS, "timeout_us", "follow_up", "verdicts", "messages"):
        assert getattr(found, field) == getattr(message, field), field
    assert found.named() == {**dict.fromkeys(message.messages), **message.verdicts}


@pytest.mark.parametrize(
    ("number", "value", "says"),
    [
        (2, 2**32 - 1, "cut off"),
        (5, 2**31, "cut off"),
        (5, 3, "cut off|gradients arrived|bytes|unknown"),
        (6, 2**32 - 1, "cut off"),
        (7, 2**32 - 1, "4294967295 gradients arrived for 3 tensors of 2 messages"),
        (7, 1, "1 gradients arrived for 3 tensors of 2 messages, of which 1 have none"),
        (0, 0, "gradients arrived for"),
    ],
)
def test_numbers_that_are_not_true_are_refused(number: int, value: int, says: str) -> None:
    body = with_gradients([[ONE, None], [ONE]]).encode(7, 9)[0].body
    head = list(HEAD.unpack_from(body))
    head[number] = value
    with pytest.raises((ProtocolViolation, UnknownMessages), match=says):
        read_message(CompactPass(7, 9, HEAD.pack(*head) + body[HEAD.size :]), [], SENDER, sends(2, 1))


def test_a_message_of_another_number_of_tensors_is_refused() -> None:
    part, *_ = with_gradients([[ONE, None], [ONE]]).encode(7, 9)
    with pytest.raises(ProtocolViolation, match="2 gradients arrived for message 0x1, which had 3 tensors"):
        read_message(part, [], SENDER, sends(3, 1))
    for others in ({}, {5: sends(1)[1], 6: sends(1)[1]}):
        with pytest.raises(UnknownMessages, match="2 messages of the autograd context are unknown here"):
            read_message(part, [], SENDER, others)


@pytest.mark.parametrize("mask", [0b10000, 1 << 31, 1 << 100_000], ids=["5 bits", "32 bits", "many bits"])
def test_a_verdict_on_a_tensor_that_was_not_sent_makes_no_bits(mask: int) -> None:
    message = PassMessage()
    message.verdicts = {1: mask}
    with pytest.raises(ProtocolViolation, match=r"message 0x1|for 1 at most"):
        read_message(message.encode(7, 9)[0], [], SENDER, sends(4))


@given(st.integers(0, 200), st.binary(max_size=8))
def test_damaged_bytes_are_refused_or_read(at: int, noise: bytes) -> None:
    message = with_gradients([[ONE, None], [ONE[0]]])
    message.begins, message.verdicts = True, {3: 5, 1: 0}
    body = bytearray(message.encode(7, 9)[0].body)
    body[at : at + len(noise)] = noise
    for data in (bytes(body), bytes(body[:at])):
        try:
            found = read_message(CompactPass(7, 9, data), [], SENDER, sends(2, 1, 3))
            found.read_gradients(True)
        except (ProtocolViolation, SerializationError, UnknownMessages):
            continue
        assert len(found.gradients) == len(found.messages)
