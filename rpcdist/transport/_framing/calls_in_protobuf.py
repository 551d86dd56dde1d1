"""The protobuf form of calls and replies that are not compact. It exists only in frames."""

from __future__ import annotations

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.transport.wire_messages import CallMessage, Loan, NamedReference, ReplyMessage, WireMessage, set_large


def in_protobuf(message: rpc_pb2.Message | CallMessage | ReplyMessage) -> rpc_pb2.Message:
    """The protobuf form of a call or a reply; other messages unchanged."""
    if isinstance(message, rpc_pb2.Message):
        return message
    found = rpc_pb2.Message()
    if message.large:
        found.transfer = message.transfer
        set_large(found, message.large, message.loans)
    if isinstance(message, CallMessage):
        _fill_call(found.call, message)
    else:
        _fill_reply(found.reply, message)
    return found


def from_protobuf(message: rpc_pb2.Message, num_bytes: int) -> WireMessage:
    """The call or the reply in a message that arrived as `num_bytes`; the message itself if it has neither."""
    found: CallMessage | ReplyMessage
    if message.wrapped:
        return message
    if message.HasField("call"):
        found = _call(message.call)
        found.num_arrived_bytes = num_bytes
    elif message.HasField("reply"):
        found = _reply(message.reply)
    else:
        return message
    if message.large:
        loans = [Loan(loan.buffer, loan.segment) for loan in message.loans]
        found.transfer, found.large, found.loans = message.transfer, list(message.large), loans
    return found


def _fill_call(pb: rpc_pb2.Call, call: CallMessage) -> None:
    pb.id, pb.timeout_us = call.id, call.timeout_us
    pb.autograd_context, pb.is_nested = call.context, call.is_nested
    pb.counts_as_idle, pb.traceparent = call.counts_as_idle, call.traceparent
    if call.is_by_value:
        pb.by_value = True
    elif call.function:
        pb.function = call.function
    if call.target is not None:
        _name(pb.on if call.function or call.is_by_value else pb.fetch, call.target)
    if call.result is not None:
        _name(pb.result, call.result)
        pb.result.is_serial = call.is_serial
    if call.value is not None:
        pb.arguments.CopyFrom(call.value)
    if call.device_map is not None:
        pb.device_map.CopyFrom(call.device_map)


def _call(pb: rpc_pb2.Call) -> CallMessage:
    call = CallMessage(pb.id, pb.function, pb.timeout_us, context=pb.autograd_context, is_nested=pb.is_nested)
    call.is_by_value, call.counts_as_idle, call.traceparent = pb.by_value, pb.counts_as_idle, pb.traceparent
    if pb.HasField("arguments"):
        call.value = pb.arguments
    if pb.HasField("result"):
        call.result, call.is_serial = _named(pb.result), pb.result.is_serial
    if pb.HasField("on"):
        call.target = _named(pb.on)
    elif pb.HasField("fetch"):
        call.target = _named(pb.fetch)
    if pb.HasField("device_map"):
        call.device_map = pb.device_map
    return call


def _fill_reply(pb: rpc_pb2.Reply, reply: ReplyMessage) -> None:
    pb.id = reply.id
    if reply.value is not None:
        pb.value.CopyFrom(reply.value)
    elif reply.failure is not None:
        pb.failure.CopyFrom(reply.failure)
    elif reply.is_stream:
        pb.stream = True


def _reply(pb: rpc_pb2.Reply) -> ReplyMessage:
    reply = ReplyMessage(pb.id, created=pb.created, is_stream=pb.stream)
    if pb.HasField("value"):
        reply.value = pb.value
    elif pb.HasField("failure"):
        reply.failure = pb.failure
    return reply


def _name(pb: rpc_pb2.RRefFetch | value_pb2.RRefFork, ids: NamedReference) -> None:
    pb.rref.created_on, pb.rref.local_id, pb.rref.incarnation = ids[:3]
    pb.fork.created_on, pb.fork.local_id, pb.fork.incarnation = ids[3:]


def _named(pb: rpc_pb2.RRefFetch | value_pb2.RRefFork) -> NamedReference:
    rref, fork = pb.rref, pb.fork
    return (
        rref.created_on, rref.local_id, rref.incarnation, fork.created_on, fork.local_id, fork.incarnation,
    )  # fmt: skip
