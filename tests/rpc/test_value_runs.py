"""Many small tensors in one value: they travel as runs, and arrive as if each had travelled alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.codec import decode, encode_into
from rpcdist.rpc._values.rebuild import MAX_UNTRUSTED_TENSORS
from rpcdist.rpc._values.tensor_runs import _DTYPES, RUNS_FROM, find_runs

COUNT = 2 * RUNS_FROM


def echo(value: object, plain_only: bool = False) -> tuple[value_pb2.Value, list[torch.Tensor]]:
    """What was sent, and what arrived."""
    message = value_pb2.Value()
    large = encode_into(message, value, plain_only=plain_only)
    arrived = decode(message, [buffer.copy() for buffer in large], plain_only=plain_only)
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


def test_runs_count_against_the_limit_of_strangers() -> None:
    message = value_pb2.Value()
    run = message.tensors.add(dtype=8, shape=[1], run=MAX_UNTRUSTED_TENSORS + 1)
    message.buffers.add(inline=bytes(run.run))
    with pytest.raises(SerializationError, match=f"value of {MAX_UNTRUSTED_TENSORS + 1} tensors"):
        decode(message, plain_only=True)
