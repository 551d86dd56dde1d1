"""Device maps: the caller's decides for the way there and back, as in torch. No GPU is needed to ask what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rpcdist import rpc
from rpcdist.autograd._context import ContextTable
from rpcdist.errors import RpcdistError
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


def where(to: str, device: str, is_reply: bool) -> str | None:
    """Where a tensor of this worker goes; None without a map."""
    directory = rpc.api._get_current_rpc_agent().directory
    map_device = directory.device_map(directory.resolve(to), is_reply)
    return None if map_device is None else str(map_device(torch.device(device)))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("sender", "to", "device", "is_reply", "expected"),
    [
        ("alice", "bob", "cpu", False, "cuda:3"),
        ("bob", "alice", "cuda:3", True, "cpu"),  # bob has no map for alice
        ("bob", "alice", "cpu", False, None),
        ("bob", "carol", "cpu", False, "cuda:1"),
        ("bob", "carol", "cuda:2", True, "cpu"),  # carol's map, and not bob's
        ("alice", "bob", "cpu", True, "cuda:3"),  # bob has no map for alice: its own is better than none
        ("carol", "alice", "cpu", True, None),
    ],
)
def test_where_tensors_go(
    world: RpcWorld, sender: str, to: str, device: str, is_reply: bool, expected: str | None
) -> None:
    assert world[sender].run(where, to, device, is_reply) == expected


@pytest.mark.multiproc
def test_a_device_that_a_map_lacks(world: RpcWorld) -> None:
    with pytest.raises(
        RpcdistError, match=r"tensor on cuda:7.*map of 'alice' for 'bob'.*there, options.set_device_map"
    ):
        world["alice"].run(where, "bob", "cuda:7", False)
    with pytest.raises(
        RpcdistError, match=r"tensor on cuda:7.*map of 'alice' for 'bob'.*there, options.set_device_map"
    ):
        world["bob"].run(where, "alice", "cuda:7", True)


def test_gradients_arrive_where_their_tensors_are() -> None:
    """They come on the CPU, whatever a map says."""
    context = ContextTable(0, 1).new()
    sent = torch.ones(2, device="meta", requires_grad=True), torch.ones(3, requires_grad=True)
    history = context.sending(sent, 1)
    assert history is not None
    first, second = context.at_home(history.message, [torch.ones(2), None])
    assert first is not None and first.device.type == "meta" and second is None
    gradients = [None, torch.ones(3)]
    assert context.at_home(history.message, gradients)[1] is gradients[1]
    assert context.at_home(history.message, gradients[:1]) == gradients[:1]
    plain = context.sending((torch.ones(2, requires_grad=True),), 1)
    assert plain is not None
    assert context.at_home(plain.message, gradients) is gradients
    assert context.at_home(12345, gradients) is gradients
