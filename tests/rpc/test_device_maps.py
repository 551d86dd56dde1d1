"""Device maps: the caller's decides for the way there and back, as in torch. No GPU is needed to ask what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from inside_agents import Agent, current_agent

from rpcdist import rpc
from rpcdist._proto import rpc_pb2
from rpcdist.autograd._context import ContextTable
from rpcdist.errors import RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._peers.device_maps import DeviceMaps
from rpcdist.testing import RpcWorld, WorkerPool

MAPS = {"alice": {"bob": {"cpu": "cuda:3"}}, "bob": {"carol": {"cpu": "cuda:1"}}, "carol": {"bob": {"cpu": "cuda:2"}}}


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    world = module_pool.new_world(3)
    joining = [world.begin_join(name, rank, device_maps=MAPS[name]) for rank, name in enumerate(MAPS)]
    for pending in joining:
        pending.result()
    yield world
    world.shutdown()


def device_maps_of(agent: Agent) -> DeviceMaps:
    return agent._device_maps


def way_there(to: str, device: str) -> str | None:
    """Where an argument of a call goes; None without a map."""
    agent = current_agent()
    map_device = device_maps_of(agent).find(agent.directory.resolve(to), None)
    return None if map_device is None else str(map_device(torch.device(device)))


def way_back(device: str) -> str | None:
    """Where a result of the call that runs this goes; None without a map."""
    agent = current_agent()
    (active,) = [call for call in agent.dispatcher.calls if call.function.endswith(way_back.__name__)]
    map_device = device_maps_of(agent).find(active.session.peer.id, active.session)
    return None if map_device is None else str(map_device(torch.device(device)))


def ask(callee: str, device: str) -> str | None:
    return rpc.rpc_sync(callee, way_back, (device,))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("sender", "to", "device", "expected"),
    [("alice", "bob", "cpu", "cuda:3"), ("bob", "alice", "cpu", None), ("bob", "carol", "cpu", "cuda:1")],
)
def test_where_arguments_go(world: RpcWorld, sender: str, to: str, device: str, expected: str | None) -> None:
    assert world[sender].run(way_there, to, device) == expected


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("caller", "callee", "device", "expected"),
    [
        ("alice", "bob", "cuda:3", "cpu"),  # bob has no map for alice
        ("carol", "bob", "cuda:2", "cpu"),  # carol's map, and not bob's
        ("bob", "alice", "cpu", "cpu"),  # bob has none for alice, and her own moves no results from the CPU
        ("alice", "carol", "cpu", None),
    ],
)
def test_where_results_go(world: RpcWorld, caller: str, callee: str, device: str, expected: str | None) -> None:
    assert world[caller].run(ask, callee, device) == expected


@pytest.mark.multiproc
def test_a_device_that_a_map_lacks(world: RpcWorld) -> None:
    expected = r"tensor on cuda:7.*map of 'alice' for 'bob'; add it in that worker with options.set_device_map"
    with pytest.raises(RpcdistError, match=expected):
        world["alice"].run(way_there, "bob", "cuda:7")
    with pytest.raises(RpcdistError, match=expected):
        world["alice"].run(ask, "bob", "cuda:7")


@pytest.mark.multiproc
def test_results_go_by_the_map_of_the_process_that_called(worker_pool: WorkerPool) -> None:
    """A worker is replaced by one with another map, and joins later; its own map counts from its first call on."""
    world = worker_pool.new_world(None)
    world.begin_join("boss", 0).result()
    for number in (1, 2):
        world.begin_join("bob", 1, device_maps={"boss": {"cpu": f"cuda:{number}"}}).result()
        assert world["bob"].run(ask, "boss", f"cuda:{number}") == "cpu"
        world["bob"].kill()
    world["boss"].run(rpc.shutdown, graceful=False)


class Session:
    def __init__(self, name: str) -> None:
        self.peer = Identity(name, 1, 1)


def test_what_cannot_be_read_is_left_out() -> None:
    there = {torch.device("cuda:0"): torch.device("cuda:1")}
    maps = DeviceMaps("me", {"you": there}, lambda id: "you")
    message = maps.introduction(Identity("you", 1, 1))
    assert message is not None and maps.introduction(Identity("others", 2, 1)) is None
    session, other = Session("you"), Session("you")
    maps.on_message(session, message, [])  # type: ignore[arg-type]
    odd = rpc_pb2.Message(device_map=rpc_pb2.DeviceMap(here=["gpu of mine"], there=["cuda:0"]))
    maps.on_message(other, odd, [])  # type: ignore[arg-type]
    for what, expected in ((session, "cuda:0"), (other, None)):
        back = maps.find(1, what)  # type: ignore[arg-type]
        assert back is not None
        if expected is not None:
            assert back(torch.device("cuda:1")) == torch.device(expected)
        else:  # by this worker's own map
            assert back(torch.device("cuda:0")) == torch.device("cuda:1")
    maps.forget(session, "closed")
    assert not maps._back


def test_gradients_arrive_where_their_tensors_are() -> None:
    """They come on the CPU, whatever a map says."""
    context = ContextTable(0).new()
    sent = torch.ones(2, device="meta", requires_grad=True), torch.ones(3, requires_grad=True)
    history = context.sending(sent, 1)
    assert history is not None
    first, second = context.to_original_devices(history.message, [torch.ones(2), None])
    assert first is not None and first.device.type == "meta" and second is None
    gradients = [None, torch.ones(3)]
    assert context.to_original_devices(history.message, gradients)[1] is gradients[1]
    with pytest.raises(ValueError, match="longer"):
        context.to_original_devices(history.message, gradients[:1])
    plain = context.sending((torch.ones(2, requires_grad=True),), 1)
    assert plain is not None
    assert context.to_original_devices(plain.message, gradients) is gradients
    assert context.to_original_devices(12345, gradients) is gradients
