"""Tensors on the wire: layouts, aliasing, the bytes that are sent, and what the receiver may do."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
from full_sets import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from values_helpers import encode, round_trip, wire

from rpcdist._proto import value_pb2
from rpcdist.errors import SerializationError
from rpcdist.rpc._values import tensors
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer, copy_of
from rpcdist.rpc._values.codec import decode
from rpcdist.rpc._values.compact import compact_tensors, read_compact_tensors
from rpcdist.rpc._values.tensors import DTYPES, KEPT_HOLES_BYTES
from rpcdist.transport._framing.incoming import MissingBuffer
from rpcdist.transport.memory_copies import LargeBuffer

ALL_DTYPES = list(DTYPES.values())
COMPLEX32 = "ignore:ComplexHalf support is experimental:UserWarning"
pytestmark = pytest.mark.filterwarnings(COMPLEX32)


def raw(tensor: Tensor) -> list[int]:
    """The bytes of the elements, in logical order; defined for every dtype."""
    binding = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    plain = tensor.detach().resolve_conj().resolve_neg().view(binding)
    flat = plain.contiguous().as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def same(left: Tensor, right: Tensor) -> bool:
    return (
        type(left) is type(right)
        and left.dtype is right.dtype
        and left.shape == right.shape
        and left.requires_grad == right.requires_grad
        and raw(left) == raw(right)
    )


def make(dtype: torch.dtype, length: int) -> Tensor:
    """`length` elements of random bits."""
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (length * dtype.itemsize,), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), 0, (length,), (1,))


def sent_bytes(encoded: Any) -> int:
    return sum(buffer.size or len(buffer.inline) for buffer in encoded.value.buffers)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((), (), 0),
        ((), (), 7),
        ((0,), (1,), 0),
        ((3, 0, 2), (2, 2, 1), 1),
        ((24,), (1,), 0),
        ((4, 5), (5, 1), 2),
        ((4, 5), (1, 4), 0),
        ((2, 3), (10, 2), 1),
        ((2, 3, 2), (0, 3, 1), 0),
        ((5, 1, 3), (0, 7, 0), 4),
        ((3, 4), (0, 5), 0),
        ((1, 1), (99, 0), 0),
        ((6, 3), (1, 1), 0),
    ],
    ids=str,
)
def test_every_dtype_and_layout(dtype: torch.dtype, size: Any, stride: Any, offset: int) -> None:
    tensor = make(dtype, 30).as_strided(size, stride, offset)
    encoded, result = round_trip(tensor, plain_only=True)
    assert same(result, tensor)
    repeated = [length for length, step in zip(size, stride, strict=True) if step == 0 and length > 1]
    assert [length for length, step in zip(size, result.stride(), strict=True) if step == 0 and length > 1] == repeated
    assert sent_bytes(encoded) <= max(tensor.nbytes, min(span_bytes(tensor), KEPT_HOLES_BYTES))
    assert not result._is_view()


@settings(max_examples=num_examples(100, 300), deadline=None)
@given(st.data())
def test_random_layouts_and_aliasing(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128]))
    bases = [make(dtype, 64), make(torch.uint8, 256)]
    tensors = []
    for _ in range(data.draw(st.integers(1, 6))):
        base = data.draw(st.sampled_from(bases))
        dims = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3))
        span = sum((n - 1) * step for n, step in dims if n) + 1
        if span > base.numel():
            continue
        offset = data.draw(st.integers(0, base.numel() - span))
        tensors.append(base.as_strided([n for n, _ in dims], [step for _, step in dims], offset))
    encoded, results = round_trip(tensors)
    for tensor, result in zip(tensors, results, strict=True):
        assert same(result, tensor)
    # The elements that were shared are shared: changing one shows in the same places of all tensors.
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        changed = data.draw(st.integers(0, tensor.numel() - 1))
        for group, at in ((tensors, tensor), (results, results[index])):
            place = at[tuple(torch.unravel_index(torch.tensor(changed), at.shape))] if at.dim() else at
            flipped = place.view(torch.uint8) if place.dim() else place.reshape(1).as_strided((1,), (1,))
            bits = torch.empty(0, dtype=torch.uint8).set_(
                flipped.untyped_storage(), flipped.storage_offset() * flipped.itemsize, (1,), (1,)
            )
            bits ^= 255
            del group
        assert [raw(result) for result in results] == [raw(tensor) for tensor in tensors]
    assert len(encoded.value.tensors) == len(tensors)


def shares(left: Tensor, right: Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def test_aliases_stay_aliases() -> None:
    base = torch.arange(40, dtype=torch.float32)
    tensors = (base[5:20], base[10:30].view(4, 5), base[38:], torch.ones(3))
    encoded, results = round_trip(tensors)
    assert shares(results[0], results[1])
    assert not any(shares(left, right) for left, right in combinations(results[1:], 2))
    assert results[1].data_ptr() - results[0].data_ptr() == 5 * 4
    assert len(encoded.value.buffers) == 3
    assert sent_bytes(encoded) == (25 + 2 + 3) * 4
    results[0].zero_()
    assert results[1].flatten()[:10].tolist() == [0.0] * 10


def test_the_same_memory_twice() -> None:
    wide = torch.randn(50, 400)
    for tensor in (wide, wide[:, 7]):
        encoded, (first, second, third) = round_trip((tensor, tensor, tensor.detach()))
        assert first is second
        assert shares(first, third)
        assert first.data_ptr() == third.data_ptr()
        assert sent_bytes(encoded) == tensor.nbytes


def test_views_of_other_dtypes_share_too() -> None:
    ints = torch.arange(8, dtype=torch.int32)
    _, (left, right, odd) = round_trip((ints.view(torch.uint8)[1:20], ints[2:], ints.view(torch.int16)[3:9]))
    assert shares(left, right) and shares(left, odd)
    left.fill_(255)
    assert right[0].item() == -1


def test_only_what_a_view_needs_is_sent() -> None:
    wide = torch.randn(100, 1000)
    cases = {
        "rows": (wide[10:20], 10 * 1000 * 4),
        "most rows": (wide[:60], 60 * 1000 * 4),
        "column": (wide[:, 3], 100 * 4),
        "block": (wide[20:40, 10:15], 20 * 5 * 4),
        "transposed": (wide.t(), 100 * 1000 * 4),
        "transposed block": (wide.t()[5:9], 4 * 100 * 4),
        "expanded": (torch.ones(1).expand(10_000), 4),
        "expanded column": (wide[:, 3:4].expand(100, 50), 100 * 4),
        "window": (torch.arange(100).unfold(0, 10, 1), 100 * 8),
        "two columns": ((wide[:, 3], wide[:, 4]), 2 * 100 * 4),
        "columns of two types": ((wide[:, 3], wide.view(torch.int16)[:, 100:102]), 2 * 100 * 4),
        "overlapping blocks": ((wide[:, 3:5], wide[:, 4:6]), (99 * 1000 + 3) * 4),
        "rows twice": ((wide[0:2], wide[1:3]), 3 * 1000 * 4),
    }
    for name, (obj, expected) in cases.items():
        encoded, result = round_trip(obj)
        assert sent_bytes(encoded) == expected, name
        for left, right in zip(
            *((item if isinstance(item, tuple) else (item,)) for item in (obj, result)), strict=True
        ):
            assert torch.equal(left, right), name


def span_bytes(tensor: torch.Tensor) -> int:
    """From the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def test_dense_strides_are_kept() -> None:
    for tensor in (torch.randn(3, 20).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)):
        assert round_trip(tensor)[1].stride() == tensor.stride()
    assert round_trip(torch.randn(400, 9).t()[2:7])[1].stride() == (1, 5)  # compacted, in the order that it had
    assert round_trip(torch.randn(5, 5).narrow(1, 2, 2))[1].stride() == (5, 1)  # too small for that


