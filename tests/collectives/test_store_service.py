"""The service under the gRPC store, without a network: messages, waiting, cancelling, closing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores import store_operations
from rpcdist.collectives._stores.store_service import (
    ServedTable,
    operation_of,
    reply_with,
    request_for,
    result_of,
)
from rpcdist.collectives.store import (
    Add,
    Append,
    Check,
    CompareSet,
    DeleteKey,
    Get,
    ListKeys,
    Missing,
    NumKeys,
    QueueLen,
    QueuePop,
    QueuePush,
    Set,
    StoreOperation,
    Wait,
)
from rpcdist.errors import DistStoreError, ProtocolViolation
from rpcdist.ids import Identity
from rpcdist.transport._framing.message_parts import parsed

PEER = Identity("peer", 1, 1)
LONG_S = 20.0

OPERATIONS: list[tuple[StoreOperation[object], object]] = [
    (Set(("a", "ü"), (b"1", b"\xff")), None),
    (Get(("a", "b")), (b"1", b"")),
    (Wait(("a",)), None),
    (Check(("a",)), True),
    (Check(("a",)), False),
    (Add("n", -(2**63)), -(2**63)),
    (Add("n", 0), 0),
    (Append("a", b""), None),
    (CompareSet("a", b"", b"v"), b""),
    (DeleteKey("a"), False),
    (NumKeys(), 0),
    (ListKeys(""), ()),
    (ListKeys("p"), ("p1", "p2")),
    (QueuePush("q", b"1"), None),
    (QueuePop("q"), b""),
    (QueueLen("q"), 3),
]


def served() -> ServedTable:
    """A table whose calls come from this test instead of a node."""
    node: Any = None
    return ServedTable(node, "")


async def execute(service: ServedTable, operation: StoreOperation[object], timeout_s: float = LONG_S) -> object:
    reply, _ = await service.execute(PEER, request_for(operation, timeout_s))
    return result_of(reply)


def started(service: ServedTable, operation: StoreOperation[object], timeout_s: float = LONG_S) -> asyncio.Task[object]:
    return asyncio.create_task(execute(service, operation, timeout_s))


async def parked(service: ServedTable, number: int) -> None:
    """Lets the tasks run that were just made: a call goes up to its waiter in one step."""
    await asyncio.sleep(0)
    assert service.table.num_waiting == number


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(("operation", "result"), OPERATIONS)
def test_operations_and_results_survive_the_way(operation: StoreOperation[object], result: object) -> None:
    request = store_pb2.StoreRequest.FromString(request_for(operation, 1.0).SerializeToString())
    assert operation_of(request) == operation
    for given in (result, Missing(("a", "b"))):
        reply = store_pb2.StoreReply.FromString(reply_with(operation, given).SerializeToString())
        assert result_of(reply) == given and type(result_of(reply)) is type(given)


def test_every_operation_has_a_message() -> None:
    named = {each.name for each in store_pb2.StoreRequest.DESCRIPTOR.oneofs_by_name["operation"].fields}
    classes = {name: each for name, each in vars(store_operations).items() if isinstance(each, type)}
    kinds = [each for name, each in classes.items() if issubclass(each, StoreOperation) and not name.startswith("_")]
    assert {each.method for each in kinds if each is not StoreOperation} == named
    assert {type(operation).method for operation, _ in OPERATIONS} == named


def test_a_short_wait_does_not_become_none() -> None:
    assert request_for(Get(("k",)), 0.0001).timeout_ms == 1
    assert request_for(Get(("k",)), 0.0).timeout_ms == 0


def test_a_request_without_an_operation() -> None:
    with pytest.raises(DistStoreError, match="no operation"):
        operation_of(store_pb2.StoreRequest(timeout_ms=5))


# ---------------------------------------------------------------- the service


async def test_every_method_of_the_protocol_is_served() -> None:
    names = [method.name for method in store_pb2.DESCRIPTOR.services_by_name["Store"].methods]
    assert sorted(served().methods()) == sorted(names)


async def test_get_ends_with_the_set() -> None:
    service = served()
    get = started(service, Get(("k",)))
    await parked(service, 1)
    await execute(service, Set(("k",), (b"v",)))
    assert await get == (b"v",)
    assert service.table.num_waiting == 0


@pytest.mark.parametrize("timeout_s", [0, 0.03])
async def test_waits_end_in_time(timeout_s: float) -> None:
    service = served()
    await execute(service, Set(("there",), (b"",)))
    keys = ("there", "x", "y")
    assert await execute(service, Get(("k",)), timeout_s) == Missing(("k",))
    assert await execute(service, QueuePop("q"), timeout_s) == Missing(("q",))
    assert await execute(service, Wait(keys), timeout_s) == Missing(("x", "y"))
    assert await execute(service, Get(keys), timeout_s) == Missing(("x", "y"))
    assert service.table.num_waiting == 0


async def test_a_wait_that_ends_names_what_is_missing_then() -> None:
    service = served()
    wait = started(service, Wait(("x", "y")), 0.05)
    await parked(service, 1)
    await execute(service, Set(("x",), (b"",)))
    assert await wait == Missing(("y",))


async def test_a_cancelled_call_leaves_no_waiter() -> None:
    service = served()
    calls = [started(service, operation) for operation in (Get(("k",)), Wait(("a", "b")), QueuePop("q"))]
    await parked(service, 3)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls, timeout=5)
    assert all(call.cancelled() for call in calls)
    assert service.table.num_waiting == 0


async def test_a_value_popped_for_a_cancelled_call_goes_to_the_next() -> None:
    service = served()
    first = started(service, QueuePop("q"))
    await parked(service, 1)
    second = started(service, QueuePop("q"))
    await parked(service, 2)
    await execute(service, QueuePush("q", b"1"))  # hands it to the first ...
    first.cancel()  # ... which goes away before it has run again
    assert await second == b"1"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await execute(service, QueueLen("q")) == 0


async def test_add_reports_what_is_not_a_number() -> None:
    service = served()
    await execute(service, Set(("k",), (b"text",)))
    reply, _ = await service.execute(PEER, request_for(Add("k", 1), 0))
    assert "is not a number" in reply.problem
    with pytest.raises(DistStoreError, match="is not a number"):
        result_of(reply)


async def test_close_ends_the_waits_and_refuses_calls() -> None:
    service = served()
    call = started(service, Get(("k",)))
    await parked(service, 1)
    await service.refuse_calls()
    await service.refuse_calls()
    with pytest.raises(DistStoreError, match="closed"):
        await call
    with pytest.raises(DistStoreError, match="closed"):
        await execute(service, Get(("k",)))
    assert service.table.num_waiting == 0


def test_many_short_keys_weigh_what_they_take() -> None:
    """A request for 60,000 keys of nine characters was refused: once it was parsed, it took too much."""
    keys = tuple(f"{number:09d}" for number in range(60_000))
    request = request_for(Wait(keys), LONG_S)
    assert operation_of(parsed(store_pb2.StoreRequest, request.SerializeToString())) == Wait(keys)
    for operation, result in ((ListKeys(""), keys), (Wait(keys), Missing(keys)), (Get(keys), (b"",) * 60_000)):
        reply = reply_with(operation, result)
        assert result_of(parsed(store_pb2.StoreReply, reply.SerializeToString())) == result
    assert not request_for(Set(("k",), (bytes(1 << 20),)), LONG_S).weight


async def test_many_parts_of_a_request_that_weigh_too_little_are_refused() -> None:
    """Data that travels in pieces was not counted: 19 MiB of empty keys took 484 MiB, and 2 s of the I/O loop."""
    request = store_pb2.StoreRequest(get=store_pb2.StoreKeys(keys=[""] * 200_000))
    with pytest.raises(ProtocolViolation, match="too many very small parts"):
        await served().execute_large(PEER, request.SerializeToString())


@pytest.mark.parametrize("how", ["append", "set"])
async def test_a_value_that_a_request_names_very_often_is_not_copied_for_each(how: str) -> None:
    """A request of 1,200 bytes took 900 MiB, and ten seconds of the I/O loop; more of them ended the process."""
    service, value = served(), bytes(1 << 20)
    await execute(service, Append("k", value) if how == "append" else Set(("k",), (value,)))
    asked = request_for(Get(("k",) * 100_000), LONG_S).SerializeToString()
    began = time.process_time()
    reply, _ = await service.execute_large(PEER, asked)
    with pytest.raises(DistStoreError, match=r"has 104857600000 bytes, but a store sends at most"):
        result_of(store_pb2.StoreReply.FromString(reply))
    assert (await service.execute(PEER, store_pb2.StoreRequest.FromString(asked)))[0].too_large
    assert time.process_time() - began < 5.0  # without an error, it would take minutes


async def test_keys_without_values_are_the_fault_of_the_caller() -> None:
    request = store_pb2.StoreRequest(set={"keys": ["a", "b"], "values": [b"1"]})
    reply, _ = await served().execute(PEER, request)
    assert reply.problem == "cannot set 2 keys to 1 values"
