"""`device_map=` of one call: where its tensors and its results go. Tensors that would be on a GPU are on the CPU here.

A stand-in notes the device for which each tensor arrives, and leaves it on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcdist import rpc
from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import CallRefused, ConfigError, RpcdistError, SerializationError
from rpcdist.rpc._api import call_functions
from rpcdist.rpc._devices.gpu_sharing import ValueOnGpus
from rpcdist.rpc._peers.device_maps import MAX_ENTRIES, DeviceMaps, inverse_of
from rpcdist.rpc._values.tensor_runs import RUNS_FROM
from rpcdist.testing import InProcessCluster

Arrivals = list[tuple[str, str]]
"""The worker, and the device there."""


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("alice", "bob", by_value=True) as cluster:
        yield cluster


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Tensors for GPUs arrive on the CPU, and are noted."""
    noted: Arrivals = []

    def device_of(self: ValueOnGpus, message: value_pb2.Tensor, buffer: object) -> torch.device:
        noted.append((self._me, message.device))
        return torch.device("cpu")

    monkeypatch.setattr(ValueOnGpus, "device_of", device_of)
    monkeypatch.setattr(call_functions, "check_own_devices", lambda *arguments: None)
    return noted


def twice(tensor: Tensor) -> Tensor:
    return tensor * 2


@rpc.idempotent
def twice_again(tensor: Tensor) -> Tensor:
    return tensor * 2


async def twice_later(tensor: Tensor) -> Tensor:
    return tensor * 2


def count_up(tensor: Tensor) -> Iterator[Tensor]:
    for number in range(2):
        yield tensor + number


class WithTensor(Exception):
    pass


def fail(tensor: Tensor) -> None:
    raise WithTensor(tensor)


def total(tensors: list[Tensor]) -> float:
    return float(torch.stack(tensors).sum())


THERE: dict[Any, Any] = {"cpu": "cuda:1"}
BACK: dict[Any, Any] = {"cuda:0": "cpu"}


def sync(function: Callable[..., Any], tensor: Tensor, device_map: dict[Any, Any]) -> Any:
    return rpc.rpc_sync("bob", function, (tensor,), device_map=device_map)


def later(function: Callable[..., Any], tensor: Tensor, device_map: dict[Any, Any]) -> Any:
    return rpc.rpc_async("bob", function, (tensor,), device_map=device_map).wait()


@pytest.mark.parametrize("function", [twice, twice_again, twice_later, lambda tensor: tensor * 2], ids=range(4))
@pytest.mark.parametrize("call", [sync, later])
@pytest.mark.parametrize("size", [3, 100_000])
def test_there_and_back(
    cluster: InProcessCluster, arrivals: Arrivals, function: Callable[..., Any], call: Callable[..., Any], size: int
) -> None:
    tensor = torch.ones(size)
    assert torch.equal(cluster.run("alice", call, function, tensor, THERE), tensor * 2)
    assert arrivals == [("bob", "cuda:1")]  # what bob has on his CPU stays on that of alice
    arrivals.clear()
    assert torch.equal(cluster.run("alice", call, function, tensor, BACK), tensor * 2)
    assert arrivals == [("alice", "cuda:0")]
    arrivals.clear()
    assert torch.equal(cluster.run("alice", call, function, tensor, {}), tensor * 2)
    assert torch.equal(cluster.run("alice", call, function, tensor, {"cpu": "cpu"}), tensor * 2)
    assert arrivals == []


