"""Operations of a store and their results as protobuf messages.

The fields of a request's messages have the names of the operation's, so one rule translates all operations.
"""

from __future__ import annotations

import math
from typing import Any, Final

from rpcdist._proto import store_pb2
from rpcdist.collectives._stores import store_operations as ops
from rpcdist.collectives._stores.store_operations import Missing, StoreOperation
from rpcdist.errors import DistStoreError

# Each operation, and the field of the reply that carries its result; none for an operation that returns nothing.
_RESULT_FIELDS: Final[dict[type[StoreOperation[object]], str]] = {
    ops.Set: "",
    ops.Get: "values",
    ops.Wait: "",
    ops.Check: "flag",
    ops.Add: "number",
    ops.Append: "",
    ops.CompareSet: "value",
    ops.DeleteKey: "flag",
    ops.NumKeys: "number",
    ops.ListKeys: "keys",
    ops.QueuePush: "",
    ops.QueuePop: "value",
    ops.QueueLen: "number",
}
_OPERATIONS: Final[dict[str | None, type[StoreOperation[object]]]] = {each.method: each for each in _RESULT_FIELDS}


def request_for(operation: StoreOperation[object], timeout_s: float) -> store_pb2.StoreRequest:
    """The message that asks for an operation. The time is rounded up, so that a short wait does not become none."""
    request = store_pb2.StoreRequest(timeout_ms=math.ceil(timeout_s * 1000))
    message = getattr(request, operation.method)
    message.SetInParent()  # an operation without fields would not be there otherwise
    for name, value in zip(operation.parameters(), operation.arguments, strict=True):
        _put(message, name, value)
    return request


def operation_of(request: store_pb2.StoreRequest) -> StoreOperation[object]:
    """The operation that a message asks for.

    Raises:
        DistStoreError: none that is known here.
    """
    method = request.WhichOneof("operation")
    kind = _OPERATIONS.get(method)
    if kind is None:
        raise DistStoreError("the request names no operation that this store knows")
    message = getattr(request, method or "")
    return kind(**{name: _plain(getattr(message, name)) for name in kind.parameters()})


def reply_with(operation: StoreOperation[object], result: object) -> store_pb2.StoreReply:
    """The message that carries a result, or `Missing`."""
    reply = store_pb2.StoreReply()
    if isinstance(result, Missing):
        reply.missing.keys.extend(result.keys)
    elif field := _RESULT_FIELDS[type(operation)]:
        if isinstance(result, tuple):
            getattr(reply, field).SetInParent()
            _put(getattr(reply, field), field, result)
        else:
            _put(reply, field, result)
    return reply


def result_of(reply: store_pb2.StoreReply) -> object:
    """The result that a message carries, or `Missing`.

    Raises:
        DistStoreError: the operation could not be carried out.
    """
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
