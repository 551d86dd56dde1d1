"""The `nccl` backend: groups of CUDA tensors over NCCL, through CuPy's communicator.

Operations run on torch's current stream; asynchronous ones run on a stream of the group, which first waits for the
current one. `docs/nccl.md` describes the effects on programs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import torch

from rpcdist._launch.placement import launcher_variable
from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.bootstrap import exchange_values
from rpcdist.collectives._group.flight_records import Record, record_of_message
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.state import GroupFailure, GroupState, Reporter
from rpcdist.collectives._nccl.communicator_calls import Communicator, CudaRuntime, NcclCalls
from rpcdist.collectives._nccl.watchdog import NcclWatchdog, NcclWork, call_bounded
from rpcdist.collectives._operations.operation import Kind, Operation, describe_fingerprint
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, CollectiveTimeout, ConfigError, on_error

__all__ = ["NcclBackend", "NcclOptions"]

_NO_COLOR: Final = -1


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """`pg_options` of the `nccl` backend.

    Attributes:
        blocking_wait: whether `Work.wait()` blocks the host until the device is done.
        check: whether the ranks compare every collective before they run it, through the store, which is slow. Without
            it, a mismatch ends in a timeout or wrong numbers, as NCCL does not notice it.
    """

    blocking_wait: bool = False
    check: bool = False


_Message = tuple[
    Callable[[torch.Tensor, int, torch.cuda.Stream], None], torch.Tensor, int, NcclWork, Callable[[], None] | None
]
"""A send or receive: what starts it, its tensor, the peer, its work, and what to call once it is enqueued."""


class NcclBackend(GroupBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    "Done" means enqueued: a blocking call returns when the operation is on the current stream. A barrier, and every
    operation with `blocking_wait`, waits for the device. Messages have no tags and need a named source: the sends and
    receives of two ranks match in order. Use `batch_isend_irecv` if both ranks send first.

    Args:
        context: describes the group; without a device it gets the default device of this rank.
        runtime: the device and its NCCL; for tests.
        reporter: tells the other ranks of a failure; by default a watch with its own connections.
        communicator: an existing communicator, made by `split`.

    Raises (constructor):
        ConfigError: CuPy, NCCL or a GPU is missing; says what to install.
        RendezvousError: some ranks did not join; names them.
        CollectiveTimeout: all ranks joined, but NCCL did not connect them in time.
    """

    name: ClassVar[str] = "nccl"

    def __init__(
        self,
        context: GroupContext,
        *,
        runtime: CudaRuntime | None = None,
        reporter: Reporter | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.context = context
        options = context.options if isinstance(context.options, NcclOptions) else NcclOptions()
        self._blocking_wait = options.blocking_wait
        self._check = options.check
        self._runtime: CudaRuntime = CudaRuntime(default_device(context)) if runtime is None else runtime
        deadline = Deadline.after(context.timeout_s)
        self._watch = GroupWatch(context, deadline) if reporter is None and context.size > 1 else None
        with nullcontext() if self._watch is None else on_error(self._watch.give_up):
            self._communicator = communicator or self._connect(deadline)
        self._calls = NcclCalls(self._runtime, self._communicator, context.rank, context.size)
        self._side_stream = self._runtime.new_stream()
        self._order = threading.Lock()  # held during enqueueing: the order must be the same on all ranks
        self._batch = threading.local()
        self._message_numbers = itertools.count(1)
        self._closed = False
        if reporter is None:
            reporter = Reporter() if self._watch is None else self._watch.reporter
        state = GroupState(context.name, context.rank, context.ranks) if self._watch is None else self._watch.state
        recorder = context.process.recorder
        self._watchdog = NcclWatchdog(state, self._runtime, self._communicator, recorder, reporter)
        self.abort_hooks = self._watchdog.abort_hooks
        if self._watch is None:
            self._watchdog.opened()
        else:
            self._watch.hand_over(self._watchdog)
        context.process.close_at_exit(self)

    def __repr__(self) -> str:
        return f"<NcclBackend rank {self.context.rank} of {self.context.size} on {self._runtime.device}>"

    # ------------------------------------------------------------ making

    def _connect(self, deadline: Deadline) -> Communicator:
        """Connects, after it has met the other ranks in the store, since NCCL would wait for a missing rank forever."""
        proposed = self._runtime.unique_id().hex() if self.context.rank == 0 else ""
        unique_id = bytes.fromhex(exchange_values(self.context, "nccl", proposed, deadline)[0])
        connect = partial(self._runtime.connect, self.context.size, unique_id, self.context.rank)
        return call_bounded(connect, deadline, f"the NCCL communicator of group {self.context.name!r}")

    def split(self, context: GroupContext | None, *, reporter: Reporter | None = None) -> NcclBackend | None:
        """Makes a smaller group that shares the connections and memory of this one.

        Every rank of this group calls it, at the same place in its order of operations. Groups made by one call have no
        common ranks.

        Args:
            context: describes the new group of this rank, by world ranks; None for a rank in no new group.
            reporter: as in the constructor.

        Returns:
            The new group's backend, or None.

        Raises:
            CollectiveError: the split failed, or this group had failed before.
        """
        color = _NO_COLOR if context is None else min(self.context.ranks.index(rank) for rank in context.ranks)
        key = 0 if context is None else context.rank
        what = f"the split of group {self.context.name!r}"
        with self._order:
            failure = self._watchdog.state.failure
            if failure is not None:
                raise failure.error(what)
            try:
                deadline = Deadline.after(self.context.timeout_s)
                communicator = call_bounded(lambda: self._communicator.commSplit(color, key), deadline, what)
            except self._runtime.errors as exc:
                raise self._broken(exc).error(what) from exc
        if context is None or communicator is None:
            return None
        return NcclBackend(context, runtime=self._runtime, reporter=reporter, communicator=communicator)

    # ------------------------------------------------------------ collectives

    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        self._check_tensors(operation.inputs + operation.outputs)
        keep = [*operation.inputs, *operation.outputs]
        with self._order:
            work = self._register(operation, timeout_s, keep, result)
            if self._check:
                self._compare(operation, work)
            stream = self._stream(asynchronous)
            try:
                with self._runtime.on(stream):
                    kept = self._calls.enqueue(operation, stream)
                    if finish is not None:
                        finish()
                work.enqueued(stream, kept)
            except self._runtime.errors as exc:
                raise self._broken(exc).error(work.title) from exc
            except ValueError as exc:  # an invalid reduction, on all ranks
                error = ConfigError(f"{work.title}: {exc}")
                self._watchdog.forget(work, error)
                raise error from exc
        if not asynchronous:
            self._settle(work, operation.kind is Kind.BARRIER)
        return work

    def _register(
        self, operation: Operation, timeout_s: float | None, keep: list[torch.Tensor], result: list[torch.Tensor] | None
    ) -> NcclWork:
        def make(number: int) -> NcclWork:
            dtype = str(operation.dtype or "").removeprefix("torch.")
            reads, writes = ([tensor.numel() for tensor in each] for each in (operation.inputs, operation.outputs))
            detail = operation.reduce_op.name if operation.reduce_op is not None else ""
            record = Record(self.context.name, number, operation.kind.title, dtype, reads, writes, detail)
            record.mark_started()
            title = f"{describe_fingerprint(operation.fingerprint(number))} of group {self.context.name!r}"
            blocking = self._blocking_wait or operation.kind is Kind.BARRIER
            deadline = self._deadline(timeout_s)
            return NcclWork(title, number, self._runtime, deadline, keep, record, blocking=blocking, result=result)

        return self._watchdog.register(make, collective=True)

    def _compare(self, operation: Operation, work: NcclWork) -> None:
        """Runs the slow check of `NcclOptions.check`: publishes this rank's operation and reads those of all ranks."""
        number = self._watchdog.state.sequence
        fingerprint = operation.fingerprint(number)
        try:
            texts = exchange_values(self.context, f"check/{number}", fingerprint.hex(), work.deadline)
        except RuntimeError as exc:
            failure = self._watchdog.fail_everywhere(GroupFailure(CollectiveTimeout, str(exc)))
            raise failure.error(work.title) from exc
        if number > 1:  # all ranks have read the previous key, since they have come to this operation
            self.context.store.delete_key(f"check/{number - 1}/{self.context.rank}")
        if len(set(texts)) > 1:
            views = [describe_fingerprint(bytes.fromhex(text)) for text in texts]
            failure = self._watchdog.fail_everywhere(self._watchdog.state.mismatch(dict(enumerate(views))))
            raise failure.error(work.title)

    # ------------------------------------------------------------ messages

    def send(self, tensor: torch.Tensor, peer: int, tag: int, **options: Any) -> Work:
        return self._message("send", self._calls.send, tensor, peer, tag, **options)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, **options: Any) -> Work:
        if peer is None:
            raise ConfigError('the backend "nccl" cannot receive from any source: name the source (src=)')
        return self._message("recv", self._calls.recv, tensor, peer, tag, **options)

    def _message(
        self,
        operation: str,
        call: Callable[[torch.Tensor, int, torch.cuda.Stream], None],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        self._check_tensors((tensor,))
        context, number = self.context, next(self._message_numbers)
        record = record_of_message(context.name, number, operation, tensor, context.ranks[peer], tag)
        deadline, blocking = self._deadline(timeout_s), self._blocking_wait
        work = NcclWork(str(record), 0, self._runtime, deadline, [tensor], record, blocking=blocking, result=[tensor])
        self._watchdog.register(lambda _: work, collective=False)
        message: _Message = (call, tensor, peer, work, finish)
        batch: list[_Message] | None = getattr(self._batch, "messages", None)
        if batch is not None:
            batch.append(message)
            return work
        self._start([message], asynchronous)
        if not asynchronous:
            self._settle(work, False)
        return work

    def start_batch(self) -> None:
        self._batch.messages = []

    def end_batch(self) -> None:
        messages: list[_Message] = self._batch.messages
        self._batch.messages = None
        if messages:
            self._start(messages, asynchronous=True)

    def _start(self, messages: list[_Message], asynchronous: bool) -> None:
        with self._order:
            stream = self._stream(asynchronous)
            try:
                with self._runtime.on(stream), ExitStack() as group:
                    if len(messages) > 1:
                        group.enter_context(self._runtime.grouped())
                    for call, tensor, peer, _, _ in messages:
                        call(tensor, peer, stream)
                    group.close()
                    for *_, finish in messages:
                        if finish is not None:
                            finish()
                for _, _, peer, work, _ in messages:
                    work.enqueued(stream, [], peer)
            except self._runtime.errors as exc:
                raise self._broken(exc).error(messages[0][3].title) from exc

    # ------------------------------------------------------------ common parts

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self.context.timeout_s if timeout_s is None else timeout_s)

    def _stream(self, asynchronous: bool) -> torch.cuda.Stream:
        """Returns the current stream, or the group's own after it was made to wait for the current one."""
        current = self._runtime.current_stream()
        if not asynchronous:
            return current
        self._side_stream.wait_event(current.record_event())
        return self._side_stream

    def _settle(self, work: NcclWork, on_host: bool) -> None:
        if on_host or self._blocking_wait:
            work.wait()
        elif (error := work.exception()) is not None:
            raise error

    def _check_tensors(self, tensors: tuple[torch.Tensor, ...]) -> None:
        device = self._runtime.device
        for tensor in tensors:
            if tensor.device != device:
                raise ConfigError(
                    f"group {self.context.name!r} uses {device}, but got a tensor on {tensor.device}; move it, or "
                    "make the group with another device_id"
                )
        if self._runtime.is_capturing():
            raise ConfigError("operations of a group cannot be captured into a CUDA graph; call them outside of it")

    def _broken(self, exc: Exception) -> GroupFailure:
        me = self.context.ranks[self.context.rank]
        reason = f"NCCL failed on rank {me}: {exc} (NCCL_DEBUG=WARN in the environment shows more details)"
        return self._watchdog.fail_everywhere(GroupFailure(CollectiveError, reason))

    # ------------------------------------------------------------ ending

    def lost_ranks(self) -> dict[int, str]:
        return self._watchdog.state.lost_ranks()

    def abort(self, reason: str) -> None:
        self._watchdog.fail_everywhere(self._watchdog.state.aborted(reason))

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._watchdog.close(Deadline.after(timeout_s))
        if self._watch is not None:
            self._watch.leave(self._watchdog.state.sequence)
            self._watch.release()


def default_device(context: GroupContext) -> torch.device:
    """Returns the device of this rank: the given one, or GPU number `LOCAL_RANK`, or a GPU chosen by rank."""
    if context.device is not None and context.device.index is not None:
        return context.device
    count = torch.cuda.device_count()
    local_rank = launcher_variable("LOCAL_RANK")
    number = int(local_rank) if local_rank.isdigit() else context.ranks[context.rank]
    return torch.device("cuda", number % count if count else 0)
