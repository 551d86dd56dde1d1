"""What a caller does with the parts of a call before it sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.rpc._rref.identifiers import ReferenceShare
from rpcdist.rpc._rref.protobuf import id_to_pb
from rpcdist.rpc._values import LargeBuffer
from rpcdist.transport.wire_messages import CompactCall


def num_bytes_of(message: rpc_pb2.Message | CompactCall, large: Sequence[LargeBuffer]) -> int:
    """The bytes of a call with its large buffers, for its share of the memory in flight."""
    num_bytes = len(message.body) if isinstance(message, CompactCall) else message.ByteSize()
    for buffer in large:
        num_bytes += buffer.size
    return num_bytes


def name_value(target: rpc_pb2.RRefFetch | value_pb2.RRefFork, share: ReferenceShare) -> None:
    """Fills in which share of which reference is meant."""
    target.rref.CopyFrom(id_to_pb(share.rref))
    target.fork.CopyFrom(id_to_pb(share.fork))


def positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments as the user gave them; raises `TypeError` for what nobody means."""
    if type(args) is tuple:
        return args
    if args is None:
        return ()
    # These can be taken apart, too, but nobody who writes `args=tensor` or `args="text"` means that.
    if isinstance(args, str | bytes | torch.Tensor) or not isinstance(args, Iterable):
        raise TypeError(
            f"args must be a tuple or list of the function's arguments, not one of type {type(args).__name__}; write "
            "args=(value,) to pass one value"
        )
    return tuple(args)


def by_keyword(kwargs: Any) -> Mapping[str, Any]:
    """The same for those by keyword."""
    if kwargs is None:
        return {}
    if type(kwargs) is not dict and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of the function's keyword arguments, not a {type(kwargs).__name__}")
    return kwargs
