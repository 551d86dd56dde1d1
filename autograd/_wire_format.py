"""Converts verdicts and errors to and from the messages of `proto/autograd.proto`."""

from __future__ import annotations

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._autograd_errors import BackwardError
from rpcdist.autograd._pass_events import Verdicts
from rpcdist.rpc._values.failures import text_of

__all__ = ["decode_error", "decode_verdicts", "encode_error", "encode_verdicts"]

EVERY = -1  # a mask with all bits set: every tensor is used


def encode_verdicts(verdicts: Verdicts, counts: dict[int, int], target: autograd_pb2.Verdicts) -> None:
    """Writes verdicts into a message.

    Args:
        verdicts: by message of the graph.
        counts: number of tensors of each message of the graph.
        target: an empty message, to be filled.
    """
    used, unused, undecided = [], [], []
    for id, mask in verdicts.items():
        if mask is None:
            undecided.append(id)
        elif mask == 0:
            unused.append(id)
        elif mask == (1 << counts[id]) - 1:
            used.append(id)
        else:
            target.partly.add(message=id, tensors=[index for index in range(counts[id]) if mask >> index & 1])
    target.used.extend(used)
    target.unused.extend(unused)
    target.open.extend(undecided)


def decode_verdicts(message: autograd_pb2.Verdicts) -> Verdicts:
    """Reads verdicts from a message; a mask with all bits set says that all tensors are used."""
    verdicts: dict[int, int | None] = dict.fromkeys(message.open, None)
    verdicts.update(dict.fromkeys(message.unused, 0))
    verdicts.update(dict.fromkeys(message.used, EVERY))
    for partly in message.partly:
        verdicts[partly.message] = sum(1 << index for index in set(partly.tensors))
    return verdicts


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