def test_items_of_streams(cluster: InProcessCluster, arrivals: Arrivals) -> None:
    with cluster.use("alice"):
        items = list(rpc.rpc_stream("bob", count_up, (torch.ones(2),), device_map=BACK))
    assert torch.equal(torch.stack(items), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    assert arrivals == [("alice", "cuda:0")] * 2


def test_tensors_of_exceptions(cluster: InProcessCluster, arrivals: Arrivals) -> None:
    with cluster.use("alice"), pytest.raises(WithTensor) as raised:
        rpc.rpc_sync("bob", fail, (torch.ones(2),), device_map=BACK)
    assert torch.equal(raised.value.args[0], torch.ones(2))
    assert arrivals == [("alice", "cuda:0")]


def test_many_tensors_of_one_kind(cluster: InProcessCluster, arrivals: Arrivals) -> None:
    tensors = [torch.full((2,), float(number)) for number in range(RUNS_FROM + 1)]
    assert cluster.run("alice", sync, total, tensors, THERE) == sum(range(RUNS_FROM + 1)) * 2
    assert arrivals == [("bob", "cuda:1")] * len(tensors)


@pytest.mark.parametrize("options", [{}, {"serial": True}, {"name": "the one"}], ids=str)
def test_a_reference(cluster: InProcessCluster, arrivals: Arrivals, options: dict[str, Any]) -> None:
    """The map is for the arguments; the value comes as its owner's worker has it."""
    with cluster.use("alice"):
        made = rpc.remote("bob", twice, (torch.ones(2),), device_map=THERE, **options)
        assert torch.equal(made.to_here(), torch.full((2,), 2.0))
        assert arrivals == [("bob", "cuda:1")]
        made = rpc.remote("bob", twice, (torch.ones(2),), device_map=BACK)
        assert torch.equal(made.to_here(), torch.full((2,), 2.0))
    assert arrivals == [("bob", "cuda:1")]


def test_the_next_call_has_the_map_of_options(arrivals: Arrivals) -> None:
    with InProcessCluster("alice", "bob", device_maps={"bob": {"cpu": "cuda:3"}}) as cluster:
        for device_map, expected in ((THERE, "cuda:1"), (None, "cuda:3"), ({}, None)):
            assert torch.equal(cluster.run("alice", sync, twice, torch.ones(2), device_map), torch.full((2,), 2.0))
            assert arrivals == ([] if expected is None else [("bob", expected)])
            arrivals.clear()
        # A tensor from bob's GPU 3 comes back to alice's CPU; a tensor on bob's CPU stays there, whatever his own map
        # says.
        with cluster.use("bob"):
            rpc.rpc_sync("alice", twice, (torch.ones(2),))
        assert arrivals == []
        # One message for several workers is only for those with one map.
        with cluster.use("alice"):
            results = rpc.call_each(["alice", "bob"], twice, torch.ones(2))
        assert torch.equal(torch.stack(results), torch.full((2, 2), 2.0))
        assert arrivals == [("bob", "cuda:3")]


@pytest.mark.parametrize(
    ("device_map", "error", "text"),
    [
        ({"cuda:0": "cpu", "cpu": "cpu"}, ValueError, "1-to-1 mapping, trying to map cpu and cuda:0 to cpu"),
        (
            [("cuda:0", "cuda:1")],
            TypeError,
            r"device_map must be a dictionary from this worker's devices .* not a list",
        ),
        ("cuda:0", TypeError, "not a str"),
        ({"gpu of mine": "cpu"}, RuntimeError, "gpu"),
        (
            {"cuda:77": "cpu"},
            ValueError,
            r"alice has source devices with invalid indices .* for bob: cuda:77",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, list | dict | str) else "",
)
def test_bad_maps(cluster: InProcessCluster, device_map: Any, error: type[Exception], text: str) -> None:
    with cluster.use("alice"):
        for make in (rpc.rpc_sync, rpc.rpc_async, rpc.rpc_stream, rpc.remote):
            with pytest.raises(error, match=text):
                make("bob", twice, (torch.ones(2),), device_map=device_map)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a worker without a GPU")
def test_a_device_that_the_callee_lacks(cluster: InProcessCluster) -> None:
    expected = r"tensor for cuda:1 arrived from worker 'alice', and worker 'bob' has no GPU"
    with pytest.raises(SerializationError, match=expected):
        cluster.run("alice", sync, twice, torch.ones(2), THERE)
    assert torch.equal(cluster.run("alice", sync, twice, torch.ones(2), {}), torch.full((2,), 2.0))


def test_a_device_that_the_map_lacks() -> None:
    maps = DeviceMaps("alice", {}, lambda id: "bob")
    find = maps.find(1, None, {torch.device("cuda:0"): torch.device("cuda:1")})
    assert find is not None
    assert find(torch.device("cuda:0")) == torch.device("cuda:1")
    assert find(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(
        RpcdistError, match=r"tensor on cuda:2 .* \['cuda:0'\].* map of the call of 'alice'.*device_map="
    ):
        find(torch.device("cuda:2"))


def test_an_actor_that_is_made_again_has_no_map_of_one_call(cluster: InProcessCluster) -> None:
    with cluster.use("alice"), pytest.raises(ConfigError, match="exclude each other"):
        rpc.remote("bob", dict, serial=True, max_restarts=1, device_map={})


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (["cpu"], [], "1 devices for 0"),
        (["cpu"] * (MAX_ENTRIES + 1), ["cpu"] * (MAX_ENTRIES + 1), f"the limit is {MAX_ENTRIES}"),
        (["gpu of mine"], ["cpu"], "cannot be read"),
    ],
    ids=["odd", "long", "unknown"],
)
def test_damaged_maps_of_peers(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, here: list[str], there: list[str], text: str
) -> None:
    damaged = rpc_pb2.DeviceMap(here=here, there=there)
    with pytest.raises(CallRefused, match=text):
        inverse_of(damaged)
    monkeypatch.setattr("rpcdist.rpc._calling.new_calls.device_map_to_pb", lambda device_map: damaged)
    with pytest.raises(CallRefused, match=text):
        cluster.run("alice", sync, twice, torch.ones(2), {})
    monkeypatch.undo()
    assert torch.equal(cluster.run("alice", sync, twice, torch.ones(2), {}), torch.full((2,), 2.0))