def test_large_tensors_are_not_copied() -> None:
    tensor = torch.randn(INLINE_LIMIT)
    encoded = encode((tensor, tensor[5:]))
    (buffer,) = encoded.large
    assert encoded.value.ByteSize() < 100
    assert buffer.size == tensor.nbytes
    tensor[0] = 42  # it is the tensor's own memory
    assert bytes(buffer.view[:4]) == tensor[:1].numpy().tobytes()
    received = ReceiveBuffer.allocate(buffer.size)
    received.view[:] = buffer.view
    results: Any = decode(wire(encoded), [received])
    assert results[0].data_ptr() == received.memory.data_ptr()
    assert torch.equal(results[1], tensor[5:])


def test_the_limit_between_inline_and_large() -> None:
    assert encode(torch.empty(INLINE_LIMIT, dtype=torch.uint8)).large == []
    assert [b.size for b in encode(torch.empty(INLINE_LIMIT + 1, dtype=torch.uint8)).large] == [INLINE_LIMIT + 1]


def test_views_keep_their_memory_alive() -> None:
    tensor = torch.randn(INLINE_LIMIT)
    alive = weakref.ref(tensor)
    part = encode(tensor).large[0].view[4:8]
    expected = tensor[1].item()
    del tensor
    gc.collect()
    assert alive() is not None
    assert torch.frombuffer(bytearray(part), dtype=torch.float32).item() == expected
    del part
    gc.collect()
    assert alive() is None

    received = ReceiveBuffer.allocate(100_000)
    memory = weakref.ref(received.memory)
    view = received.view
    del received
    assert memory() is not None
    view[99_999] = 1
    del view
    assert memory() is None


