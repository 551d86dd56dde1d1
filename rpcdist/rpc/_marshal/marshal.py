"""Converts values to and from the wire, with what belongs to them beyond data.

An outgoing value shares its remote references with the receiver, and its tensors are recorded if gradients will flow
back. If a message may not have arrived, its shares are returned, or their values would never be freed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.errors import Overloaded, SerializationError
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import CallContext
from rpcdist.rpc._devices.gpu_sharing import GpuSharing
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedCompact, ArrivedFailure, ArrivedValue, OutgoingRRefs
from rpcdist.rpc._peers.device_maps import DeviceMap
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._rref.shell import RRefShell
from rpcdist.rpc._values import LargeBuffer, ReceiveBuffer
from rpcdist.rpc._values.codec import add_weight, fill_pickled, fill_value, unpicklable_part, write_plain
from rpcdist.rpc._values.compact import compact_value
from rpcdist.rpc._values.exceptions import add_note
from rpcdist.rpc._values.failures import failure_of
from rpcdist.rpc._values.pickled import PickledParts
from rpcdist.rpc._values.plain import PlainWriter
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
        externals: shares its remote references.
        device_map: a device map for this call alone, or its inverse for the result.
    """

    obj: object
    to: int
    session: AnySession | None
    writer: PlainWriter | None
    externals: OutgoingRRefs
    device_map: DeviceMap | None = None


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

    def __init__(
        self,
        rrefs: RRefShell,
        rref_type: type,
        gpus: GpuSharing,
        worker_name: str,
        *,
        by_value: bool,
        allow_pickle: bool,
    ) -> None:
        self.by_value = by_value
        self.allow_pickle = allow_pickle
        self._rrefs = rrefs
        self._rref_type = rref_type
        self._gpus = gpus
        self.gpu_news = gpus.borrowed.news
        self.send_gpu_news = gpus.send_report
        self.moves_cpu = gpus.moves_cpu
        self._worker_name = worker_name

    def encode(
        self,
        value: value_pb2.Value,
        obj: object,
        to: int,
        autograd: CallContext | None = None,
        *,
        session: AnySession | None = None,
        device_map: DeviceMap | None = None,
    ) -> tuple[list[LargeBuffer], Sequence[Share]]:
        """Encodes an object for a worker.

        Args:
            value: the message to fill.
            autograd: records the tensors that require grad, unless it is None.
            session: for the result of a call, the session of the call.
            device_map: a device map for this call alone, or its inverse for the result.

        Returns:
            The large buffers, and the shares, for `give_back`.
        """
        return self.fill(value, self.write(obj, to, session, device_map), autograd)

    def write(
        self, obj: object, to: int, session: AnySession | None = None, device_map: DeviceMap | None = None
    ) -> Written:
        """The first step of encoding an object for a worker, before `put` or `fill`."""
        incarnation = None if session is None else session.peer.incarnation
        externals = OutgoingRRefs(self._rrefs, self._rref_type, to, incarnation)
        writer = write_plain(obj, externals, plain_only=not self.allow_pickle)
        return Written(obj, to, session, writer, externals, device_map)

    def put(
        self, message: CallMessage | ReplyMessage, written: Written, autograd: CallContext | None = None
    ) -> tuple[Sequence[LargeBuffer], Sequence[Share]]:
        """Puts the value into a call or a reply, in the compact form if both allow it. See `encode`."""
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
        """See `encode`."""
        externals, to = written.externals, written.to
        record = None if autograd is None else partial(_record, autograd, value, to)
        route = self._gpus.route(to, written.session, written.device_map)
        try:
            large = fill_value(
                value,
                written.obj,
                written.writer,
                externals,
                by_value=self.by_value,
                plain_only=not self.allow_pickle,
                route=route,
                on_tensors=record,
            )
            if externals.forks:
                value.rrefs.extend(externals.forks)
                add_weight(value)
        except BaseException:
            self.give_back([*externals.forks, *route.loans])
            raise
        return large, [*externals.forks, *route.loans] if route.loans else externals.forks

    def explain(self, exc: BaseException, written: Written, what: str, **parts: object) -> None:
        """Adds a note to an error of `fill`: the named part that cannot be sent, and that it was sent as `what`."""
        if issubclass(type(exc), SerializationError):  # its text says so itself
            return
        try:
            for name, part in parts.items():
                found = unpicklable_part(part, name, written.externals, self.by_value)
                if found is not None:
                    add_note(exc, f"{found}, which should be sent {what}.")
                    return
        except Exception:  # the search calls `repr` of the user's objects, and reads their attributes
            logger.debug("which part cannot be sent was not found", exc_info=True)

    def why_unpicklable(self, obj: object, name: str) -> str | None:
        """A sentence that names the part of `obj` that cannot be sent to other workers, by its path; or None."""
        externals = OutgoingRRefs(self._rrefs, self._rref_type, self._rrefs.me.worker)
        return unpicklable_part(obj, name, externals, self.by_value)

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

    def arrived(
        self,
        value: value_pb2.Value,
        buffers: Sequence[ReceiveBuffer],
        sender: Identity,
        autograd: CallContext | None = None,
    ) -> ArrivedValue:
        """A value that has arrived; its shares are received at once, the rest is decoded later. On the I/O loop."""
        gpus = self._gpus.arriving(value, sender)
        return ArrivedValue(value, buffers, self._rrefs, sender, not self.allow_pickle, autograd, gpus)

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
        """The message for an exception of this worker, with large buffers and shares as in `encode`; raises nothing."""
        to = session.peer.id
        shared: list[Share] = []

        def fill(value: value_pb2.Value, parts: PickledParts) -> list[LargeBuffer]:
            externals = OutgoingRRefs(self._rrefs, self._rref_type, to, session.peer.incarnation)
            route = self._gpus.route(to, session, device_map)
            try:
                large = fill_pickled(value, parts, externals, route)
            except BaseException:
                self.give_back([*externals.forks, *route.loans])
                raise
            value.rrefs.extend(externals.forks)
            add_weight(value)
            shared.extend(externals.forks)
            shared.extend(route.loans)
            return large

        known = OutgoingRRefs(self._rrefs, self._rref_type, to)
        failure, large = failure_of(exc, self._worker_name, fill, externals=known, by_value=self.by_value)
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
