"""Gradients to and from the message that carries them: a table of tensors, or a `Value` for what does not fit into one.

Most gradients are dense tensors on the CPU. A table of those costs a tenth of a value, which has to say what lists they
are in, how they lie in memory, and which of them share it. Here nobody needs to know: whoever receives a gradient never
changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._message_nodes import Gradients
from rpcdist.errors import SerializationError
from rpcdist.rpc._values import INLINE_LIMIT, LargeBuffer, ReceiveBuffer, decode, encode_into
from rpcdist.rpc._values.compact import compact_tensors, read_compact_tensors

__all__ = ["decode_gradients", "encode_gradients"]

_CPU: Final = torch.device("cpu")


def encode_gradients(gradients: Sequence[Gradients], target: autograd_pb2.Gradients) -> Sequence[LargeBuffer]:
    """Writes the gradients of messages into `target`, which has the numbers of the messages; returns what is large.

    They arrive on the CPU: the receiver knows on which devices the tensors were that it sent.

    Args:
        gradients: for each message, those of its tensors.
        target: to be filled.
    """
    present: list[torch.Tensor] = []
    absent: list[int] = []
    for of_message in gradients:
        for one in of_message:
            if one is None:
                absent.append(len(present) + len(absent))
            elif one.is_sparse or one.is_contiguous() or one.nbytes > INLINE_LIMIT:
                present.append(one)
            else:  # a view that torch returns, of an expanded sum, has no table; what is small is copied in any case
                present.append(one.contiguous())
    table = compact_tensors(present, shares_memory=False)
    if table is None:
        return encode_into(target.value, [list(of_message) for of_message in gradients], None, map_device=_to_cpu)
    target.table = table.body
    target.counts.extend(map(len, gradients))
    if absent:
        target.absent.extend(absent)
    return table.large


def _to_cpu(device: torch.device) -> torch.device:
    return _CPU


def decode_gradients(
    message: autograd_pb2.Gradients, buffers: Sequence[ReceiveBuffer], plain_only: bool
) -> list[Gradients]:
    """The gradients that `encode_gradients` wrote, for each of the messages.

    Raises:
        SerializationError: they are damaged, refused, or cannot be rebuilt here.
    """
    num_messages = len(message.messages)
    if not message.counts:
        value = decode(message.value, buffers, None, plain_only=plain_only)
        if not isinstance(value, list) or len(value) != num_messages:
            raise SerializationError(f"gradients of {num_messages} messages arrived that are no list of so many")
        return value
    counts, absent, body = message.counts, message.absent, message.table
    total = sum(counts)
    missing = set(absent) if absent else ()
    num_tensors = total - len(absent)
    if len(counts) != num_messages or len(missing) != len(absent) or (absent and max(absent) >= total):
        raise SerializationError(
            f"gradients arrived that do not fit: of {num_messages} messages, with {len(counts)} counts, for {total} "
            f"tensors of which {len(absent)} have none"
        )
    tensors, end = read_compact_tensors(body, num_tensors, buffers)
    if end != len(body):
        raise SerializationError(f"gradients arrived with {len(body) - end} bytes that are left over")
    if total == num_messages == num_tensors and max(counts) == 1:  # one tensor each, as usual
        return [[tensor] for tensor in tensors]
    following = iter(tensors)
    flat = [None if missing and index in missing else next(following) for index in range(total)]
    ends = accumulate(counts, initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]
