"""Headers of tensors that lie: they are refused, and nothing outside of the buffers that came is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from values_helpers import encode

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.codec import decode

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

BIG = 2**62
HOSTILE: dict[str, dict[str, Any]] = {
    "negative length": {"shape": [-1, 4]},
    "negative stride": {"shape": [2, 2], "stride": [-1, 1]},
    "missing stride": {"shape": [2, 2], "stride": [1]},
    "stride of a scalar": {"stride": [1]},
    "too long": {"shape": [5]},
    "far too long": {"shape": [BIG, BIG]},
    "wraps around to a small size": {"shape": [2**32, 2**32]},
    "stride beyond the buffer": {"shape": [2], "stride": [4]},
    "stride that wraps around": {"shape": [3], "stride": [2**63 - 1]},
    "strides that wrap around together": {"shape": [2, 2], "stride": [2**62, 2**62]},
    "offset beyond the buffer": {"shape": [2], "offset": 12},
    "huge offset": {"shape": [2], "offset": 2**64 - 4},
    "crooked offset": {"shape": [2], "offset": 2},
    "no such buffer": {"shape": [2], "buffer": 1},
    "no such dtype": {"shape": [2], "dtype": 99},
    "dtype too wide": {"shape": [4], "dtype": 1},
    "grad of integers": {"shape": [2], "dtype": 5, "requires_grad": True},
    "parameter of integers": {"shape": [2], "dtype": 5, "requires_grad": True, "parameter": True},
    "no such device": {"shape": [2], "device": "warp:9"},
    "65 dimensions": {"shape": [1] * 65},
    "no elements, but endless": {"shape": [0, BIG, BIG]},
    "no elements, endless stride": {"shape": [0, 3], "stride": [2**63 - 1, 2**63 - 1]},
    "meta and endless": {"shape": [BIG, BIG], "device": "meta"},
    "meta with an endless stride": {"shape": [3, 3], "stride": [BIG, BIG], "device": "meta"},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("large", [False, True], ids=["inline", "large"])
def test_hostile_headers_are_refused(fields: dict[str, Any], large: bool) -> None:
    value = encode(torch.ones(4)).value
    received = []
    if large:
        value.buffers[0].CopyFrom(value_pb2.Buffer(size=16))
        received.append(ReceiveBuffer.allocate(16))
    value.tensors[0].CopyFrom(value_pb2.Tensor(**fields))
    with pytest.raises(SerializationError):
        decode(value_pb2.Value.FromString(value.SerializeToString()), received)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(-2, 6) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.lists(st.integers(-2, 6) | st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.integers(0, 20) | st.integers(0, 2**64 - 1),
    st.integers(0, 48),
    st.booleans(),
)
def test_random_headers_stay_inside_the_buffer(
    shape: list[int], stride: list[int], offset: int, dtype: int, large: bool
) -> None:
    message = value_pb2.Tensor(shape=shape, stride=stride, offset=offset, dtype=dtype)
    buffer = value_pb2.Buffer(size=24) if large else value_pb2.Buffer(inline=bytes(24))
    value = value_pb2.Value(body=encode(torch.ones(4)).value.body, tensors=[message], buffers=[buffer])
    try:
        result = decode(value, [ReceiveBuffer.allocate(24)] if large else [])
    except SerializationError:
        return
    assert isinstance(result, Tensor)
    if result.numel():
        extent = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True)) + 1
        assert (result.storage_offset() + extent) * result.itemsize <= result.untyped_storage().nbytes() <= 24


@pytest.mark.parametrize("part", ["meta", "", "float"])
def test_a_size_consists_of_numbers(part: str) -> None:
    """torch would read the element of a tensor, and raises an error of its own for one on the meta device."""
    value = encode(torch.zeros((), dtype=torch.int64)).value
    value.tensors[0].device = part if part == "meta" else ""
    size = b"\x8f" + (1).to_bytes(4, "little")
    value.body = size + (b"\xc0" if part != "float" else b"\x85" + bytes(8))
    with pytest.raises(SerializationError, match="a part that is not a number"):
        decode(value, plain_only=True)
