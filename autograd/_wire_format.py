"""Converts verdicts to and from the messages of `proto/autograd.proto`."""

from __future__ import annotations

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._pass_events import Verdicts

__all__ = ["decode_verdicts", "encode_verdicts"]

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
