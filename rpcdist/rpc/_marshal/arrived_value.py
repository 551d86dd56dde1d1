"""A value that has arrived: its header, its large buffers, and its remote references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import ProtocolViolation, SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._devices.gpu_sharing import ValueOnGpus
from rpcdist.rpc._devices.handler_streams import ArrivedTensors
from rpcdist.rpc._rref.handles import Handle
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.codec import decode
from rpcdist.rpc._values.compact import read_compact
from rpcdist.rpc._values.failures import exception_of
from rpcdist.rpc._values.plain import REFERENCE_BYTES, allowed_bytes
from rpcdist.rpc.future import Future
from rpcdist.transport.wire_messages import CallMessage, History, ReplyMessage

MAX_GPUS: Final = 256
MAX_SHORT_BYTES: Final = 64 * 1024  # a body up to this size is decoded quickly on the I/O loop


class Arrived:
    """One received value; decode it once, and again only if that failed, or `discard` it. Either may happen on any
    thread except the I/O loop's.

    Afterwards only the decoded object holds its memory: memory that the sender has lent is returned when that is freed.

    An instance of this class itself is None; it serves when another field says that a value has arrived.

    Attributes:
        autograd: the autograd context to which the value belongs, or None.
    """

    __slots__ = ("autograd",)

    autograd: CallContext | None

    @property
    def is_simple(self) -> bool:
        """Whether `decode` is quick and runs no user code, so that it may run on a loop."""
        return False

    @property
    def is_short(self) -> bool:
        """Like `is_simple`, but `decode` may make tensors, on the memory in which they arrived, or by a small copy."""
        return False

    @property
    def is_on_gpus(self) -> bool:
        """Whether `decode` makes tensors on GPUs."""
        return False

    def keep_gpu_tensors(self) -> None:
        """Makes `decode` keep these tensors for `join_gpus`."""

    def gpus(self) -> Sequence[int]:
        """The GPUs of this worker on which `decode` makes tensors."""
        return ()

    def join_gpus(self) -> None:
        """Makes the current streams of this thread wait for tensors that `decode` made in others, on any thread."""

    def followed_by(self, result: object) -> ArrivedTensors:
        """The tensors that a callback made from those of the value, in the current streams of this thread."""
        return ArrivedTensors.of(result)

    def confirmation(self) -> Future[None] | None:
        """Done when the owners of its references have counted them; None if there is nothing to wait for."""
        return None

    def decode(self) -> object:
        """The value. Runs user code if it is pickled."""
        return None

    def discard(self) -> None:
        """Returns the remote references that were not claimed; idempotent."""


@dataclass(slots=True, eq=False, repr=False)
class ArrivedValue(Arrived):
    """A value from a protobuf message.

    The constructor receives the shares of remote references, on the I/O loop; shares that decoding does not claim are
    returned. From a peer that may send no pickles, it accepts only as many shares as the value weighs for, since they
    take memory before the value is decoded; otherwise it raises `ProtocolViolation`.

    Attributes:
        plain_only: whether to refuse pickles.
    """

    _value: value_pb2.Value
    _buffers: Sequence[ReceiveBuffer]
    _rrefs: RRefShell
    _sender: Identity
    plain_only: bool = False
    autograd: CallContext | None = None
    _gpus: ValueOnGpus | None = None
    keeps_tensors: bool = False
    _on_gpus: ArrivedTensors | None = None
    _references: list[Handle] | None = None

    def __post_init__(self) -> None:
        value, sender = self._value, self._sender
        if value.rrefs:
            weight_bytes = value.ByteSize() + sum([buffer.size for buffer in self._buffers])
            if self.plain_only and REFERENCE_BYTES * len(value.rrefs) > allowed_bytes(weight_bytes):
                raise ProtocolViolation(
                    f"{len(value.rrefs)} remote references arrived from worker {sender.name!r} in {weight_bytes} "
                    f"bytes, but each takes {REFERENCE_BYTES} bytes of memory: send fewer at once"
                )
            self._references = [self._rrefs.receive(fork, sender.id, sender.incarnation) for fork in value.rrefs]

    @property
    def is_simple(self) -> bool:
        value = self._value
        return value.encoding == value_pb2.Value.PLAIN and not (value.rrefs or value.gpus or len(value.buffers))

    def confirmation(self) -> Future[None] | None:
        return self._rrefs.confirmation(self._references) if self._references else None

    @property
    def is_on_gpus(self) -> bool:
        return bool(self._value.gpus)

    def keep_gpu_tensors(self) -> None:
        self.keeps_tensors = True

    def gpus(self) -> Sequence[int]:
        gpus = self._value.gpus
        if not gpus:
            return ()
        if len(gpus) > MAX_GPUS:
            raise SerializationError(f"a value arrived with tensors for {len(gpus)} GPUs; the limit is {MAX_GPUS}")
        count = torch.cuda.device_count()
        return sorted({gpu for gpu in gpus if gpu < count})

    def join_gpus(self) -> None:
        if self._on_gpus is not None:
            self._on_gpus.join_gpus()

    def decode(self) -> object:
        buffers, self._buffers = self._buffers, ()
        try:
            is_wanted = self.autograd is not None or self.keeps_tensors
            return decode(
                self._value,
                buffers,
                None if self._references is None else cache(self._claim),  # the same object each time
                plain_only=self.plain_only,
                on_tensors=self._use_tensors if is_wanted else None,
                gpus=self._gpus,
            )
        finally:
            if self._gpus is not None:
                self._gpus.done()
            self.discard()

    def _claim(self, index: int) -> object:
        """The remote reference of an entry of the value."""
        if self._references is None or index >= len(self._references):
            raise SerializationError(f"the value refers to remote reference {index} of {len(self._references or ())}")
        return self._rrefs.wrap(self._references[index])

    def _use_tensors(self, tensors: list[torch.Tensor]) -> None:
        if self.keeps_tensors:
            self._on_gpus = ArrivedTensors([tensor for tensor in tensors if tensor.is_cuda])
        if self.autograd is not None:
            leg = self._value.autograd
            history = History(leg.message, leg.stamp) if self._value.HasField("autograd") else None
            self.autograd.received(history, tensors, self._sender.id)

    def discard(self) -> None:
        if self._gpus is not None:
            self._gpus.discard()
        self._references = None


@dataclass(slots=True, eq=False)
class ArrivedFailure:
    """The failure of a call. Make its exception once, or `discard` it; on any thread except the I/O loop's.

    Attributes:
        original: the exception itself; None if there is none, or if it must not be unpickled here.
    """

    _failure: rpc_pb2.Failure
    original: Arrived | None = None

    @property
    def type_name(self) -> str:
        """The type of the exception, as the callee names it."""
        return self._failure.type_name

    def exception(self) -> Exception:
        """The exception to raise. Runs user code if it is unpickled."""
        return exception_of(self._failure, None if self.original is None else self.original.decode)

    def discard(self) -> None:
        """Returns the remote references that were not claimed; idempotent."""
        if self.original is not None:
            self.original.discard()


class ArrivedCompact(Arrived):
    """A value in compact form, which has no references to return or to wait for."""

    __slots__ = ("_buffers", "_message", "_sender")

    def __init__(self, message: CallMessage | ReplyMessage, buffers: Sequence[ReceiveBuffer], sender: Identity) -> None:
        self._message = message
        self._buffers = buffers
        self._sender = sender
        self.autograd = None

    @property
    def is_simple(self) -> bool:
        return not self._message.num_tensors

    @property
    def is_short(self) -> bool:
        return len(self._message.body) <= MAX_SHORT_BYTES

    def decode(self) -> object:
        message = self._message
        attach = None if self.autograd is None else partial(self._attach, self.autograd)
        value = read_compact(message.body, message.num_tensors, self._buffers, attach)
        self._buffers = ()  # not before: a `CallFuture` tries again on the pool, which shall find the same error
        return value

    def _attach(self, context: CallContext, tensors: list[torch.Tensor]) -> None:
        context.received(self._message.history, tensors, self._sender.id)
