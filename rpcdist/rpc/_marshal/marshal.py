"""Converts values to and from the wire, with what belongs to them beyond data.

An outgoing value shares its remote references with the receiver, and its tensors are recorded if gradients will flow
back. If a message may not have arrived, its shares are returned, or their values would never be freed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import Overloaded, SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._devices.gpu_sharing import GpuSharing
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedCompact, ArrivedFailure, ArrivedValue
from rpcdist.rpc._peers.device_maps import DeviceMap
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.codec import add_weight, fill_parts, fill_value, unpicklable_part, write_plain
from rpcdist.rpc._values.compact import compact_value
from rpcdist.rpc._values.exceptions import add_note
from rpcdist.rpc._values.failures import failure_of
from rpcdist.rpc._values.pickled import PickledParts
from rpcdist.rpc._values.plain import PlainWriter
from rpcdist.rpc._values.tensors import DeviceRoute, ShareRRef
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import CallMessage, ReplyMessage, WireMessage

logger = logging.getLogger(__name__)


Share = value_pb2.RRefFork | int
"""A right that the receiver of an encoded value gets with it: the share of a reference, or the loan of this number."""


class Written(NamedTuple):
    """An object on its way into a message.

    Attributes:
        obj: the object.
        to: the id of the receiving worker.
        session: for the result of a call, the session of the call.
        writer: has written it without pickle; None if that is impossible.
        device_map: a device map for this call alone, or its inverse for the result.
    """

    obj: object
    to: int
    session: AnySession | None
    writer: PlainWriter | None
    device_map: DeviceMap | None = None


@dataclass(eq=False, repr=False)
class Marshal:
    """Encodes and decodes the values of one agent. Encoding may run user code, so it happens on user or pool threads.

    Args:
        rref_type: the class of remote references.
        gpus: sends tensors on GPUs to other workers.
        by_value: whether to send the code of functions and classes that the receiver cannot import.
        allow_pickle: whether to send and accept pickles; without it, only plain values.

    Attributes:
        gpu_news: not empty while there is news for workers that lend memory of GPUs.
        send_gpu_news: sends that news to a session's peer, before the next message.
        moves_cpu: see `GpuSharing`.
    """

    _rrefs: RRefShell
    _rref_type: type
    _gpus: GpuSharing
    _worker_name: str
    _: KW_ONLY
    by_value: bool
    allow_pickle: bool

    def __post_init__(self) -> None:
        self.gpu_news = self._gpus.borrowed.news
        self.send_gpu_news = self._gpus.send_report
        self.moves_cpu = self._gpus.moves_cpu

    def write(
        self, obj: object, to: int, session: AnySession | None = None, device_map: DeviceMap | None = None
    ) -> Written:
        """The first step of encoding an object for a worker, before `put` or `fill`; see `Written`."""
        writer = write_plain(obj, self._rref_type, plain_only=not self.allow_pickle)
        return Written(obj, to, session, writer, device_map)

    def put(
        self, message: CallMessage | ReplyMessage, written: Written, autograd: CallContext | None = None
    ) -> tuple[Sequence[LargeBuffer], Sequence[Share]]:
        """Puts the value into a call or a reply, in the compact form if both allow it; see `fill`."""
        writer = written.writer
        if (
            writer is not None
            and message.is_compact
            and not (writer.tensors and self.moves_cpu(written.to, written.session, written.device_map))
        ):
            value = compact_value(writer)
            if value is not None:
                message.body, large = value
                message.num_tensors = len(writer.tensors)
                if autograd is not None and writer.tensors:
                    message.history = autograd.sending(writer.tensors, written.to)
                return large, ()
        message.value = value_pb2.Value()
        return self.fill(message.value, written, autograd)

    def fill(
        self, value: value_pb2.Value, written: Written, autograd: CallContext | None = None
    ) -> tuple[list[LargeBuffer], Sequence[Share]]:
        """Puts the value into a message.

        Args:
            autograd: records the tensors that require grad, unless it is None.

        Returns:
            The large buffers, and the shares, for `give_back`.
        """
        obj, to, session, writer, device_map = written
        record = None if autograd is None else partial(_record, autograd, value, to)
        fill = partial(
            fill_value,
            value,
            obj,
            writer,
            self._rref_type,
            by_value=self.by_value,
            plain_only=not self.allow_pickle,
            on_tensors=record,
        )
        return self._with_shares(fill, value, to, session, device_map)

    def _with_shares(
        self,
        fill: Callable[[ShareRRef, DeviceRoute], list[LargeBuffer]],
        value: value_pb2.Value,
        to: int,
        session: AnySession | None,
        device_map: DeviceMap | None,
    ) -> tuple[list[LargeBuffer], Sequence[Share]]:
        """Fills a value with `fill`, and returns the buffers and the shares; if it fails, no share is left."""
        forks: list[value_pb2.RRefFork] = []
        incarnation = None if session is None else session.peer.incarnation
        route = self._gpus.route(to, session, device_map)
        try:
            large = fill(lambda rref: forks.append(self._rrefs.share(rref, to, incarnation)), route)
            if forks:
                value.rrefs.extend(forks)
                add_weight(value)
        except BaseException:
            self.give_back([*forks, *route.loans])
            raise
        return large, [*forks, *route.loans] if route.loans else forks

    def explain(self, exc: BaseException, what: str, **parts: object) -> None:
        """Adds a note to an error of `fill`: the named part that cannot be sent, and that it was sent as `what`."""
        if issubclass(type(exc), SerializationError):  # its text says so itself
            return
        try:
            for name, part in parts.items():
                found = unpicklable_part(part, name, self._rref_type, self.by_value)
                if found is not None:
                    add_note(exc, f"{found}, which should be sent {what}.")
                    return
        except Exception:  # the search calls `repr` of the user's objects, and reads their attributes
            logger.debug("which part cannot be sent was not found", exc_info=True)

    def why_unpicklable(self, obj: object, name: str) -> str | None:
        """A sentence that names the part of `obj` that cannot be sent to other workers, by its path; or None."""
        return unpicklable_part(obj, name, self._rref_type, self.by_value)

    def give_back(self, shares: Iterable[Share] | None) -> None:
        """Returns shares whose message may not have arrived."""
        for share in shares or ():
            if isinstance(share, int):
                self._gpus.doubt(share)
            else:
                self._rrefs.share_failed(share)

    def send(
        self, session: AnySession, message: WireMessage, large: Sequence[LargeBuffer], forks: Sequence[Share]
    ) -> None:
        """Sends a message with an encoded value on a session; returns the shares if the session has ended."""
        if self.gpu_news:
            self.send_gpu_news(session)
        session.send(message, large)
        if forks and session.closed_reason is not None:
            self.give_back(forks)

    def check_room(
        self, session: AnySession, size_bytes: int, large: Sequence[LargeBuffer], forks: Sequence[Share]
    ) -> None:
        """Checks that the peer's account has room for an answer, which the peer may not read soon.

        Raises:
            Overloaded: it has none; the shares have been returned.
        """
        num_bytes = size_bytes + sum(buffer.size for buffer in large)
        if (refusal := session.account.refusal(num_bytes, "are the answer to a call")) is not None:
            self.give_back(forks)
            raise Overloaded(refusal)

    def arrived(self, value: value_pb2.Value, buffers: Sequence[ReceiveBuffer], sender: Identity) -> ArrivedValue:
        """A value that has arrived; its shares are received at once, the rest is decoded later. On the I/O loop."""
        gpus = self._gpus.arriving(value, sender)
        return ArrivedValue(value, buffers, self._rrefs, sender, not self.allow_pickle, _gpus=gpus)

    def arrived_with(
        self, message: CallMessage | ReplyMessage, buffers: Sequence[ReceiveBuffer], sender: Identity
    ) -> Arrived | None:
        """The value of a call or a reply, None if it has none; see `arrived`."""
        if message.value is not None:
            return self.arrived(message.value, buffers, sender)
        return ArrivedCompact(message, buffers, sender) if message.body else None

    def failure(
        self, exc: BaseException, session: AnySession, device_map: DeviceMap | None = None
    ) -> tuple[rpc_pb2.Failure, list[LargeBuffer], Sequence[Share]]:
        """The message for an exception of this worker, with large buffers and shares as in `fill`; raises nothing."""
        shared: list[Share] = []

        def fill(value: value_pb2.Value, parts: PickledParts) -> list[LargeBuffer]:
            fill_it = partial(fill_parts, value, parts)
            large, shares = self._with_shares(fill_it, value, session.peer.id, session, device_map)
            shared.extend(shares)
            return large

        failure, large = failure_of(exc, self._worker_name, fill, rref_type=self._rref_type, by_value=self.by_value)
        return failure, large, shared

    def arrived_failure(
        self, failure: rpc_pb2.Failure, buffers: Sequence[ReceiveBuffer], sender: Identity
    ) -> ArrivedFailure:
        """A failure that has arrived; see `arrived`. Without pickles, only its texts are read."""
        if not failure.HasField("exception"):
            return ArrivedFailure(failure)
        original = self.arrived(failure.exception, buffers, sender)
        if self.allow_pickle:
            return ArrivedFailure(failure, original)
        original.discard()
        return ArrivedFailure(failure)


def _record(context: CallContext, value: value_pb2.Value, to: int, tensors: list[torch.Tensor]) -> None:
    history = context.sending(tensors, to)
    if history is not None:
        value.autograd.message, value.autograd.stamp = history
