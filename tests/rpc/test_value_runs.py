"""Many small tensors in one value: they travel as runs, and arrive as if each had travelled alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from struct import pack
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import copy_of, received_buffers
from rpcdist.rpc._values.codec import decode, encode_into, write_plain
from rpcdist.rpc._values.compact import compact_value
from rpcdist.rpc._values.plain import MAX_LISTED
from rpcdist.rpc._values.rebuild import MAX_UNTRUSTED_TENSORS, rebuild_tensors
from rpcdist.rpc._values.tensor_runs import _DTYPES, PAUSED_FROM, RUNS_FROM, find_runs, paused_collections

COUNT = 2 * RUNS_FROM


def echo(value: object, plain_only: bool = False) -> tuple[value_pb2.Value, list[Any]]:
    """The sent and the received values."""
    message = value_pb2.Value()
    large = encode_into(message, value, plain_only=plain_only)
    arrived = decode(message, [copy_of(buffer) for buffer in large], plain_only=plain_only)
    assert isinstance(arrived, list)
    return message, arrived


@pytest.mark.parametrize("plain_only", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_a_run_has_one_header_and_one_buffer(shape: tuple[int, ...], plain_only: bool) -> None:
    sent = [torch.full(shape, float(index)) for index in range(COUNT)]
    message, arrived = echo(sent, plain_only)
    assert len(message.tensors) == 1
    assert message.tensors[0].run == COUNT
    for before, after in zip(sent, arrived, strict=True):
        assert after.shape == before.shape
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


@pytest.mark.parametrize("dtype", sorted(_DTYPES, key=str), ids=str)
def test_every_dtype_of_runs(dtype: torch.dtype) -> None:
    sent = [torch.tensor([index % 2, 1], dtype=dtype) for index in range(COUNT)]
    message, arrived = echo(sent)
    assert len(message.tensors) == 1
    assert all(after.dtype is dtype and torch.equal(before, after) for before, after in zip(sent, arrived, strict=True))


def test_tensors_of_a_run_are_ordinary_ones() -> None:
    _, arrived = echo([torch.ones(2) for _ in range(20_000)])  # more than travels inside the message
    first, second = arrived[:2]
    assert first._base is None
    assert first.untyped_storage().nbytes() == 8
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    first.resize_(100).fill_(7.0)
    first.requires_grad_().sum().backward()
    version = second._version
    arrived[2].add_(1)
    assert second._version == version
    assert torch.equal(second, torch.ones(2))


def test_runs_keep_order_kind_and_requires_grad() -> None:
    sent: list[torch.Tensor] = [torch.full((1,), float(index)) for index in range(COUNT)]
    sent += [torch.tensor([index]) for index in range(COUNT)]
    sent += [torch.rand(1000), torch.rand(20_000)]  # large ones go alone
    sent += [torch.rand(3, requires_grad=True) for _ in range(COUNT)]
    sent += [Parameter(torch.rand(3), requires_grad=index % 2 == 0) for index in range(COUNT)]
    message, arrived = echo(sent)
    assert len(message.tensors) == 4 + 1 + COUNT  # the parameters differ from one to the next
    for before, after in zip(sent, arrived, strict=True):
        assert type(after) is type(before)
        assert after.requires_grad == before.requires_grad
        assert after.is_leaf
        assert torch.equal(after, before)


def test_memory_that_is_shared_stays_shared() -> None:
    base = torch.zeros(COUNT)
    tensors = [base.narrow(0, index, min(2, COUNT - index)) for index in range(COUNT)]
    assert find_runs(tensors) is None
    _, arrived = echo(tensors)
    arrived[0][1] = 5.0
    assert arrived[1][0] == 5.0


def test_freed_memory_is_refused() -> None:
    sent = [torch.ones(1) for _ in range(COUNT)]
    sent[3].untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="was freed or shrunk"):
        echo(sent)


@pytest.mark.parametrize("num_elements", [1, 4, 5, 200])
def test_shrunk_memory_is_not_read_beyond_its_end(num_elements: int) -> None:
    """Of up to 16 bytes, what is allocated is never less than the tensor."""
    sent = [torch.ones(num_elements) for _ in range(COUNT)]
    sent[3].untyped_storage().resize_(2)
    if num_elements <= 4:
        assert len(echo(sent)[1]) == COUNT
    else:
        with pytest.raises(SerializationError, match="was freed or shrunk"):
            echo(sent)


def test_small_tensors_inside_of_memory_that_was_shrunk_are_refused() -> None:
    base = torch.ones(COUNT + 1)
    sent = [base[index] for index in range(1, COUNT + 1)]
    base.untyped_storage().resize_(8)
    with pytest.raises(SerializationError, match="was freed or shrunk"):
        echo(sent)


@pytest.mark.parametrize("num_bytes", [0, 64])
def test_small_aligned_tensors_inside_of_memory_that_was_shrunk_are_refused(num_bytes: int) -> None:
    """As the slices of a flat parameter that was freed: they would be read, and the process would end by SIGSEGV."""
    base = torch.ones(16 * (COUNT + 1))
    sent = list(base.view(COUNT + 1, 16)[1:, :4].unbind())
    base.untyped_storage().resize_(num_bytes)
    with pytest.raises(SerializationError, match="was freed or shrunk"):
        echo(sent)


def test_a_long_list_of_tensors_needs_no_pickle() -> None:
    sent = [torch.full((1,), float(index)) for index in range(COUNT)]
    message, arrived = echo([sent, 7, sent])
    assert message.encoding == value_pb2.Value.PLAIN
    assert len(message.body) < 64
    writer = write_plain(sent)
    assert writer is not None and compact_value(writer) is None  # which has an entry for each
    assert arrived[0] is arrived[2]
    assert [tensor.item() for tensor in arrived[0]] == list(range(COUNT))


def test_a_list_that_has_a_tensor_twice_keeps_that() -> None:
    sent = [torch.full((1,), float(index)) for index in range(COUNT)]
    sent[5] = sent[COUNT - 1]
    message, arrived = echo(sent)
    assert message.encoding == value_pb2.Value.PICKLE
    assert arrived[5] is arrived[COUNT - 1]


@pytest.mark.parametrize("other", [lambda sent: sent[3], lambda sent: sent[3].view(1, 1), lambda sent: sent[3:9]])
def test_a_tensor_of_a_list_that_is_also_elsewhere_is_the_same_there(
    other: Callable[[list[torch.Tensor]], object],
) -> None:
    sent = [torch.full((1,), float(index)) for index in range(COUNT)]
    _, arrived = echo([sent, other(sent)])
    there = arrived[1][0] if isinstance(arrived[1], list) else arrived[1]
    there.fill_(77.0)
    assert arrived[0][3].item() == 77.0


def test_lists_of_what_is_not_simple_arrive_as_they_were() -> None:
    views = torch.arange(2.0 * COUNT).view(COUNT, 2)
    conjugate = torch.ones(COUNT, dtype=torch.complex64).conj()
    kinds: list[list[torch.Tensor]] = [
        [views[index, :1] for index in range(COUNT)],  # apart, in one memory: as many memories at the receiver
        [views.T[:, index] for index in range(COUNT)],
        [torch.empty(0) for _ in range(COUNT)],
        [torch.ones(index % 3 + 1) for index in range(COUNT)],
        [torch.ones(2, 2).T if index % 2 else torch.ones(2, 2) for index in range(COUNT)],
        [conjugate[index].imag for index in range(COUNT)],
        [torch.ones(1, dtype=torch.float32 if index else torch.float64) for index in range(COUNT)],
        [torch.ones(1, requires_grad=index % 2 == 0) for index in range(COUNT)],
        [torch.ones(1, device="meta") for _ in range(COUNT)],
        [torch.ones(3).to_sparse() if index == 5 else torch.ones(3) for index in range(COUNT)],
    ]
    for sent in kinds:
        arrived: Any = echo([sent])[1][0]
        for before, after in zip(sent, arrived, strict=True):
            assert (before.dtype, before.shape, before.requires_grad) == (after.dtype, after.shape, after.requires_grad)
            assert before.is_meta or torch.equal(before.to_dense(), after.to_dense())


@pytest.mark.parametrize("count", [0, COUNT + 1, 1 << 31])
@pytest.mark.parametrize("start", [0, 1, 1 << 31])
def test_lists_of_tensors_that_are_not_there_are_refused(count: int, start: int) -> None:
    message = value_pb2.Value()
    encode_into(message, [torch.ones(1) for _ in range(COUNT)])
    at = message.body.index(pack("<II", COUNT, 0))
    if count:
        message.body = message.body[:at] + pack("<II", count, start) + message.body[at + 8 :]
        with pytest.raises(SerializationError, match=r"damaged|would take more than"):
            decode(message)
    else:
        message.body = message.body[:at]
        with pytest.raises(SerializationError, match="damaged"):
            decode(message)


def test_lists_of_tensors_count_as_parts() -> None:
    """A short message could ask for any amount of memory else."""
    message = value_pb2.Value()
    encode_into(message, [[torch.ones(1) for _ in range(COUNT)]])
    listed = message.body[message.body.index(pack("<II", COUNT, 0)) - 1 :]
    times = 1 + MAX_LISTED // COUNT
    message.body = pack("<BI", 0x8D, times) + times * listed  # a tuple of as many lists
    with pytest.raises(SerializationError, match="would take more than"):
        decode(message)


def test_collections_pause_while_very_many_are_made() -> None:
    before, began = gc.get_threshold(), []

    def count(phase: str, info: dict[str, int]) -> None:
        began.append(phase)

    message = value_pb2.Value()
    large = encode_into(message, [torch.ones(1) for _ in range(PAUSED_FROM)])
    received = [copy_of(buffer) for buffer in large]
    gc.collect()
    gc.callbacks.append(count)
    try:
        tensors = rebuild_tensors(message, received_buffers(message, received))
    finally:
        gc.callbacks.remove(count)
    assert len(tensors) == PAUSED_FROM and gc.get_threshold() == before
    assert len(began) <= 2 * 3


def test_thresholds_that_others_set_meanwhile_stay() -> None:
    before = gc.get_threshold()
    try:
        with paused_collections(), paused_collections():
            gc.set_threshold(1234, 5, 6)
        assert gc.get_threshold() == (1234, 5, 6)
    finally:
        gc.set_threshold(*before)
    with pytest.raises(MemoryError), paused_collections():
        raise MemoryError
    assert gc.get_threshold() == before


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    before = gc.get_threshold()
    with paused_collections():
        child = os.fork()
        if not child:
            os._exit(0 if gc.get_threshold() == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    "change",
    [
        {"run": COUNT + 1},
        {"run": 1 << 31},
        {"dtype": 999},
        {"buffer": 1},
        {"offset": 4},
        {"stride": [1]},
        {"device": "meta"},
        {"shape": [0]},
        {"shape": [-1]},
        {"shape": [1 << 62]},
        {"dtype": 5, "requires_grad": True},
    ],
    ids=str,
)
def test_damaged_runs_are_refused(change: dict[str, object]) -> None:
    message = value_pb2.Value()
    encode_into(message, [torch.ones(1) for _ in range(COUNT)])
    for name in change:
        message.tensors[0].ClearField(name)
    message.tensors[0].MergeFrom(value_pb2.Tensor(**change))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match="arrived"):
        decode(message)


def test_two_runs_cannot_claim_one_buffer() -> None:
    message = value_pb2.Value()
    encode_into(message, [torch.ones(1) for _ in range(COUNT)])
    message.tensors.add().CopyFrom(message.tensors[0])
    with pytest.raises(SerializationError, match="damaged"):
        decode(message)


@pytest.mark.parametrize(("count", "size"), [(MAX_UNTRUSTED_TENSORS + 1, 1000), (20_000, 1)])
def test_runs_count_against_the_limit_of_strangers(count: int, size: int) -> None:
    message = value_pb2.Value()
    run = message.tensors.add(dtype=8, shape=[size], run=count)
    message.buffers.add(inline=bytes(run.run * size))
    text = f"value of {count} tensors" if size > 1 else "would take more than"
    with pytest.raises(SerializationError, match=text):
        decode(message, plain_only=True)