def test_received_tensors_can_be_used_in_place_and_resized() -> None:
    large = torch.randn(INLINE_LIMIT)
    for obj in ((torch.ones(4), torch.ones(2)), torch.split(torch.ones(6)[2:], 2), (large[:-1], large[1:])):
        for result in round_trip(tuple(obj))[1]:
            assert result.is_leaf and result._version <= 1 and not result._is_view()
            result.add_(1)
            weight = torch.ones((), requires_grad=True)
            copied = result.mul_(weight)
            copied.sum().backward()
            assert weight.grad is not None
        fresh = round_trip(tuple(obj))[1][0]
        fresh.resize_(10 * fresh.numel())


def test_requires_grad_and_parameters() -> None:
    leaf = torch.ones(2, requires_grad=True)
    parameter = nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    _, result = round_trip((leaf, leaf * 2, parameter, frozen, torch.ones(1)), plain_only=True)
    assert [t.requires_grad for t in result] == [True, True, True, False, False]
    assert [type(t) for t in result] == [Tensor, Tensor, nn.Parameter, nn.Parameter, Tensor]
    assert all(t.is_leaf for t in result)
    with torch.no_grad():
        assert round_trip(leaf)[1].requires_grad


def test_modules_keep_tied_weights() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    _, result = round_trip(module)
    assert result[1].weight is result[0].weight
    assert isinstance(result[0].weight, nn.Parameter)
    for left, right in zip(module.state_dict().values(), result.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    result(torch.ones(2, 3)).sum().backward()


def test_conjugate_and_negative_views() -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    for tensor in (numbers.conj(), numbers.t().conj(), numbers.conj().imag, numbers.conj()[:, 1]):
        assert torch.equal(round_trip(tensor)[1], tensor)


def test_inference_tensors_and_inference_mode() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        encoded = encode((tensor, torch.ones(INLINE_LIMIT)))
        results: Any = decode(wire(encoded), [copy_of(buffer) for buffer in encoded.large])
    for result in results:
        assert not result.is_inference()
        (result * torch.ones((), requires_grad=True)).sum().backward()


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        ones = torch.ones(4, 9, device="cpu")
        _, result = round_trip((torch.ones(2, device="cpu"), ones[:, :2], ones.to_sparse(), torch.nn.Parameter(ones)))
    assert [t.device.type for t in result] == ["cpu"] * 4
    assert result[0].tolist() == [1, 1]
    assert torch.equal(result[2].to_dense(), torch.ones(4, 9))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[0, 1.5], [2, 0]]).to_sparse(),
        torch.tensor([[0, 1.5], [2, 0]]).to_sparse().coalesce(),
        torch.tensor([[0, 1.5], [2, 0]]).to_sparse().requires_grad_(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=False),
        torch.zeros(2, 3).to_sparse(),
    ],
    ids=["coo", "coalesced", "requires_grad", "duplicates", "empty"],
)
def test_sparse_tensors(tensor: Tensor) -> None:
    _, result = round_trip(tensor)
    assert result.layout is tensor.layout
    assert result.is_coalesced() == tensor.is_coalesced()
    assert result.requires_grad == tensor.requires_grad
    assert torch.equal(result.detach().to_dense(), tensor.detach().to_dense())


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_compressed_sparse_tensors(layout: torch.layout) -> None:
    dense = torch.tensor([[0, 1.5], [2, 0]])
    tensor = dense.to_sparse(layout=layout, blocksize=(1, 1) if "bs" in str(layout) else None)
    _, result = round_trip(tensor)
    assert result.layout is layout
    assert torch.equal(result.to_dense(), dense)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_quantized_tensors() -> None:
    numbers = torch.randn(4, 6)
    for tensor in (
        torch.quantize_per_tensor(numbers, 0.1, 3, torch.quint8),
        torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint32).t(),
        torch.quantize_per_channel(numbers, torch.full((6,), 0.2), torch.zeros(6, dtype=torch.int64), 1, torch.qint8),
    ):
        _, result = round_trip(tensor)
        assert result.dtype is tensor.dtype
        assert torch.equal(result, tensor)


