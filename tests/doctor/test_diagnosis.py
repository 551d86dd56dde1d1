"""The cost of the doctor's questions to the process that answers: a bounded number of attempts and bytes."""

from __future__ import annotations

import asyncio
from typing import Any

from rpcdist._proto import diagnosis_pb2 as pb
from rpcdist.errors import ConnectFailed
from rpcdist.ids import Identity
from rpcdist.transport._server.diagnosis import MAX_PADDING_BYTES, reach_service

CALLER = Identity("pid-7.host", -1, 5)


async def test_a_reply_is_never_larger_than_its_limit() -> None:
    reach = reach_service(unused)
    reply = await reach(CALLER, pb.ReachRequest(reply_bytes=1 << 31))
    assert len(reply.padding) == MAX_PADDING_BYTES and reply.failure == ""
    assert reply.versions["rpcdist"] and reply.versions["python"]


async def unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("the request named no address to try")


async def test_the_reason_why_the_caller_is_out_of_reach_is_told() -> None:
    async def refused(address: str, *_: Any, **__: Any) -> Any:
        raise ConnectFailed(address, "connection refused")

    reply = await reach_service(refused)(CALLER, pb.ReachRequest(address="10.0.0.1:5"))
    assert "connection refused" in reply.failure and reply.channel == ""


async def test_only_so_many_attempts_go_on_at_a_time() -> None:
    tried: list[str] = []
    goes_on = asyncio.Event()

    async def slow(address: str, *_: Any, **__: Any) -> Any:
        tried.append(address)
        await goes_on.wait()
        raise ConnectFailed(address, "connection refused")

    reach = reach_service(slow)
    asked = [asyncio.ensure_future(reach(CALLER, pb.ReachRequest(address=f"h:{i}"))) for i in range(20)]
    done, pending = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert len(tried) == len(pending) == 8
    assert all("too many" in each.result().failure for each in done)
    goes_on.set()
    await asyncio.wait(pending)
    assert "refused" in (await reach(CALLER, pb.ReachRequest(address="h:1"))).failure
