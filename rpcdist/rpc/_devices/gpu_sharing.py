"""The workers that can read this worker's GPU memory, and the messages to them about it.

When the first tensor of a GPU goes to a worker, the worker is asked to open a loan of that GPU. Until it has answered,
and if it cannot open the loan (it is on another host, in another container or a MIG instance, or does not see the GPU),
tensors of that GPU travel through host memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache, partial
from typing import Any, Final

import torch

from rpcdist._proto import rpc_pb2, value_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import NotInitialized, SerializationError, abridged, text_of
from rpcdist.ids import Identity
from rpcdist.rpc._devices.borrowed_gpu_memory import Borrowed, BorrowedGpuMemory
from rpcdist.rpc._devices.cuda_memory import GpuUnavailable, cuda_memory
from rpcdist.rpc._devices.lent_gpu_memory import LentGpuMemory
from rpcdist.rpc._devices.pinned_arrivals import (
    GpuReceiveBuffer,
    PinnedRing,
    copy_up,
    new_tensor,
    pinned_ring,
    value_for_gpus,
)
from rpcdist.rpc._peers.device_maps import DeviceMap
from rpcdist.rpc._peers.directory import MemberEvent
from rpcdist.rpc._peers.network import AnySession, calling_worker
from rpcdist.rpc._values.buffers import ReceiveBuffer, Received
from rpcdist.rpc._values.rebuild import contiguous_strides, over_storage
from rpcdist.rpc._values.tensors import DeviceRoute, MapDevice, moves_cpu
from rpcdist.rpc.future import Future
from rpcdist.time_limits import IDLE_LIMIT_S, SLOW_ANSWER_LIMIT_S
from rpcdist.transport.wire_messages import CompactPass, WireMessage

logger = logging.getLogger(__name__)

_BYTE: Final = torch.uint8


class ValueOnGpus:
    """Implements `GpuArrivals` for a value. Decode the value on one thread and call `done`, or `discard` it."""

    def __init__(self, value: value_pb2.Value, sender: Identity, borrowed: BorrowedGpuMemory, me: str) -> None:
        self._value = value
        self._sender = sender
        self._borrowed = borrowed
        self._me = me
        self._begun: dict[int, Borrowed] = {}  # loans, by their index
        self._is_over = not value.gpu_loans

    def device_of(self, message: value_pb2.Tensor, buffer: Received | None) -> torch.device:
        """See `GpuArrivals`."""
        place = _place(message.device)
        if place is not None:
            return place
        count = torch.cuda.device_count()
        if message.device == "cuda":
            if isinstance(buffer, value_pb2.Buffer):
                return torch.device("cuda", self._borrowed.device_of(self._loan_of(buffer)))
            return torch.device("cuda", torch.cuda.current_device()) if count else torch.device("cpu")
        if message.unmapped and not count:
            _say_once(self._me, self._sender.name)
            return torch.device("cpu")
        there = ", ".join(f"cuda:{number}" for number in range(count)) or "no GPU"
        raise SerializationError(
            f"a tensor for {message.device} arrived from worker {self._sender.name!r}, and worker {self._me!r} has "
            f"{there}. In the caller's device map, name a device that exists on this worker"
        )

    def copy_of(self, buffer: Received, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `GpuArrivals`."""
        if isinstance(buffer, GpuReceiveBuffer):
            stride, _ = contiguous_strides(list(shape), dtype.itemsize)
            return over_storage(buffer.on_gpu(device).untyped_storage(), 0, dtype, list(shape), stride)
        if not isinstance(buffer, value_pb2.Buffer):
            source = torch.frombuffer(bytearray(buffer), dtype=_BYTE) if isinstance(buffer, bytes) else buffer.memory
            if device.type != "cuda":
                return source.view(dtype).reshape(shape).to(device)
            target = new_tensor(shape, dtype, device, source.nbytes)
            copy_up(source, target.view(-1).view(_BYTE))
            return target
        if device.type != "cuda":
            raise SerializationError(f"a tensor for {device} arrived that lies in memory of a GPU")
        loan = self._loan_of(buffer)
        begun = self._begun.get(buffer.gpu_loan)
        if begun is None:
            begun = self._begun[buffer.gpu_loan] = self._borrowed.begin(loan, self._sender)
        target = new_tensor(shape, dtype, device, buffer.size)
        self._borrowed.copy(begun, buffer.offset, target, buffer.size)
        return target

    def _loan_of(self, buffer: value_pb2.Buffer) -> value_pb2.GpuLoan:
        if buffer.gpu_loan > len(self._value.gpu_loans):
            raise SerializationError(f"a tensor refers to loan {buffer.gpu_loan} of {len(self._value.gpu_loans)}")
        return self._value.gpu_loans[buffer.gpu_loan - 1]

    def done(self) -> None:
        """Ends the loans: all needed parts were copied, as far as that was possible."""
        for begun in self._begun.values():
            self._borrowed.finish(begun, self._sender)
        self.discard()

    def discard(self) -> None:
        """Ends the loans that were not copied; idempotent."""
        if not self._is_over:
            self._is_over = True
            loans = self._value.gpu_loans
            if len(self._begun) < len(loans):
                left = [loan for number, loan in enumerate(loans, 1) if number not in self._begun]
                self._borrowed.discard(left, self._sender)


