"""The compact form of values: what has one arrives as it was sent, and damage is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from values_helpers import Box

from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import INLINE_LIMIT, copy_of
from rpcdist.rpc._values.codec import write_plain
from rpcdist.rpc._values.compact import compact_value, read_compact
from rpcdist.rpc._values.tensors import DTYPE_CODES
from rpcdist.transport.memory_copies import LargeBuffer

LARGE = INLINE_LIMIT // 4 + 1  # floats


def compact(obj: object) -> tuple[bytes, list[LargeBuffer], int] | None:
    writer = write_plain(obj, Box)
    value = None if writer is None else compact_value(writer)
    return None if writer is None or value is None else (value[0], list(value[1]), len(writer.tensors))


def round_trip(obj: object) -> Any:
    value = compact(obj)
    assert value is not None
    body, large, num_tensors = value
    return read_compact(body, num_tensors, [copy_of(buffer) for buffer in large])


@pytest.mark.parametrize("value", [None, 1, "text", (1, {"a": [2.5, b"x"]}), [torch.float32, torch.Size([1, 2])]])
def test_values_without_tensors(value: object) -> None:
    assert round_trip(value) == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3),
        torch.zeros(0, 4),
        torch.rand(LARGE),
        torch.rand(INLINE_LIMIT // 4),
        torch.tensor([True, False]),
        torch.rand(3, dtype=torch.bfloat16),
        torch.zeros((1,) * 8),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_tensors(tensor: torch.Tensor) -> None:
    args, kwargs = round_trip(((tensor, 7), {"again": tensor}))
    assert args[1] == 7 and kwargs["again"] is args[0]
    result = args[0]
    assert type(result) is torch.Tensor and result.dtype == tensor.dtype and result.shape == tensor.shape
    assert torch.equal(result, tensor) and result.is_contiguous() and not result.requires_grad
    if result.numel():
        assert result.data_ptr() != tensor.data_ptr()
        result.fill_(0)
        result.resize_(1000)


def test_several_tensors_small_and_large() -> None:
    tensors = [torch.rand(size) for size in (1, LARGE, 0, 2 * LARGE, 5)]
    assert all(map(torch.equal, round_trip(tensors), tensors))


def test_a_tensor_that_arrives_in_inference_mode_is_an_ordinary_one() -> None:
    with torch.inference_mode():
        small, large = round_trip((torch.ones(3), torch.ones(LARGE)))
    assert not small.is_inference() and not large.is_inference()
    small.requires_grad_()
    (small * 2).sum().backward()


def test_tensors_that_require_grad() -> None:
    leaf, other = torch.rand(2, requires_grad=True), torch.rand(LARGE)
    seen: list[bool] = []
    value = compact((leaf, leaf * 2, other))
    assert value is not None
    body, large, num_tensors = value
    buffers = [copy_of(buffer) for buffer in large]
    found: Any = read_compact(
        body, num_tensors, buffers, lambda tensors: seen.extend(one.requires_grad for one in tensors)
    )
    assert seen == [one.requires_grad for one in found] == [True, True, False]
    assert all(one.is_leaf for one in found) and torch.equal(found[1], leaf * 2)


BASE = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "value",
    [
        BASE.t(),
        BASE[:, 1],
        (BASE[:2], BASE[1:]),
        Parameter(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, device="meta"),
        torch.zeros((1,) * 9),
        Box("a reference"),
        b"x" * (INLINE_LIMIT + 1),
        [torch.rand(INLINE_LIMIT // 4) for _ in range(9)],
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_needs_more_has_no_compact_form(value: object) -> None:
    assert compact((value,)) is None


def test_a_tensor_whose_memory_is_gone_is_refused() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="its memory was freed or shrunk"):
        compact(tensor)


# ---------------------------------------------------------------- damage

GOOD = compact((torch.arange(3.0), torch.rand(LARGE), "text"))
assert GOOD is not None
BODY, [SEPARATE], _ = GOOD


@pytest.mark.parametrize(
    ("body", "count", "large", "says"),
    [
        (BODY, 3, 1, "dtype number|rebuilt"),
        (BODY, 1, 1, "1 large buffers arrived for a value that has 0"),
        (BODY, 2, 0, "did not arrive as announced"),
        (BODY, 2, 2, "2 large buffers arrived for a value that has 1"),
        (BODY[:10], 2, 1, "cannot be rebuilt"),
        (BODY[:20], 1, 0, "cut off"),
        (b"\xfe" + BODY[1:], 2, 1, "dtype number 254"),
        (b"\x00\x09" + BODY[2:], 2, 1, "9 dimensions"),
        (b"\x00\x01\x04" + BODY[3:], 2, 1, "flags 4"),
        (bytes([DTYPE_CODES[torch.int32], 0, 2, 0]) + bytes(4), 1, 0, "floating point"),
        (b"\x00\x01\x00\x00" + b"\xff" * 8 + BODY[12:], 2, 1, "tensor of shape"),
        (b"\x00\x01\x00\x00" + b"\xff" * 7 + b"\x7f" + BODY[12:], 2, 1, "more bytes than can be counted"),
        (b"\x00\x01\x01\x00" + bytes(8), 1, 0, "did not arrive as announced"),
        (BODY[:-1], 2, 1, "damaged"),
    ],
)
def test_damage_is_named(body: bytes, count: int, large: int, says: str) -> None:
    buffers = [copy_of(SEPARATE) for _ in range(large)]
    with pytest.raises(SerializationError, match=says):
        read_compact(body, count, buffers)


@given(st.binary(max_size=60), st.integers(0, 3), st.integers(0, 2))
def test_random_bytes_are_a_value_or_damage(body: bytes, count: int, large: int) -> None:
    try:
        read_compact(body, count, [copy_of(SEPARATE) for _ in range(large)])
    except SerializationError as exc:
        assert str(exc)
