"""The messages between workers in a backward pass, and their bytes: the body of a PASS frame (`CompactPass`).

All that a worker has to tell a neighbour at a time is one message. Its receiver takes the parts in this order: the
sender takes part, verdicts, gradients, the sender is done. So any messages may be merged, and any one split.

    head      flags (u16), what is left of the deadline (u64, us; 0: none), and six counts (u32 each): of messages of
              the graph that are undecided, unused, used, have gradients here; of tensors without and with a gradient
    ids       (i64) of the undecided, of the unused, of the used messages, and of those with gradients
    counts    (u32) of the tensors of each message with gradients, then the numbers (u32) of those that have none
    masks     for each used message, the size (u32) and the bytes of a bit mask: which of its tensors are used
    follow-up if there is one, the size (u32) and the bytes
    trace     if there is one, the size (u32) and the bytes of the W3C's header
    rest      the gradients, one after the other, as a table (`rpcdist/rpc/_values/compact.py`), or as a `Value`; or the
              bytes of `work` or `outcome`

Most gradients are dense tensors on the CPU. A table of those costs a tenth of a value, which has to say what lists they
are in, how they lie in memory, and which of them share it. None of that matters
here, since the receiver of a gradient never changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from struct import Struct, pack, unpack_from
from struct import error as StructError
from typing import Final

import torch
from google.protobuf.message import DecodeError

from rpcdist._proto import autograd_pb2, value_pb2
from rpcdist.autograd._message_nodes import Gradients, RecordedSend
from rpcdist.deadline import Deadline
from rpcdist.errors import AutogradError, BackwardError, ProtocolViolation, SerializationError, text_of
from rpcdist.rpc._inspection.call_records import MAX_TRACEPARENT_CHARS
from rpcdist.rpc._values.buffers import INLINE_LIMIT, ReceiveBuffer
from rpcdist.rpc._values.codec import decode, encode_into
from rpcdist.rpc._values.compact import compact_tensors, read_compact_tensors
from rpcdist.rpc._values.rebuild import GpuArrivals
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.transport._framing.message_parts import parsed
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.wire_messages import MAX_COMPACT_BODY_BYTES, CompactPass

_HEAD: Final = Struct("<HQ6I")
_BEGINS, _CHILD, _FAST, _RETAIN, _DONE, _HEAVY, _COUNTS, _VALUE, _WORK, _OUTCOME = (1 << bit for bit in range(10))
_FOLLOW_UP, _FOLLOWS, _TRACED = 1 << 10, 1 << 11, 1 << 12
_CPU: Final = torch.device("cpu")


class UnknownMessages(AutogradError):
    """A worker has received messages in a context that this process has not sent: this process replaces another one,
    or the context has just ended."""


@dataclass(slots=True, eq=False)
class PassMessage:
    """Everything that a worker sends to a neighbour in one turn.

    Attributes:
        begins: the sender takes part. Messages that it got from the receiver, and does not name here, are unused.
        is_child: with `begins`: the receiver began first, and hears when the sender and its children are done.
        fast, retain_graph, timeout_us: with `begins`: options of the pass, and its remaining time; 0 means no limit.
        verdicts: by message of the graph that the receiver sent: a mask of the tensors that are used, or None while
            that is undecided.
        messages: the messages of the graph whose gradients are here. They need no verdict.
        gradients: for each of `messages`, the gradients of its tensors; see `read_gradients`.
        is_done: the sender and its children have done their part.
        is_heavy: with `is_done`: one of them holds much memory for the context, so its end must not be put off.
        follow_up: with `begins`: `work` for the receiver as soon as its part is done, if it has no other neighbour.
        traceparent: with `begins`: the W3C header of the pass's span; empty if there is none.
        follows: with `is_done`: the sender does the follow-up now, and its outcome follows.
        work: alone: work for the receiver when the pass has ended, see `_step_part`; `timeout_us` is its limit.
        outcome: alone: the outcome of that work.
    """

    begins: bool = False
    is_child: bool = False
    fast: bool = False
    retain_graph: bool = False
    is_done: bool = False
    is_heavy: bool = False
    follows: bool = False
    follow_up: bytes | None = None
    traceparent: str = ""
    timeout_us: int = 0
    verdicts: dict[int, int | None] = field(default_factory=dict)
    messages: list[int] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    work: bytes | None = None
    outcome: bytes | None = None
    # The gradients of a message that has arrived: body, counts, absent, number of tensors, buffers; and for a `Value`,
    # the devices of the tensors whose gradients they are.
    _rest: (
        tuple[bytes, Sequence[int], Sequence[int], int, Sequence[ReceiveBuffer], Sequence[torch.device] | None] | None
    ) = None

    def add_gradients(self, message: int, gradients: Gradients) -> None:
        """Adds the gradients of the tensors of one message of the graph."""
        self.messages.append(message)
        self.gradients.append(gradients)

    def named(self) -> dict[int, int | None]:
        """The verdicts, including those that a following gradient implies."""
        return {**dict.fromkeys(self.messages), **self.verdicts} if self.messages else self.verdicts

    def encode(
        self, context: int, backward: int, new_route: Callable[[], DeviceRoute | None] = lambda: None
    ) -> tuple[CompactPass, Sequence[LargeBuffer], Sequence[int]]:
        """Encodes the message for a session; returns it, its large buffers, and its loans of GPU memory.

        Gradients on GPUs travel by a route; the receiver knows on which devices the tensors were that it sent.
        """
        flags = _BEGINS * self.begins | _CHILD * self.is_child | _DONE * self.is_done
        if self.fast or self.retain_graph or self.is_heavy:
            flags |= _FAST * self.fast | _RETAIN * self.retain_graph | _HEAVY * self.is_heavy
        if self.follow_up is not None or self.follows:
            flags |= _FOLLOW_UP * (self.follow_up is not None) | _FOLLOWS * self.follows
        if self.traceparent:
            flags |= _TRACED
        ids: list[int] = []
        masks: list[bytes] = []
        num_open = num_unused = num_used = 0
        if self.verdicts:
            ids = [id for id, mask in self.verdicts.items() if mask is None]
            num_open = len(ids)
            ids += [id for id, mask in self.verdicts.items() if mask == 0]
            num_unused = len(ids) - num_open
            for id, mask in self.verdicts.items():
                if mask:
                    ids.append(id)
                    masks.append(mask.to_bytes((mask.bit_length() + 7) // 8, "little"))
            num_used = len(masks)
        numbers: list[int] = []
        num_absent = num_tensors = 0
        rest: bytes = b""
        large: Sequence[LargeBuffer] = ()
        route = None
        if self.messages:
            ids += self.messages
            present: list[torch.Tensor] = []
            absent: list[int] = []
            for of_message in self.gradients:
                for one in of_message:
                    if one is None:
                        absent.append(len(present) + len(absent))
                        continue
                    if one.requires_grad:  # a hook may have returned one that does
                        one = one.detach()
                    # A view that torch returns, of an expanded sum, has no table; small tensors are copied in any case.
                    is_ready = one.is_sparse or one.is_contiguous() or one.nbytes > INLINE_LIMIT
                    present.append(one if is_ready else one.contiguous())
            num_absent, num_tensors = len(absent), len(present)
            if absent or num_tensors != len(self.messages) or max(map(len, self.gradients)) != 1:
                flags |= _COUNTS
                numbers = [*map(len, self.gradients), *absent]
            table = compact_tensors(present, shares_memory=False)
            if table is not None:
                rest, large = table
            else:
                flags |= _VALUE
                value = value_pb2.Value()
                route = new_route()
                large = encode_into(value, present, route=route)
                rest = value.SerializeToString()
        elif self.work is not None:
            flags, rest = flags | _WORK, self.work
        elif self.outcome is not None:
            flags, rest = flags | _OUTCOME, self.outcome
        head = _HEAD.pack(
            flags, self.timeout_us, num_open, num_unused, num_used, len(self.messages), num_absent, num_tensors
        )
        body = head + pack(f"<{len(ids)}q{len(numbers)}I", *ids, *numbers)
        for mask_bytes in masks:
            body += pack("<I", len(mask_bytes)) + mask_bytes
        if self.follow_up is not None:
            body += pack("<I", len(self.follow_up)) + self.follow_up
        if self.traceparent:
            body += pack("<I", len(self.traceparent)) + self.traceparent.encode("ascii", "replace")
        body += rest
        loans = route.loans if route is not None else ()
        if len(body) <= MAX_COMPACT_BODY_BYTES:
            return CompactPass(context, backward, body), large, loans
        return CompactPass(context, backward, b""), [LargeBuffer(memoryview(body)), *large], loans

    def read_gradients(
        self, plain_only: bool, arriving: Callable[[value_pb2.Value], GpuArrivals] | None = None
    ) -> None:
        """Fills `gradients` of a message that has arrived; `arriving` takes them to GPUs. Not on the I/O loop.

        Raises:
            SerializationError: they are damaged, refused, or cannot be rebuilt here.
        """
        if self._rest is None:
            return
        (body, counts, absent, num_tensors, buffers, devices), self._rest = self._rest, None
        if devices is not None:
            tensors = _read_value(value_for_devices(body, devices), num_tensors, buffers, plain_only, arriving)
        else:
            tensors, end = read_compact_tensors(body, num_tensors, buffers)
            if end != len(body):
                raise SerializationError(f"gradients arrived with {len(body) - end} bytes that are left over")
        if not counts:  # each message has one tensor, as usual
            self.gradients = [[tensor] for tensor in tensors]
            return
        missing, following = set(absent), iter(tensors)
        flat = [None if number in missing else next(following) for number in range(sum(counts))]
        self.gradients = [flat[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def value_for_devices(body: bytes, devices: Sequence[torch.device]) -> value_pb2.Value:
    """The gradients in a `Value`, whose tensors name `devices`, those of their tensors here, in place of any GPU.

    If the value does not show whose gradient each tensor is (two of them are the same object), and the devices differ,
    the gradients are moved when they are decoded. A loan is copied from its GPU first.
    """
    try:
        value = parsed(value_pb2.Value, body)
    except (DecodeError, ProtocolViolation) as exc:
        raise SerializationError(f"gradients arrived that cannot be read: {exc}") from exc
    sparse = [(header.sparse, number) for number, header in enumerate(value.tensors) if header.HasField("sparse")]
    if len(set(devices)) == 1:
        place = dict.fromkeys(range(len(value.tensors)), devices[0])
    elif len(value.tensors) - 2 * len(sparse) == len(devices):
        place = dict(enumerate(devices))
        for parts, number in sparse:
            if number < len(devices):
                place[parts.indices] = place[parts.values] = devices[number]
    else:
        return value
    for number, header in enumerate(value.tensors):
        device = place.get(number)
        if device is None or header.device != "cuda":
            continue
        is_lent = header.buffer < len(value.buffers) and value.buffers[header.buffer].gpu_loan
        if device.type == "cuda":
            header.device = str(device)
            if device.index not in value.gpus:
                value.gpus.append(device.index)
        elif device.type == "cpu" and not is_lent:
            header.device = ""
    return value


def _read_value(
    value: value_pb2.Value,
    num_tensors: int,
    buffers: Sequence[ReceiveBuffer],
    plain_only: bool,
    arriving: Callable[[value_pb2.Value], GpuArrivals] | None,
) -> list[torch.Tensor]:
    gpus = None if arriving is None else arriving(value)
    try:
        tensors = decode(value, buffers, None, plain_only=plain_only, gpus=gpus)
    finally:
        if gpus is not None:
            gpus.done()
    if (
        not isinstance(tensors, list)
        or len(tensors) != num_tensors
        or not all([isinstance(one, torch.Tensor) for one in tensors])
    ):
        raise SerializationError(f"a backward pass expected {num_tensors} gradients, and got something else")
    return tensors


def begins(part: CompactPass, buffers: Sequence[ReceiveBuffer]) -> bool:
    """Whether a message announces that its sender takes part in the pass."""
    body = part.body or (buffers[0].view if buffers else b"")
    return bool(len(body) and body[0] & _BEGINS)


def brings_work(part: CompactPass) -> bool:
    """Whether a message is for a worker where the pass has ended, or never was."""
    return len(part.body) >= _HEAD.size and bool(part.body[1] & _WORK >> 8)


def read_work(part: CompactPass) -> tuple[bytes, Deadline]:
    """The bytes of `work` in a message, and the deadline for it."""
    timeout_us = _HEAD.unpack_from(part.body)[1]
    return part.body[_HEAD.size :], Deadline.after(timeout_us / 1e6 if timeout_us else None)


def announced_gradients(part: CompactPass, sender: int, sends: Mapping[int, RecordedSend]) -> value_pb2.Value | None:
    """The gradients of a message whose large buffers have not arrived, if they are a `Value`; see `read_message`."""
    if len(part.body) < _HEAD.size or not part.body[0] & _VALUE:  # a long body is among these buffers
        return None
    rest = read_message(part, (), sender, sends)._rest
    return None if rest is None or rest[-1] is None else value_for_devices(rest[0], rest[-1])


def read_message(
    part: CompactPass, buffers: Sequence[ReceiveBuffer], sender: int, sends: Mapping[int, RecordedSend]
) -> PassMessage:
    """Reads a message from a neighbour to which `sends` went, by message; its gradients are read later.

    Every number is compared with a limit before its use.

    Raises:
        ProtocolViolation: the message is damaged, or names messages that were sent to another worker.
        UnknownMessages: it names messages that this process did not send, or does not know any more.
    """
    body = part.body
    if not body and buffers:
        body, buffers = bytes(buffers[0].view), buffers[1:]
    try:
        flags, timeout_us, num_open, num_unused, num_used, num_messages, num_absent, num_tensors = _HEAD.unpack_from(
            body
        )
        num_ids = num_open + num_unused + num_used + num_messages
        at = _HEAD.size
        if num_ids > (len(body) - at) // 8:
            raise ProtocolViolation(f"worker {sender} sent a message of a backward pass that is cut off")
        ids: Sequence[int] = unpack_from(f"<{num_ids}q", body, at) if num_ids else ()
        at += 8 * num_ids
        for id in ids:
            send = sends.get(id)
            if send is None or num_ids > 2 * len(sends):  # a verdict and a gradient for each
                raise UnknownMessages(
                    f"{num_ids} messages of the autograd context are unknown here: the process that sent them is gone, "
                    "or the context is over there"
                )
            if send.to != sender:
                text = f"worker {sender} speaks of message {id:#x}, which was sent to worker {send.to}"
                raise ProtocolViolation(text)
        made = PassMessage()
        made.begins = bool(flags & _BEGINS)
        made.is_child = bool(flags & _CHILD)
        made.is_done = bool(flags & _DONE)
        if flags & (_FAST | _RETAIN | _HEAVY):
            made.fast, made.retain_graph, made.is_heavy = [bool(flags & one) for one in (_FAST, _RETAIN, _HEAVY)]
        made.timeout_us = timeout_us
        counts: Sequence[int] = ()
        absent: Sequence[int] = ()
        if flags & _COUNTS:
            if num_absent > (len(body) - at) // 4:
                raise ProtocolViolation(f"worker {sender} sent a message of a backward pass that is cut off")
            numbers = unpack_from(f"<{num_messages + num_absent}I", body, at)
            counts, absent = numbers[:num_messages], numbers[num_messages:]
            at += 4 * len(numbers)
        if num_ids > num_messages:
            made.verdicts = dict.fromkeys(ids[:num_open])
            made.verdicts.update(dict.fromkeys(ids[num_open : num_open + num_unused], 0))
            for id in ids[num_open + num_unused : num_ids - num_messages]:
                count = len(sends[id].node.next_functions)
                bits, at = _piece(body, at, count // 8 + 1)
                mask = int.from_bytes(bits, "little")
                if mask >> count:
                    text = f"a verdict names tensor {mask.bit_length() - 1} of message {id:#x}, which had {count}"
                    raise ProtocolViolation(text)
                made.verdicts[id] = mask
        made.follows = bool(flags & _FOLLOWS)
        if flags & _FOLLOW_UP:
            made.follow_up, at = _piece(body, at, len(body))
        if flags & _TRACED:
            header, at = _piece(body, at, MAX_TRACEPARENT_CHARS)
            made.traceparent = header.decode("ascii", "replace")
        if num_messages:
            made.messages = list(ids[num_ids - num_messages :])
            _check_counts(made.messages, counts, absent, num_tensors, sends)
            devices = _present_devices(made.messages, absent, sends) if flags & _VALUE else None
            made._rest = body[at:], counts, absent, num_tensors, buffers, devices
        elif flags & _OUTCOME:
            made.outcome = body[at:]
        elif num_tensors or buffers or at != len(body):
            raise ProtocolViolation(f"worker {sender} sent a message of a backward pass with bytes that are left over")
    except StructError as exc:
        raise ProtocolViolation(f"worker {sender} sent a message of a backward pass that is damaged: {exc}") from exc
    return made


def _piece(body: bytes, at: int, most: int) -> tuple[bytes, int]:
    """The bytes at a position, after their size, and the position of their end. Raises `StructError`."""
    (size,) = unpack_from("<I", body, at)
    if size > most:
        raise StructError(f"{size} bytes are in a place for {most} at most")
    return unpack_from(f"<{size}s", body, at + 4)[0], at + 4 + size


def _present_devices(
    messages: Sequence[int], absent: Sequence[int], sends: Mapping[int, RecordedSend]
) -> list[torch.device]:
    """The devices of the tensors of `messages`, apart from those whose numbers are in `absent`."""
    found: list[torch.device] = []
    for id in messages:
        send = sends[id]
        found += [_CPU] * len(send.node.next_functions) if send.devices is None else send.devices
    missing = set(absent)
    return [device for number, device in enumerate(found) if number not in missing]


def _check_counts(
    messages: Sequence[int],
    counts: Sequence[int],
    absent: Sequence[int],
    num_tensors: int,
    sends: Mapping[int, RecordedSend],
) -> None:
    """Raises `ProtocolViolation` unless each message gets as many gradients as it had tensors."""
    total = sum(counts) if counts else len(messages)
    if total - len(absent) != num_tensors or len(set(absent)) < len(absent) or (absent and max(absent) >= total):
        raise ProtocolViolation(
            f"{num_tensors} gradients arrived for {total} tensors of {len(messages)} messages, of which {len(absent)} "
            "have none"
        )
    for index, id in enumerate(messages):
        count, num_sent = counts[index] if counts else 1, len(sends[id].node.next_functions)
        if count != num_sent:
            raise ProtocolViolation(f"{count} gradients arrived for message {id:#x}, which had {num_sent} tensors")


def encode_error(
    error: BaseException, worker_id: int, worker_name: str, target: autograd_pb2.BackwardAborted, traceback: str = ""
) -> None:
    """Writes the error that ended a pass into an empty message: a `BackwardError` as it is, another one as raised here.

    `traceback` says where it was raised, if the error has no traceback of its own.
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
