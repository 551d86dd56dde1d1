"""Values across real connections: large ones, shared memory between arguments, strides, and odd types.

The codec's treatment of each type is tested in test_values_*; here the way between two processes is.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import rpc_functions
import torch
from parameter_ids import short_repr
from rpc_cluster import Cluster

import rpcdist.rpc as rpc

pytestmark = pytest.mark.multiproc

remote_side: Any = rpc_functions  # a call of a coroutine function returns what it returns, not a coroutine

LIMIT_S = 60.0
MIB = 1 << 20
EVERYWHERE = pytest.mark.parametrize("worker", ["worker1", "worker0"])

EVERYDAY: list[Any] = [
    None,
    True,
    -(2**70),
    1.5,
    2 - 3j,
    "text \N{SNOWMAN} \ud800",
    b"\x00bytes",
    bytearray(b"array"),
    (),
    [[], {}, ((),)],
    {"a": [1, 2, {"b": (3,)}], 4: None},
    {1, 2, 3},
    frozenset("ab"),
    range(5),
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    ValueError("as a value", 1),
    remote_side.Counter(3),
    remote_side.add,
    int,
]


@EVERYWHERE
@pytest.mark.parametrize("value", EVERYDAY, ids=lambda value: short_repr(value, 30))
def test_everyday_values_come_back_equal(cluster: Cluster, worker: str, value: Any) -> None:
    result = rpc.rpc_sync(worker, remote_side.echo, (value,))
    assert type(result) is type(value)
    if isinstance(value, Exception):
        assert result.args == value.args
    else:
        assert result == value


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(3, 4, 5)
    large = torch.arange(300_000.0).reshape(300, 1000)
    return {
        "contiguous": base,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "transposed": base.transpose(0, 2),
        "sliced": base[:, 1:3, ::2],
        "expanded": torch.ones(1, 4).expand(5, 4),
        "large transposed": large.t(),
        "large column": large[:, 7],
        "large steps": large[::3, ::7],
        "bool": base > 30,
        "half": base.half(),
        "bfloat16": base.bfloat16(),
        "complex": torch.view_as_complex(torch.ones(3, 2)),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(4).to_sparse(),
        "grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
    }


@EVERYWHERE
@pytest.mark.parametrize("name", list(tensors()))
def test_tensors_of_every_kind_come_back_equal(cluster: Cluster, worker: str, name: str) -> None:
    tensor = tensors()[name]
    result = rpc.rpc_sync(worker, remote_side.echo, (tensor,))
    assert type(result) is type(tensor) and result.dtype == tensor.dtype
    assert result.requires_grad == tensor.requires_grad
    if tensor.layout is torch.strided:
        assert result.shape == tensor.shape
        torch.testing.assert_close(result, tensor, rtol=0, atol=0)
    else:
        assert torch.equal(result.to_dense(), tensor.to_dense())


@EVERYWHERE
def test_strides_survive_and_only_the_bytes_of_a_view_travel(cluster: Cluster, worker: str) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    for view in (large.t(), large[:, 5], large[10:12], torch.ones(1, 4).expand(1000, 4)):
        shape, stride, dtype, _, storage = rpc.rpc_sync(worker, remote_side.describe, (view,))
        assert (shape, dtype) == (list(view.shape), "torch.float32")
        assert storage <= view.numel() * 4 + 64
        if view.numel() == large.numel():
            assert stride == list(view.stride())


@EVERYWHERE
def test_arguments_that_share_memory_share_it_there(cluster: Cluster, worker: str) -> None:
    for size in (10, 100_000):  # inside the message, and beside it
        base = torch.zeros(size)
        seen = rpc.rpc_sync(worker, remote_side.add_in_place, (base, base))
        assert float(seen.sum()) == size and float(base.sum()) == 0
        halves = (base[: size // 2], base[size // 4 :])
        assert rpc.rpc_sync(worker, remote_side.shares_storage, halves)
        assert not rpc.rpc_sync(worker, remote_side.shares_storage, (base, base.clone()))
        touched = rpc.rpc_sync(worker, remote_side.add_in_place, halves)
        assert float(touched.sum()) == size // 2 - size // 4


@EVERYWHERE
def test_results_that_share_memory_share_it_here(cluster: Cluster, worker: str) -> None:
    first, second = rpc.rpc_sync(worker, remote_side.two_views)
    first[30_000] = -1
    assert float(second[5_000]) == -1
    second.add_(1)  # no view of a multi-output function


@EVERYWHERE
def test_a_result_is_not_the_callees_own(cluster: Cluster, worker: str) -> None:
    data = torch.zeros(100_000)
    result = rpc.rpc_sync(worker, remote_side.echo, (data,))
    result.add_(1)
    assert float(data.sum()) == 0
    items = [1]
    rpc.rpc_sync(worker, remote_side.echo, (items,)).append(2)
    assert items == [1]


@EVERYWHERE
def test_objects_with_tensors_inside(cluster: Cluster, worker: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    copy = rpc.rpc_sync(worker, remote_side.echo, (module,))
    for ours, theirs in zip(module.parameters(), copy.parameters(), strict=True):
        assert torch.equal(ours, theirs) and isinstance(theirs, torch.nn.Parameter)
    box = remote_side.Box(torch.ones(50_000), {"nested": [torch.zeros(3)]})
    result = rpc.rpc_sync(worker, remote_side.echo, (box,))
    assert torch.equal(result.data, box.data) and torch.equal(result.more["nested"][0], torch.zeros(3))
    assert dataclasses.is_dataclass(result)


# ---------------------------------------------------------------- large


@EVERYWHERE
def test_an_echo_of_64_mib(cluster: Cluster, worker: str) -> None:
    data = torch.arange(16 * MIB, dtype=torch.float32)
    assert torch.equal(rpc.rpc_sync(worker, remote_side.echo, (data,)), data)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_40_mib_of_python_bytes(cluster: Cluster, kind: Callable[[bytes], Any]) -> None:
    data = kind(bytes(range(256)) * (40 * MIB // 256))
    expected = (type(data).__name__, len(data), zlib.crc32(data))
    assert rpc.rpc_sync("worker1", remote_side.checksum, (data,)) == expected
    assert rpc.rpc_sync("worker1", remote_side.echo, (data,)) == data


def test_a_list_whose_pickle_has_100_mib(cluster: Cluster) -> None:
    items = [f"{index:0999}" for index in range(100_000)]
    result = rpc.rpc_sync("worker1", remote_side.echo, (items,))
    assert result == items


def test_many_small_items_fill_more_than_one_envelope(cluster: Cluster) -> None:
    values = [b"x" * 30_000] * 100  # each travels inside the message, which is then 3 MB
    assert rpc.rpc_sync("worker1", remote_side.echo, (values,)) == values
    tensors = [torch.full((7_000,), float(index)) for index in range(200)]
    result = rpc.rpc_sync("worker1", remote_side.echo, (tensors,))
    assert all(torch.equal(a, b) for a, b in zip(result, tensors, strict=True))
    mixed = [*tensors, torch.ones(MIB)]  # wrapped, with a transfer of its own behind it
    result = rpc.rpc_sync("worker1", remote_side.echo, (mixed,))
    assert all(torch.equal(a, b) for a, b in zip(result, mixed, strict=True))


def test_sizes_around_the_limits_of_messages_and_chunks(cluster: Cluster) -> None:
    sizes = [limit + delta for limit in (32 * 1024, MIB - 64, MIB, 2 * MIB) for delta in (-1, 0, 1, 40)]
    for size in sizes:
        data = bytes([size % 251]) * size
        assert rpc.rpc_sync("worker1", remote_side.echo, (data,)) == data
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        assert torch.equal(rpc.rpc_sync("worker1", remote_side.echo, (tensor,)), tensor)


def test_a_large_value_that_cannot_be_rebuilt_leaves_the_connection_usable(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="at home only"):
        rpc.rpc_sync("worker1", remote_side.echo, ((torch.ones(MIB), remote_side.Homebound()),))
    assert float(rpc.rpc_sync("worker1", remote_side.echo, (torch.ones(MIB),)).sum()) == MIB


def test_large_values_in_both_directions_at_once(cluster: Cluster) -> None:
    data = {name: torch.full((2 * MIB,), float(index)) for index, name in enumerate(cluster.names)}
    calls = [(name, i, rpc.rpc_async(name, remote_side.add, (data[name], i))) for name in data for i in range(3)]
    for name, offset, call in calls:
        assert torch.equal(call.wait(LIMIT_S), data[name] + offset)


@pytest.fixture
def on_request_only(request: pytest.FixtureRequest) -> None:
    if "stress" not in request.config.getoption("markexpr"):
        pytest.skip("runs with -m stress")


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_a_tensor_of_2_gib(on_request_only: None, cluster: Cluster) -> None:
    num = (1 << 31) // 4 + 5
    data = torch.zeros(num)
    data[0], data[-1] = 1, 2
    assert rpc.rpc_sync("worker1", remote_side.stats, (data,), timeout=250) == (num, 1.0, 2.0)