def test_meta_and_nested_tensors() -> None:
    meta = torch.empty(2**20, 2**20, device="meta")[:, 3:]
    _, result = round_trip(meta, plain_only=True)
    assert (result.device, result.shape, result.stride()) == (meta.device, meta.shape, meta.stride())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    _, result = round_trip(nested)
    assert [part.tolist() for part in result.unbind()] == [[1, 1], [0, 0, 0]]


class Named(Tensor):
    label: str


def test_tensor_subclasses_and_storages_share_memory() -> None:
    base = torch.arange(20, dtype=torch.float32)
    named = base[5:10].as_subclass(Named)
    named.label = "five"
    _, result = round_trip((named, base, base.untyped_storage(), copy.copy(named)))
    assert type(result[0]) is Named and result[0].label == "five"
    assert torch.equal(result[0].as_subclass(Tensor), base[5:10])
    result[1].zero_()
    assert result[0].as_subclass(Tensor).tolist() == [0.0] * 5
    assert result[2].nbytes() == 80 and result[2].data_ptr() == result[1].data_ptr()


def test_numpy_shares_nothing_but_memory_with_the_sender() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(50_000.0)
    _, result = round_trip((torch.from_numpy(array), torch.from_numpy(array[10:])))
    assert shares(*result)
    assert torch.equal(result[1], torch.from_numpy(array[10:]))


def test_memory_that_is_gone_is_refused() -> None:
    tensor = torch.ones(10)
    part = tensor[4:]
    tensor.untyped_storage().resize_(0)
    for gone in (part, tensor, torch._efficientzerotensor((3,))):
        with pytest.raises(SerializationError, match="freed"):
            encode(gone)


def test_functorch_wrappers_are_refused() -> None:
    caught: list[str] = []

    def attempt(tensor: Tensor) -> Tensor:
        with pytest.raises(SerializationError) as error:
            encode(tensor)
        caught.append(str(error.value))
        return tensor

    torch.vmap(attempt)(torch.ones(3, 2))
    assert "without memory of its own" in caught[0]


