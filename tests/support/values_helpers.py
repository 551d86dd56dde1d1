"""The parts that the tests of the value codec share: a trip over the wire, and stand-ins for remote references."""

from __future__ import annotations

from typing import Any, NamedTuple

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.rpc._values.buffers import copy_of
from rpcdist.rpc._values.codec import decode, encode_into, fill_parts
from rpcdist.rpc._values.failures import exception_of, failure_of
from rpcdist.transport.memory_copies import LargeBuffer

__all__ = ["Box", "Encoded", "Failed", "encode", "fail", "round_trip", "wire"]


class Encoded(NamedTuple):
    """A value on its way out, and the buffers that are not in it."""

    value: value_pb2.Value
    large: list[LargeBuffer]


def encode(obj: object, shared: list[Any] | None = None, **options: Any) -> Encoded:
    """`encode_into` a new message; appends the boxes of the value to `shared`."""
    value = value_pb2.Value()
    if shared is not None:
        options.update(rref_type=Box, share=shared.append)
    return Encoded(value, encode_into(value, obj, **options))


class Box:
    """Stands for a remote reference; cannot be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise TypeError("a box is shared")


def wire(encoded: Encoded) -> value_pb2.Value:
    """The message as it arrives."""
    return value_pb2.Value.FromString(encoded.value.SerializeToString())


def round_trip(obj: object, **options: Any) -> tuple[Encoded, Any]:
    """Encodes, sends and decodes `obj`."""
    encoded = encode(obj, **options)
    large = [copy_of(buffer) for buffer in encoded.large]
    return encoded, decode(wire(encoded), large, plain_only=options.get("plain_only", False))


class Failed(NamedTuple):
    """A failure on its way out, and the buffers that are not in it."""

    failure: rpc_pb2.Failure
    large: list[LargeBuffer]

    def arrived(self, may_unpickle: bool = True) -> Exception:
        """The exception at the caller."""
        failure = rpc_pb2.Failure.FromString(self.failure.SerializeToString())
        large = [copy_of(buffer) for buffer in self.large]
        has_original = may_unpickle and failure.HasField("exception")
        return exception_of(failure, (lambda: decode(failure.exception, large)) if has_original else None)


def fail(exc: BaseException, **options: Any) -> Failed:
    """The message of a worker "w" about an exception."""
    return Failed(*failure_of(exc, "w", fill_parts, **options))
