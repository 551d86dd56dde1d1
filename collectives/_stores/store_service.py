"""The tables that this process serves through the gRPC service `Store`, one at each port.

The service's method runs as a coroutine on the I/O loop of the serving process. A call that waits ends by an event in
the table, at its own time limit, or when the transport cancels it because the client went away. In each case its
waiter is removed from the table.

Operations and results travel as protobuf messages. The fields of a request have the names of the operation's fields, so
one rule translates all operations.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from rpcdist._proto import store_pb2
from rpcdist.at_exit import register_at_exit, unregister_at_exit
from rpcdist.collectives._stores.shared_table import SharedTable
from rpcdist.collectives._stores.store_operations import LARGEST_BYTES, ListKeys, Missing, StoreOperation
from rpcdist.deadline import Deadline
from rpcdist.errors import (
    DeadlineExceeded,
    DistNetworkError,
    DistStoreError,
    RpcdistError,
    TransportError,
    on_error,
    raised_as,
)
from rpcdist.ids import Identity
from rpcdist.time_limits import CLOSE_LIMIT_S, STORE_GRACE_S, STORE_LINGER_S
from rpcdist.transport import LARGEST_UNCUT_BYTES, Node, acquire_node
from rpcdist.transport._framing.message_parts import missing_weight, parsed
from rpcdist.transport.addresses import split_address
from rpcdist.transport.fork import in_forked_child
from rpcdist.transport.io_loop import check_off_loop

_RESULT_FIELDS: Final = {bytes: "value", bool: "flag", int: "number"}
"""The field of the reply that carries a result of one of these types."""
# A dataclass with slots is a second class of its name, and comes later.
_OPERATIONS: Final[dict[str | None, type[StoreOperation[object]]]] = {
    each.method: each for each in StoreOperation.__subclasses__()
}

_UNWEIGHED_ITEMS: Final = 4 << 10
"""The receiver allows a message this many keys and values, whatever their size."""

M = TypeVar("M", store_pb2.StoreRequest, store_pb2.StoreReply)


def request_for(operation: StoreOperation[object], timeout_s: float) -> store_pb2.StoreRequest:
    """Returns the request for an operation. The time is rounded up, so that a short wait does not become 0."""
    request = store_pb2.StoreRequest(timeout_ms=math.ceil(timeout_s * 1000))
    message = getattr(request, operation.method)
    message.SetInParent()  # otherwise the request would lack an operation without fields
    for name, value in zip(operation.parameters(), operation.arguments, strict=True):
        _put(message, name, value)
    return _weighed(request, operation.arguments)


def operation_of(request: store_pb2.StoreRequest) -> StoreOperation[object]:
    """Returns the operation of a request."""
    method = request.WhichOneof("operation")
    kind = _OPERATIONS.get(method)
    if kind is None:
        raise DistStoreError("the request names no operation that this store knows")
    message = getattr(request, method or "")
    return kind(**{name: _plain(getattr(message, name)) for name in kind.parameters()})


def reply_with(operation: StoreOperation[object], result: object) -> store_pb2.StoreReply:
    """Returns the message that carries a result or `Missing`."""
    reply = store_pb2.StoreReply()
    if isinstance(result, Missing):
        reply.missing.keys.extend(result.keys)
    elif isinstance(result, tuple):
        field = "keys" if isinstance(operation, ListKeys) else "values"
        getattr(reply, field).SetInParent()  # otherwise the reply would lack an empty result
        _put(getattr(reply, field), field, result)
    elif result is not None:
        _put(reply, _RESULT_FIELDS[type(result)], result)
    return _weighed(reply, [result.keys if isinstance(result, Missing) else result])


def _weighed(message: M, values: Iterable[object]) -> M:
    """Adds as much weight to a message as its receiver requires for its parts; a message with few parts needs none."""
    if sum(len(value) for value in values if isinstance(value, tuple)) > _UNWEIGHED_ITEMS:
        message.weight = bytes(max(0, missing_weight(type(message), message.SerializeToString())))
    return message


def result_of(reply: store_pb2.StoreReply) -> object:
    """Returns the result in a message, or `Missing`."""
    match reply.WhichOneof("result"):
        case None:
            return None
        case "problem":
            raise DistStoreError(reply.problem)
        case "missing":
            return Missing(tuple(reply.missing.keys))
        case "values":
            return tuple(reply.values.values)
        case "keys":
            return tuple(reply.keys.keys)
        case field:
            return getattr(reply, field)


def _put(message: Any, name: str, value: object) -> None:
    if isinstance(value, tuple):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | bytes | int) else tuple(value)


CLOSED: Final = "the store was closed by the process that serves it"

Undo = Callable[[], None]
Method = Callable[[Identity, Any], Awaitable[tuple[Message | bytes, Undo]]]


DESCRIPTOR: Final = store_pb2.DESCRIPTOR.services_by_name["Store"]


class ServedTable:
    """A table that this process serves to others, and uses without the network; the service ends with its last share.

    Its calls of the service `Store` run on the I/O loop; any thread may call the other methods.
    """

    def __init__(self, node: Node, address: str) -> None:
        self.address = address
        self.table = SharedTable()
        self.num_shares = 0
        self._node = node
        self._replied_at = float("-inf")

    def run(self, operation: StoreOperation[object], deadline: Deadline) -> object:
        """Runs an operation on this thread, which must not be the thread of an event loop."""
        check_off_loop()
        return self.table.execute(operation, deadline)

    def share(self) -> ServedTable:
        host, port = split_address(self.address)
        return share_table(host, port, may_share=True, timeout_s=STORE_GRACE_S)

    def close(self) -> None:
        """Releases a share. Blocks for a limited time."""
        with _lock:
            self.num_shares -= 1
            if self.num_shares or in_forked_child():
                return
            del _serving[split_address(self.address)[1]]
            self.end()

    def start_serving(self, timeout_s: float) -> None:
        self._node.add_service(DESCRIPTOR, self.methods(), timeout_s, self.address)
        register_at_exit(self.end_calls)  # scripts written for torch do not close stores

    def end(self) -> None:
        unregister_at_exit(self.end_calls)
        self.end_calls()
        with suppress(RpcdistError, RuntimeError):
            self._node.stop_serving(self.address)
        self._node.release()

    def end_calls(self) -> None:
        """Ends the calls in progress, and waits until the last replies have left."""
        if in_forked_child():
            return
        with suppress(RpcdistError, RuntimeError):  # the loop has ended, and the service with it
            self._node.io.finish(self.refuse_calls(), CLOSE_LIMIT_S)

    # ------------------------------------------------------------ the calls of other processes

    def methods(self) -> Mapping[str, Method]:
        return {"Execute": self.execute, "ExecuteLarge": self.execute_large}

    async def execute(self, peer: Identity, request: store_pb2.StoreRequest) -> tuple[store_pb2.StoreReply, Undo]:
        """Runs one operation. Cancellation removes its waiter, and puts a popped value back to its queue.

        Returns:
            The reply, and a function that puts a popped value back if the caller does not get it.
        """
        return await self._executed(request, LARGEST_UNCUT_BYTES, store_pb2.StoreReply(too_large=True))

    async def execute_large(self, peer: Identity, request: bytes) -> tuple[bytes, Undo]:
        """Like `execute`, with request and reply as bytes that travel in pieces."""
        try:
            found = parsed(store_pb2.StoreRequest, request)
        except DecodeError as exc:
            raise DistStoreError("the request is not a request to a store") from exc
        reply, undo = await self._executed(found, LARGEST_BYTES, None)
        return reply.SerializeToString(), undo

    async def _executed(
        self, request: store_pb2.StoreRequest, limit_bytes: int, instead: store_pb2.StoreReply | None
    ) -> tuple[store_pb2.StoreReply, Undo]:
        """Returns the reply and its undo. A reply beyond the limit is undone, and `instead` or an error replaces it."""
        try:
            operation = operation_of(request)
            result = await self.table.execute_on_loop(operation, request.timeout_ms / 1000)
            undo = partial(self.table.give_back, operation, result)
            # Before a reply is made: a short request may name a large value very often.
            size_bytes = sum(map(len, result)) if isinstance(result, tuple) else 0
            if size_bytes <= limit_bytes:
                reply = reply_with(operation, result)
                if (size_bytes := reply.ByteSize()) <= limit_bytes:
                    return reply, undo
            undo()
            if instead is not None:
                return instead, lambda: None
            raise DistStoreError(
                f"the reply to {operation.method}() has {size_bytes} bytes, but a store sends at most "
                f"{limit_bytes} bytes ({limit_bytes >> 20} MiB) at once. Request fewer keys at once."
            )
        except DistStoreError as exc:
            if self.table.closed:
                raise
            return store_pb2.StoreReply(problem=str(exc)), lambda: None
        finally:
            self._replied_at = asyncio.get_running_loop().time()

    async def refuse_calls(self) -> None:
        """Refuses further calls and fails those that wait. Idempotent.

        The serving process often ends as soon as it sees the key that its last client has set, before the reply to
        that client has left. So the last replies get `STORE_LINGER_S` to leave.
        """
        loop = asyncio.get_running_loop()
        failure = self.table.failure
        if self.table.close(CLOSED + (f", where this had failed: {failure}" if failure else "")):
            self._replied_at = loop.time()
        await asyncio.sleep(max(0.0, self._replied_at + STORE_LINGER_S - loop.time()))


_serving: Final[dict[int, ServedTable]] = {}
"""The tables that this process serves, by port, all on its one node."""
_lock: Final = threading.Lock()  # held while one starts or ends


def share_table(host: str, port: int, may_share: bool, timeout_s: float) -> ServedTable:
    """Starts to serve a table, or returns a share of the table that this process already serves at that port.

    Args:
        port: 0 for any free port.
        may_share: whether to share the table of an earlier caller.

    Raises:
        DistNetworkError: the port is in use, even if by a store of this process when `may_share` is not set.
    """
    with _lock:
        served = _serving.get(port)
        if served is None:
            where = f"the store cannot be served at {host} port {port}"
            with raised_as(DistNetworkError, where, TransportError, DeadlineExceeded):
                served = _serve(host, port, timeout_s)
        elif not may_share:
            raise DistNetworkError(
                f"this process already serves a store at {served.address} (address already in use). Pass "
                "multi_tenant=True to share its table, close() that store first, or choose another port."
            )
        served.num_shares += 1
        return served


def _serve(host: str, port: int, timeout_s: float) -> ServedTable:
    node = acquire_node()
    with on_error(node.release):
        served = ServedTable(node, node.serve(host, port, timeout_s, is_apart=True))
    with on_error(served.end):
        served.start_serving(timeout_s)
    _serving[split_address(served.address)[1]] = served
    return served
