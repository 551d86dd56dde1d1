"""The service under the gRPC store, without a network: waiting, cancelling, closing."""

from __future__ import annotations

import asyncio

import pytest

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.service import StoreService
from rpcdist.errors import DistStoreError
from rpcdist.ids import Identity

LONG_MS = 20_000


async def parked(service: StoreService, number: int) -> None:
    """Lets the tasks run that were just made: a call goes up to its waiter in one step."""
    await asyncio.sleep(0)
    assert service.table.num_waiters == number


async def test_every_method_of_the_protocol_is_served() -> None:
    names = [method.name for method in store_pb2.DESCRIPTOR.services_by_name["Store"].methods]
    assert sorted(StoreService().methods()) == sorted(names)


async def test_get_ends_with_the_set() -> None:
    service = StoreService()
    get = asyncio.create_task(service.get(store_pb2.StoreGet(key="k", timeout_ms=LONG_MS)))
    await parked(service, 1)
    await service.set(store_pb2.StoreSet(key="k", value=b"v"))
    assert await get == store_pb2.StoreValue(found=True, value=b"v")
    assert service.table.num_waiters == 0


@pytest.mark.parametrize("timeout_ms", [0, 30])
async def test_waits_end_in_time(timeout_ms: int) -> None:
    service = StoreService()
    await service.set(store_pb2.StoreSet(key="there"))
    keys = ["there", "x", "y"]
    assert not (await service.get(store_pb2.StoreGet(key="k", timeout_ms=timeout_ms))).found
    assert not (await service.queue_pop(store_pb2.StoreGet(key="q", timeout_ms=timeout_ms))).found
    flag = await service.wait(store_pb2.StoreWait(keys=keys, timeout_ms=timeout_ms))
    assert (flag.flag, list(flag.missing)) == (False, ["x", "y"])
    values = await service.multi_get(store_pb2.StoreWait(keys=keys, timeout_ms=timeout_ms))
    assert (values.found, list(values.missing)) == (False, ["x", "y"])
    assert service.table.num_waiters == 0


async def test_a_cancelled_call_leaves_no_waiter() -> None:
    service = StoreService()
    calls = [
        asyncio.create_task(service.get(store_pb2.StoreGet(key="k", timeout_ms=LONG_MS))),
        asyncio.create_task(service.wait(store_pb2.StoreWait(keys=["a", "b"], timeout_ms=LONG_MS))),
        asyncio.create_task(service.queue_pop(store_pb2.StoreGet(key="q", timeout_ms=LONG_MS))),
    ]
    await parked(service, 3)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(call.cancelled() for call in calls)
    assert service.table.num_waiters == 0
    assert service._futures == {}


async def test_a_value_popped_for_a_cancelled_call_goes_to_the_next() -> None:
    service = StoreService()
    first = asyncio.create_task(service.queue_pop(store_pb2.StoreGet(key="q", timeout_ms=LONG_MS)))
    await parked(service, 1)
    second = asyncio.create_task(service.queue_pop(store_pb2.StoreGet(key="q", timeout_ms=LONG_MS)))
    await parked(service, 2)
    await service.queue_push(store_pb2.StoreSet(key="q", value=b"1"))  # hands it to the first ...
    first.cancel()  # ... which goes away before it has run again
    assert await second == store_pb2.StoreValue(found=True, value=b"1")
    with pytest.raises(asyncio.CancelledError):
        await first
    assert service.table.queue_len("q") == 0


async def test_add_reports_what_is_not_a_number() -> None:
    service = StoreService()
    await service.set(store_pb2.StoreSet(key="k", value=b"text"))
    reply = await service.add(store_pb2.StoreAdd(key="k", amount=1))
    assert "is not a number" in reply.problem


async def test_close_ends_the_waits_and_refuses_calls() -> None:
    service = StoreService()
    peer = Identity("peer", 1, 1)
    get = service.methods()["Get"]
    call = asyncio.ensure_future(get(peer, store_pb2.StoreGet(key="k", timeout_ms=LONG_MS)))
    await parked(service, 1)
    await service.close()
    await service.close()
    with pytest.raises(DistStoreError, match="closed"):
        await call
    with pytest.raises(DistStoreError, match="closed"):
        await get(peer, store_pb2.StoreGet(key="k"))
    assert service.table.num_waiters == 0