class OnDevice:
    """A tensor as it looks on a machine with a GPU: enough of one to see what is sent."""

    def __init__(self, tensor: Tensor, device: str) -> None:
        self.tensor = tensor
        self.device = torch.device(device)


def routed(tensor: Any, route: tensors.DeviceRoute | None) -> tuple[Tensor, value_pb2.Tensor, list[int]]:
    """The tensor that is sent in its place, its description, and the GPUs of the receiver that the message names."""
    value, message = value_pb2.Value(), value_pb2.Tensor()
    return tensors._routed(value, message, tensor, route), message, list(value.gpus)


def test_other_devices_need_a_route() -> None:
    tensor: Any = OnDevice(torch.ones(2), "cuda:1")
    tensor.detach = lambda: tensor.tensor
    with pytest.raises(SerializationError, match=r"tensor on cuda:1 cannot be sent here; send `tensor.cpu"):
        routed(tensor, None)
    to_next = tensors.DeviceRoute(lambda device: torch.device("cuda", (device.index or 0) + 1))
    there, message, gpus = routed(tensor, to_next)
    assert (message.device, message.unmapped, gpus) == ("cuda:2", False, [2])
    assert there.tolist() == [1, 1]
    _, message, gpus = routed(tensor, tensors.DeviceRoute(None))
    assert (message.device, message.unmapped, gpus) == ("cuda:1", True, [1])
    _, message, gpus = routed(tensor, tensors.DeviceRoute(lambda device: torch.device("cpu")))
    assert (message.device, gpus) == ("", [])


def test_a_device_that_the_receiver_lacks() -> None:
    value = encode(torch.ones(2)).value
    value.tensors[0].device = "cuda:99"
    with pytest.raises(
        SerializationError, match="tensor for cuda:99 arrived where only tensors on the CPU are expected"
    ):
        decode(value)
    with pytest.raises(
        SerializationError, match="a tensor for cuda:99 arrived, and a worker with allow_pickle=False takes"
    ):
        decode(value, plain_only=True)


def test_a_copy_of_a_large_buffer_is_independent() -> None:
    data = bytearray(b"abc")
    copied = copy_of(LargeBuffer(memoryview(data)))
    data[0] = 0
    assert bytes(copied.view) == b"abc"


@pytest.mark.parametrize("shape", [(1 << 15,), (2, 1 << 14), (4, 1, 1 << 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.float64], ids=str)
def test_a_tensor_over_borrowed_memory_is_an_ordinary_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) > 0.5).to(dtype)
    memory = memoryview(bytearray(tensor.view(torch.uint8).numpy().tobytes()))
    header = compact_tensors([torch.empty(shape, dtype=dtype)])
    assert header is not None
    [received], _ = read_compact_tensors(header[0], 1, [ReceiveBuffer.borrowed(memory)])
    assert torch.equal(received, tensor) and received.dtype == dtype
    assert received.is_contiguous() and not received._is_view() and received.is_leaf
    received.fill_(0)
    assert bytes(memory) == bytes(len(memory))


@pytest.mark.parametrize(
    "value",
    [
        bytes(1 << 18),
        torch.ones(1 << 16),
        torch.ones(1 << 9, 1 << 9).t(),
        "text" * (1 << 16),
        {1, "x" * (1 << 18)},
        [torch.ones(10)] * 100,
        [torch.ones(100) for _ in range(100)],
    ],
    ids=["bytes", "tensor", "strides", "body", "pickle", "views", "run"],
)
def test_memory_that_was_missing_is_told_of_whatever_lies_there(value: Any) -> None:
    """It is never read as if it were empty."""
    encoded = encode(value)
    missing: Any = [MissingBuffer(buffer.size, "there was no room") for buffer in encoded.large]
    if missing:
        with pytest.raises(SerializationError, match="there was no room"):
            decode(encoded.value, missing)
