"""Parameters, buffers and subclasses over tensors of every layout arrive as what pickle would make of them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Buffer, Parameter
from values_helpers import round_trip

from rpcdist.errors import SerializationError
from rpcdist.rpc._values.buffers import copy_of
from rpcdist.rpc._values.codec import write_plain
from rpcdist.rpc._values.compact import compact_value, read_compact

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls sparse CSR and nested tensors unfinished


class Tagged(Tensor):
    """A subclass with attributes."""


def with_tag(tensor: Tensor) -> Any:
    tensor.tag = ["a tag"]  # type: ignore[attr-defined]
    return tensor


def layouts() -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "strided": torch.eye(4),
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "coo": torch.eye(4).to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2)),
            "hybrid": torch.ones(3, 2, 2).to_sparse(1),
            "csr": torch.eye(4).to_sparse_csr(),
            "csc": torch.eye(4).to_sparse_csc(),
            "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
            "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
            "quantized": torch.quantize_per_tensor(torch.eye(3), 0.1, 2, torch.quint8),
            "by channel": torch.quantize_per_channel(
                torch.eye(3), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
            ),
            "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]),
            "jagged": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
            "meta": torch.empty(3, 4, device="meta"),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "uint16": torch.ones(3, dtype=torch.uint16),
            "conjugate": torch.full((2, 2), 1 + 2j).conj(),
            "negative": torch._neg_view(torch.ones(2)),
            "scalar": torch.tensor(1.5),
        }


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": lambda tensor: tensor,
    "Parameter": Parameter,
    "frozen Parameter": lambda tensor: Parameter(tensor, requires_grad=False),
    "Parameter with attributes": lambda tensor: with_tag(Parameter(tensor, requires_grad=False)),
    "Buffer": Buffer,
    "Buffer that is not persistent": lambda tensor: Buffer(tensor, persistent=False),
    "subclass": lambda tensor: with_tag(tensor.detach().as_subclass(Tagged)),
}


def described(tensor: Any) -> dict[str, Any]:
    return {
        "type": type(tensor),
        "buffer": (isinstance(tensor, Buffer), getattr(tensor, "persistent", None)),
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "nested": tensor.is_nested,
        "requires_grad": tensor.requires_grad,
        "device": tensor.device,
        "coalesced": tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None,
        "attributes": getattr(tensor, "tag", None),
    }


def content(tensor: Any) -> Any:
    tensor = tensor.detach().as_subclass(Tensor) if type(tensor) is Tagged else tensor.detach()
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.is_meta:
        return tensor.shape
    if tensor.is_quantized:
        return tensor.int_repr().tolist(), tensor.dequantize().tolist()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).tolist()


def arrived(value: Any) -> Any:
    """As calls send it: in compact form where it has one."""
    writer = write_plain(value)
    compact = None if writer is None else compact_value(writer)
    if writer is None or compact is None:
        return round_trip(value)[1]
    return read_compact(compact[0], len(writer.tensors), [copy_of(buffer) for buffer in compact[1]])


def can_be(kind: str, tensor: Tensor) -> bool:
    """Whether torch has such tensors: subclasses need a storage, gradients numbers."""
    if kind == "subclass":
        return tensor.layout is torch.strided
    return kind != "Parameter" or ((tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_quantized)


CASES = [(layout, kind) for layout, tensor in layouts().items() for kind in KINDS if can_be(kind, tensor)]


@pytest.mark.parametrize(("layout", "kind"), CASES, ids=[f"{layout}-{kind}" for layout, kind in CASES])
def test_a_tensor_of_every_kind_over_every_layout(layout: str, kind: str) -> None:
    tensor = KINDS[kind](layouts()[layout])
    for sent, taken in ((tensor, arrived(tensor)), *zip([tensor], arrived([tensor, {1}])[:1], strict=True)):
        assert described(taken) == described(sent) and content(taken) == content(sent)
        if layout not in ("float8", "uint16"):  # pickle knows no storage for these
            assert described(taken) == described(pickle.loads(pickle.dumps(sent)))


def test_a_module_keeps_the_kinds_of_its_tensors() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = Parameter(torch.eye(3).to_sparse())
            self.compressed = Parameter(torch.eye(3).to_sparse_csr())
            self.quantized = Parameter(layouts()["quantized"], requires_grad=False)
            self.kept = Buffer(torch.ones(2))
            self.dropped = Buffer(torch.eye(2).to_sparse(), persistent=False)
            self.lazy = nn.LazyLinear(2)
            self.tied = self.sparse

    # A class of this function cannot be imported: by value, so that this is tried as well.
    [module, _] = round_trip([Layer(), {1}], by_value=True)[1]
    names = {"sparse", "compressed", "quantized", "lazy.weight", "lazy.bias"}
    assert {name for name, _ in module.named_parameters()} == names
    assert {name for name, _ in module.named_buffers()} == {"kept", "dropped"}
    assert set(module.state_dict()) == names | {"kept", "tied"}
    assert module.tied is module.sparse and isinstance(module.lazy.weight, nn.UninitializedParameter)


@pytest.mark.parametrize("kind", [nn.UninitializedParameter, nn.UninitializedBuffer])
def test_tensors_that_are_not_made_yet(kind: type[Any]) -> None:
    taken = arrived(kind())
    assert type(taken) is kind
    taken.materialize((2, 3))
    assert taken.shape == (2, 3)


def test_a_fake_tensor_cannot_be_sent() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(SerializationError, match="outside FakeTensorMode"):
        arrived(fake)


def test_a_long_list_keeps_its_buffers() -> None:
    many = [torch.ones(1) for _ in range(99)] + [Buffer(torch.ones(1))]
    assert [isinstance(one, Buffer) for one in arrived(many)] == [False] * 99 + [True]


def test_without_pickle_a_buffer_goes_as_a_tensor() -> None:
    _, taken = round_trip([Buffer(torch.ones(2)), with_tag(Parameter(torch.ones(2)))], plain_only=True)
    assert [type(one) for one in taken] == [Tensor, Parameter] and not hasattr(taken[1], "tag")
