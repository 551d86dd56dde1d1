"""The gRPC service `Store`: a table served to other processes.

Its method runs as a coroutine on the I/O loop of the process that serves. A call that waits ends by an event in the
table, at its own time limit, or when the transport cancels it because the client went away; in each case its waiter
leaves the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_messages import operation_of, reply_with
from rpcdist.errors import DistStoreError
from rpcdist.ids import Identity
from rpcdist.time_limits import STORE_LINGER_S

__all__ = ["CLOSED", "StoreService"]

CLOSED: Final = "the store was closed by the process that serves it"

Method = Callable[[Identity, Any], Awaitable[Message]]


class StoreService:
    """Answers the calls of service `Store` from one table, which this process may use directly."""

    def __init__(self) -> None:
        self.table = SharedTable()
        self._replied_at = float("-inf")

    def __repr__(self) -> str:
        return f"<StoreService of {self.table!r}>"

    def methods(self) -> Mapping[str, Method]:
        """The handlers by method name, as `Node.add_service` takes them."""
        return {"Execute": self.execute}

    async def execute(self, peer: Identity, request: store_pb2.StoreRequest) -> store_pb2.StoreReply:
        """Carries out one operation. Cancelling it removes its waiter, and a popped value goes back to its queue."""
        try:
            operation = operation_of(request)
            return reply_with(operation, await self.table.execute_on_loop(operation, request.timeout_ms / 1000))
        except DistStoreError as exc:
            if self.table.closed:
                raise
            return store_pb2.StoreReply(problem=str(exc))
        finally:
            self._replied_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Refuses further calls and ends those that wait; their callers get an error. Idempotent.

        Often the serving process ends as soon as it sees the key that the last of its clients has set, which is before
        the reply to that client has left. So replies of the last moment get `STORE_LINGER_S` to leave.
        """
        loop = asyncio.get_running_loop()
        failure = self.table.failure
        if self.table.close(CLOSED + (f", where this had failed: {failure}" if failure else "")):
            self._replied_at = loop.time()
        await asyncio.sleep(max(0.0, self._replied_at + STORE_LINGER_S - loop.time()))
