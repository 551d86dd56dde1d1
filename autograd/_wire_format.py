"""Converts what workers say to each other in a backward pass to and from the messages of `proto/autograd.proto`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._autograd_errors import BackwardError
from rpcdist.autograd._outbox import MergedMessage
from rpcdist.autograd._pass_events import ChildDone, Decided, PassEvent, PassOptions, PeerBegan, Verdicts
from rpcdist.deadline import Deadline
from rpcdist.errors import ProtocolViolation
from rpcdist.rpc._values.exceptions import text_of

__all__ = [
    "check_addressed",
    "check_verdicts",
    "decode_begin_options",
    "decode_error",
    "decode_events",
    "decode_verdicts",
    "encode_error",
    "encode_merged",
    "encode_verdicts",
]

EVERY = -1  # a mask with all bits set: every tensor is used


def encode_merged(
    merged: MergedMessage, options: PassOptions, counts: dict[int, int], target: autograd_pb2.AutogradMessage
) -> None:
    """Writes all that a neighbour is told, except for the values of gradients.

    Args:
        merged: what it is told.
        options: of the pass.
        counts: number of tensors of each message of the graph.
        target: with the ids of context and pass.
    """
    if merged.begin is not None:
        begin = target.begin
        begin.fast = options.fast
        begin.retain_graph = options.retain_graph
        begin.child = merged.begin.child
        if options.deadline.is_finite:
            begin.timeout_us = max(1, int(options.deadline.remaining_s() * 1e6))
        encode_verdicts(merged.begin.received, counts, begin.received)
    if merged.verdicts:
        target.verdicts.SetInParent()
        encode_verdicts(merged.verdicts, counts, target.verdicts)
    if merged.messages:
        target.gradients.messages.extend(merged.messages)
    if merged.done:
        target.done.SetInParent()


def decode_begin_options(begin: autograd_pb2.BackwardBegin) -> PassOptions:
    timeout_s = begin.timeout_us / 1e6 if begin.timeout_us else None
    return PassOptions(begin.fast, begin.retain_graph, Deadline.after(timeout_s))


def decode_events(message: autograd_pb2.AutogradMessage, sender: int, arrived: Sequence[PassEvent]) -> list[PassEvent]:
    """The events of a neighbour's message, in the order in which they are to be handled.

    Args:
        message: the message.
        sender: the neighbour.
        arrived: the events of its gradients, whose values the caller has decoded.
    """
    events: list[PassEvent] = []
    if message.HasField("begin"):
        events.append(PeerBegan(sender, message.begin.child, decode_verdicts(message.begin.received)))
    if message.HasField("verdicts"):
        events.append(Decided(sender, decode_verdicts(message.verdicts)))
    events += arrived
    if message.HasField("done"):
        events.append(ChildDone(sender))
    return events


def encode_verdicts(verdicts: Verdicts, counts: dict[int, int], target: autograd_pb2.Verdicts) -> None:
    """Writes verdicts into a message.

    Args:
        verdicts: by message of the graph.
        counts: number of tensors of each message of the graph.
        target: an empty message, to be filled.
    """
    for id, mask in verdicts.items():
        if mask is None:
            target.open.append(id)
        elif mask == 0:
            target.unused.append(id)
        elif mask == (1 << counts[id]) - 1:
            target.used.append(id)
        else:
            target.partly.add(message=id, tensors=[index for index in range(counts[id]) if mask >> index & 1])


def decode_verdicts(message: autograd_pb2.Verdicts) -> Verdicts:
    """Reads verdicts from a message; a mask with all bits set says that all tensors are used."""
    verdicts: dict[int, int | None] = dict.fromkeys(message.open, None)
    verdicts.update(dict.fromkeys(message.unused, 0))
    verdicts.update(dict.fromkeys(message.used, EVERY))
    for partly in message.partly:
        verdicts[partly.message] = sum(1 << index for index in set(partly.tensors))
    return verdicts


def check_addressed(message: autograd_pb2.AutogradMessage, sender: int, sent_to: Callable[[int], int | None]) -> None:
    """Raises `ProtocolViolation` if a neighbour has verdicts on, or gradients of, what was sent to another.

    Args:
        message: of the neighbour.
        sender: the neighbour.
        sent_to: to whom a message of the graph was sent; None for an unknown one.
    """
    received, told = message.begin.received, message.verdicts
    partly = [one.message for verdicts in (received, told) for one in verdicts.partly]
    named = (received.used, received.unused, received.open, told.used, told.unused, told.open, partly)
    for ids in (*named, message.gradients.messages):
        for id in ids:
            to = sent_to(id)
            if to is not None and to != sender:
                raise ProtocolViolation(f"worker {sender} speaks of message {id:#x}, which was sent to worker {to}")


def check_verdicts(message: autograd_pb2.AutogradMessage, num_sent: Callable[[int], int]) -> None:
    """Compares the numbers of tensors in verdicts with what was sent, before bits are made of them.

    Args:
        message: of a neighbour.
        num_sent: how many tensors a message of the graph had that this worker sent; 0 for an unknown one.

    Raises:
        ProtocolViolation: a verdict names a tensor that its message did not have.
    """
    for verdicts in (message.begin.received, message.verdicts):
        for partly in verdicts.partly:
            if partly.tensors and max(partly.tensors) >= num_sent(partly.message):
                raise ProtocolViolation(
                    f"a verdict names tensor {max(partly.tensors)} of message {partly.message:#x}, which had "
                    f"{num_sent(partly.message)}"
                )


def encode_error(
    error: BaseException, worker_id: int, worker_name: str, target: autograd_pb2.BackwardAborted, traceback: str = ""
) -> None:
    """Writes the error that ended a pass into a message.

    Args:
        error: a `BackwardError` keeps the worker that it names.
        worker_id, worker_name: the worker that any other error came from.
        target: an empty message, to be filled.
        traceback: where the error was raised, if it has no traceback of its own.
    """
    if isinstance(error, BackwardError):
        target.worker, target.worker_name = error.node, error.worker
        target.type_name, target.text, target.traceback = error.type_name, error.text, error.traceback or traceback
    else:
        target.worker, target.worker_name = worker_id, worker_name
        target.type_name, target.text, target.traceback = type(error).__qualname__, text_of(error), traceback


def decode_error(message: autograd_pb2.BackwardAborted) -> BackwardError:
    """The error that ended a pass on another worker."""
    return BackwardError(message.worker, message.worker_name, message.type_name, message.text, message.traceback)