@lru_cache(maxsize=256)
def _place(name: str) -> torch.device | None:
    """The device of a name; None if it has no index, or this process does not have it."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    return device if device.index is not None and device.index < torch.cuda.device_count() else None


@cache
def _say_once(me: str, sender: str) -> None:
    logger.warning(
        "worker %r has no GPU: tensors of GPUs that worker %r sends without a device map are on its CPU", me, sender
    )


PROBE = "rpcdist.rpc._devices.gpu_sharing:probe"
_ASKED: Final = "it has not answered yet"

MAX_REASON_CHARS: Final = 500


@cache
def _lent_by_process() -> LentGpuMemory:
    return LentGpuMemory(cuda_memory())


@dataclass(eq=False, repr=False)
class GpuSharing:
    """Lends and borrows GPU memory for an agent. Thread-safe.

    Args:
        identity_of: the process that has the id of a worker now.
        find_map: see `DeviceMaps.find`.
        ask: calls a function that every worker serves, by worker, name and arguments.
        send: sends a message to a worker, if it lives.
        submit: runs a function on the pool.
        announced_gradients: see `AutogradHooks`.
        takes_loans: whether this process reads GPU memory of peers.
        lends: whether memory may be lent at all.

    Attributes:
        ring: the pinned memory into which tensors for GPUs arrive; None until it is made.
    """

    _me: Identity
    identity_of: Callable[[int], Identity]
    _find_map: Callable[[int, AnySession | None, DeviceMap | None], MapDevice | None]
    _ask: Callable[[int, str, tuple[Any, ...], float], Future[Any]]
    _send: Callable[[int, rpc_pb2.Message], None]
    _submit: Callable[..., None]
    _announced_gradients: Callable[[Identity, CompactPass], value_pb2.Value | None]
    _: KW_ONLY
    takes_loans: bool
    lends: bool

    def __post_init__(self) -> None:
        self.ring: PinnedRing | None = None
        self._is_ring_begun = False
        self._cleaned = 0.0
        self._fault = ""  # of a GPU, as logged
        self._lent: LentGpuMemory | None = None  # made for the first GPU tensor that is sent
        # By worker and GPU: why the worker cannot read memory of the GPU; empty if it can.
        self._readers: dict[tuple[Identity, int], str] = {}
        self._lock = threading.Lock()
        self.borrowed = BorrowedGpuMemory(cuda_memory, _lent_by_process)
        self.callables: dict[str, Callable[..., Any]] = {PROBE: self._probe}

    def route(
        self, to: int, session: AnySession | None = None, of_call: DeviceMap | None = None, *, back: bool = False
    ) -> DeviceRoute:
        """How GPU tensors in one value reach a worker.

        Args:
            session: for the result of a call, the session of the call.
            of_call: see `DeviceMaps.find`.
            back: see `DeviceRoute`.
        """
        lend = partial(self._lend, to, session)
        return DeviceRoute(None if back else self._find_map(to, session, of_call), lend, back=back)

    def moves_cpu(self, to: int, session: AnySession | None = None, of_call: DeviceMap | None = None) -> bool:
        """Whether CPU tensors in a value arrive on another device; arguments as for `route`."""
        map_device = self._find_map(to, session, of_call)
        return map_device is not None and moves_cpu(map_device)

    def arriving(self, value: value_pb2.Value, sender: Identity) -> ValueOnGpus:
        return ValueOnGpus(value, sender, self.borrowed, self._me.name)

    def stage(self, session: AnySession, message: WireMessage) -> Mapping[int, GpuReceiveBuffer]:
        """Memory for the large buffers of an announced message that go to GPUs, by index; on the thread that reads."""
        value = None
        if self.takes_loans:
            value = value_for_gpus(message, partial(self._announced_gradients, session.peer))
        if value is None:
            return {}
        if self.ring is None:
            if not self._is_ring_begun:
                self._is_ring_begun = True
                self._submit_if_open(self._make_ring)
            return {}
        return self.ring.buffers(value, message.large, self._submit_if_open)

    def _make_ring(self) -> None:
        try:
            self.ring = pinned_ring()
        except RuntimeError as exc:
            logger.info("tensors of GPUs are copied up after they have arrived, for lack of pinned memory: %s", exc)

    def _submit_if_open(self, function: Callable[[], None]) -> None:
        with suppress(NotInitialized):  # RPC ends here: a thread that still decodes the value does what is left
            self._submit(function)

    def _lend(
        self, to: int, session: AnySession | None, device: int, spans: Sequence[tuple[int, int]]
    ) -> tuple[value_pb2.GpuLoan, list[int]] | None:
        """Lends memory to a worker; None if it cannot read it, has not answered yet, or there is too little."""
        if session is not None and session.closed_reason is not None:
            return None
        reader = self.identity_of(to) if session is None else session.peer, device
        reason = self._readers.get(reader)
        if reason is None:
            reason = self._begin_probe(*reader)
        lent = self._lent
        if reason or lent is None:
            return None
        try:
            return lent.lend(*reader, spans)
        except GpuUnavailable as exc:
            self._note(*reader, text_of(exc))
            return None

    def send_report(self, session: AnySession) -> None:
        """Sends the pending report to the peer of a session, together with the next message."""
        if (message := self.borrowed.release(session.peer)) is not None:
            session.hold_back(lambda: session.send(message, ()))

    def doubt(self, loan: int) -> None:
        """Records that the message with the loan of this number may not arrive."""
        if self._lent is not None:
            self._lent.doubt([loan])

    def _begin_probe(self, to: Identity, device: int) -> str:
        with self._lock:
            if (to, device) in self._readers:
                return self._readers[to, device]
            self._readers[to, device] = _ASKED
        try:
            if not self.lends:
                raise GpuUnavailable("the options name channels without cuda_ipc")
            if self._lent is None:
                self._lent = _lent_by_process()
            made = self._lent.lend(to, device, ())
            if made is None:
                raise GpuUnavailable("there is no memory left for loans")
        except (GpuUnavailable, RuntimeError) as exc:
            return self._note(to, device, text_of(exc))
        if to == self._me:
            self._lent.release((), [made[0].number], to)
            return self._note(to, device, "")
        try:
            answer = self._ask(to.id, PROBE, (made[0].SerializeToString(),), SLOW_ANSWER_LIMIT_S)
        except Exception as exc:  # it is lost, and the call in progress reports that
            self._lent.doubt([made[0].number])
            return self._note(to, device, text_of(exc))
        answer.is_quiet = True
        answer._when_done(partial(self._answered, to, device))
        return self._readers.get((to, device), _ASKED)

    def _answered(self, to: Identity, device: int, answer: Future[Any]) -> None:
        error = answer.exception()
        reason = answer.value() if error is None else str(error)
        if (to, device) in self._readers:  # otherwise it has gone
            self._note(to, device, reason[:MAX_REASON_CHARS] if isinstance(reason, str) else abridged(reason))

    def _note(self, to: Identity, device: int, reason: str) -> str:
        self._readers[to, device] = reason
        if reason:
            logger.info("tensors of cuda:%d travel through host memory to worker %r: %s", device, to.name, reason)
        return reason

    def _probe(self, loan: bytes) -> str:
        """Serves `PROBE`: returns why a loan cannot be read here, or an empty text."""
        lender = calling_worker.get()
        if lender is None:
            return "no worker has called"
        if not self.takes_loans:
            return f"{self._me.name!r} accepts only tensors from host memory (allow_pickle=False)"
        return self.borrowed.probe(value_pb2.GpuLoan.FromString(loan), lender)

    # ------------------------------------------------------------ on the I/O loop, or the thread that reads

    def on_release(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        """Records which loans a worker has copied."""
        if self._lent is not None:
            release = message.gpu_release
            self._lent.release(release.copied, release.unwanted, session.peer, release.closed)

    def on_broken(self, session: AnySession, reason: str) -> None:
        if self._lent is not None:
            self._lent.on_broken(session.peer)

    def on_gone(self, identity: Identity, error: Exception | None = None) -> None:
        for reader in [reader for reader in list(self._readers) if reader[0] == identity]:
            del self._readers[reader]
        if self._lent is not None or self.borrowed.is_used:
            self._submit(self._forget, identity)

    def on_member(self, event: MemberEvent) -> None:
        """Handles the end of a worker that has left: it reports nothing more, and `on_gone` was not called."""
        if event.kind == "left":
            self.on_gone(event.member.identity)

    def _forget(self, identity: Identity) -> None:
        self._although_it_fails(self.borrowed.on_gone, identity)
        if self._lent is not None:
            self._although_it_fails(self._lent.on_gone, identity)

    def _although_it_fails(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function that looks after lent or borrowed memory, whose GPU may have failed for this process."""
        try:
            function(*arguments)
        except (GpuUnavailable, RuntimeError) as exc:
            if (text := text_of(exc)) != self._fault:  # a GPU that has failed once fails at each call
                self._fault = text
                logger.error("a GPU has failed, so memory that workers lend each other is not freed: %s", text)

    def tick(self) -> None:
        for lender in list(self.borrowed.news):
            if (message := self.borrowed.release(lender)) is not None:
                self._send(lender.id, message)
        now = time.monotonic()
        if now - self._cleaned > IDLE_LIMIT_S / 2 and (self._lent is not None or self.borrowed.is_used):
            self._cleaned = now
            self._submit(self._clean)

    def _clean(self) -> None:
        self._although_it_fails(self.borrowed.clean)
        if self._lent is not None:
            self._although_it_fails(self._lent.clean)

    def close(self, timeout_s: float) -> None:
        """Waits for copies in progress, at most for `timeout_s`; closes borrowed memory, and lends no more."""
        deadline = Deadline.after(timeout_s)
        self._although_it_fails(self.borrowed.close, timeout_s)
        if self._lent is not None:
            self._although_it_fails(self._lent.settle, deadline)
            for reader in {identity for identity, _ in list(self._readers)}:
                self._lent.on_broken(reader)
