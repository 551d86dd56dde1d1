"""The engine of a group: runs its operations one after the other, in the order of the calls, until the group fails.

Rules:

 1. An operation gets its sequence number when it is submitted; equal numbers on all ranks are the same operation.
 2. One operation runs at a time. A blocking call runs on the caller's own thread if the group is idle; other calls run
    on the group's worker thread, which starts with the first such call.
 3. `GroupState` decides what a failure or a departure means. The engine passes events to it under its lock, and
    carries out the actions without the lock. The watch tells the other ranks of a failure.
 4. Work is finished without the lock held: a thread that waits for it may submit the next operation at once. Callbacks
    of its future run elsewhere: see [Note: callbacks] in `callbacks`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from rpcdist.collectives._group.callbacks import Callbacks
from rpcdist.collectives._group.flight_records import FlightRecorder, Record
from rpcdist.collectives._group.operation_hooks import run_abort_hooks
from rpcdist.collectives._group.state import GroupActions, GroupFailure, GroupState, Reporter
from rpcdist.collectives._group.watch import StateKeeper
from rpcdist.collectives._operations.operation import DTYPES, Operation
from rpcdist.collectives._transports.transport_base import (
    Control,
    PartControl,
    Transport,
    TransportMismatch,
    TransportPeerLost,
    TransportTimeout,
    Waker,
)
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, CollectiveMismatch, GroupAborted, RankLost, listed
from rpcdist.own_shortage import own_shortage
from rpcdist.profile_ranges import is_profiling, record_function
from rpcdist.time_limits import GROUP_VERDICT_LIMIT_S, IDLE_RECHECK_S, THREAD_GRACE_S
from rpcdist.transport import fork

MAX_SHAPES: Final = 8
"""The largest number of shapes in an error."""


@dataclass(slots=True, eq=False, repr=False)
class Job(Control):
    """One operation: its number, deadline and Work, and the control of its transport."""

    _engine: Engine
    operation: Operation
    sequence: int
    deadline: Deadline
    finish: Callable[[], None] | None
    record: Record
    work: Work
    fingerprint: bytes = b""

    @property
    def title(self) -> str:
        return str(self.record)

    @property
    def wakeup_fd(self) -> int:
        return self._engine.wakeup_fd

    def error_of(self, failure: GroupFailure) -> CollectiveError:
        """Makes this operation's error. For a mismatch it adds this rank's shapes, as ranks compare only sizes."""
        tensors = self.operation.inputs or self.operation.outputs
        if failure.kind is CollectiveMismatch and tensors:
            shapes = listed((tuple(tensor.shape) for tensor in tensors), MAX_SHAPES)
            failure = replace(failure, reason=f"{failure.reason}; the shapes on this rank: {shapes}")
        return failure.error(self.title)

    def check(self) -> None:
        state = self._engine.state
        if state.failure is not None:
            raise state.failure.error(self.title)
        if state.departed:
            departure = state.departure_before(self.sequence)
            if departure is not None:
                raise self._engine.fail_everywhere(departure).error(self.title)


_DTYPE_NAMES: Final = {dtype: str(dtype or "").removeprefix("torch.") for dtype in (None, *DTYPES)}


def record_of(group: str, sequence: int, operation: Operation) -> Record:
    reads, writes = operation.inputs, operation.outputs
    inputs = [tensor.numel() for tensor in reads]
    outputs = inputs if writes is reads else [tensor.numel() for tensor in writes]
    dtype, op = operation.dtype, operation.reduce_op
    return Record(
        group, sequence, operation.kind.title, _DTYPE_NAMES[dtype], inputs, outputs, "" if op is None else op._name_
    )


logger = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    """The default for groups without messages."""


class Engine(StateKeeper):
    """Runs the operations of one group.

    Args:
        state: the group's state, which the engine owns from now on.
        outlives_ranks: see `GroupContext`.
        on_failure: called once with the group's failure, on any thread; must not block.
        on_departure: called with a rank that left, and a text that says so, on any thread; must not block.

    Attributes:
        wakeup_fd: readable when the running operation cannot be finished.
    """

    def __init__(
        self,
        transport: Transport,
        state: GroupState,
        *,
        timeout_s: float,
        recorder: FlightRecorder,
        reporter: Reporter,
        outlives_ranks: bool = False,
        on_failure: Callable[[GroupFailure], object] = _nothing,
        on_departure: Callable[[int, str], object] = _nothing,
    ) -> None:
        super().__init__(state)
        self._transport = transport
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._reporter = reporter
        self._outlives_ranks = outlives_ranks
        self._on_failure = on_failure
        self._on_departure = on_departure
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a job was added or has ended, or the group closes
        self._jobs: deque[Job] = deque()
        self._busy = False
        self._closing = False
        self._worker: threading.Thread | None = None
        self._dumped = False
        self.callbacks = Callbacks(state.group)
        self._waker = Waker()
        self.wakeup_fd = self._waker.fileno()

    # ------------------------------------------------------------ submitting

    def submit(
        self,
        operation: Operation,
        asynchronous: bool,
        timeout_s: float | None,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor] | None,
    ) -> Work:
        state = self.state
        with self._lock:
            here = not (asynchronous or self._busy or self._jobs)
            if not (here or self._has_worker()):
                while self._busy:
                    self._changed.wait(IDLE_RECHECK_S)
                here = True
            fork.check_not_forked()
            if state.refusal is not None:
                raise state.refusal.error(f"{operation.kind.title} #{state.sequence + 1} of group {state.group!r}")
            state.sequence = sequence = state.sequence + 1
            record = record_of(state.group, sequence, operation)
            self._recorder.note(record)  # looked up each time: metrics may have been enabled meanwhile
            deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
            work = Work(record, result, callbacks=self.callbacks)
            job = Job(self, operation, sequence, deadline, finish, record, work)
            if here:
                self._busy = True
            else:
                self._jobs.append(job)  # under the lock: the order of the numbers is the order of the queue
                self._changed.notify_all()
        if here:  # switching to the worker and back takes longer than a small operation
            try:
                self._run(job)
            finally:
                self._release()
        if not asynchronous:
            job.work.wait()
        return job.work

    def _has_worker(self) -> bool:
        """Whether a thread runs the operations that the caller does not; the system may be unable to start one."""
        if self._worker is None:
            worker = threading.Thread(target=self._work, name=f"rpcdist group {self.state.group}", daemon=True)
            try:
                worker.start()
            except RuntimeError as exc:
                own_shortage(exc)  # logs the shortage
                return False
            self._worker = worker
        return True

    def _release(self) -> None:
        with self._lock:
            self._busy = False
            if self._jobs or self._closing or self._worker is None:
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._busy or not self._jobs:
                    if self._closing and not self._jobs:
                        return
                    self._changed.wait(IDLE_RECHECK_S)  # bounded, so that a lost wakeup has an end
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._run(job)
            except BaseException as exc:
                job.work.fail(exc)
            finally:
                self._release()

    # ------------------------------------------------------------ running

    def _run(self, job: Job) -> None:
        if is_profiling():
            with record_function(f"{job.operation.kind.title} of group {self.state.group!r}"):
                self._carry_out(job)
        else:
            self._carry_out(job)

    def _carry_out(self, job: Job) -> None:
        state = self.state
        state.current = job
        job.record.mark_started()
        error: BaseException | None = None
        try:
            job.check()  # the group may have failed while the job waited in the queue
            job.fingerprint = job.operation.fingerprint(job.sequence)
            with torch._C._AutoDispatchBelowAutograd():  # a tensor may come to require gradients while this waits
                self._transport.run(job.operation, job)
                if job.finish is not None:
                    job.finish()
        except CollectiveError as exc:
            error = exc  # from `check`: the other ranks already know
        except (TransportMismatch, TransportPeerLost, TransportTimeout) as exc:
            error = self._judge(job, exc)
        except BaseException as exc:  # also Ctrl-C: the other ranks must not wait for this one
            error = exc
            self.fail_everywhere(state.raised(exc))
        state.current = None
        state.last = job.record
        state.last_ended = time.monotonic()
        job.record.end(error)
        if error is None:
            job.work.complete()
        else:
            job.work.fail(error)
            self._dump()

    def _judge(self, job: Job, exc: TransportMismatch | TransportPeerLost | TransportTimeout) -> CollectiveError:
        """Makes the operation's error from a transport's report, and tells the other ranks."""
        if isinstance(exc, TransportMismatch):
            failure = self.state.mismatch(exc.views)
        elif isinstance(exc, TransportPeerLost):
            # A socket reports only that the peer is gone. The watch knows whether it died, left, or gave up because of
            # another rank, but its message comes over another connection and may be late.
            if self._reporter.explains_losses():
                self._await_verdict(exc.rank)
            failure = self.state.lost_connection(exc.rank, exc.reason, job.sequence)
        else:
            if self._reporter.report_timeout(job.title, job.sequence):
                self._await_verdict(None)
            failure = self.state.timed_out(exc.waiting_for)
        return job.error_of(self.fail_everywhere(failure))

    def _await_verdict(self, rank: int | None) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self.state.explains(rank), GROUP_VERDICT_LIMIT_S)

    def run_part(self, operation: Operation) -> None:
        job = self.state.current
        assert isinstance(job, Job), "call run_part only in the `finish` of a running operation"
        self._transport.run(operation, PartControl(job, job.sequence, operation.fingerprint(job.sequence)))

    # ------------------------------------------------------------ events (any thread)

    def _handle(self, event: Callable[[], GroupActions]) -> None:
        with self._lock:
            actions = event()
            self._changed.notify_all()
        if actions.wakes:
            self._waker.wake()
        for rank, reason in actions.departed:
            self._on_departure(rank, reason)
        if actions.fails is not None:
            run_abort_hooks(self.abort_hooks, self.state.group)
            self._waker.wake()  # jobs that wait in the queue fail when their turn comes
            self._on_failure(actions.fails)
        if actions.reports is not None:
            self._reporter.report(actions.reports)

    def _dump(self) -> None:
        failure = self.state.failure
        if self._dumped or (self._outlives_ranks and failure is not None and failure.kind is RankLost):
            return
        self._dumped = True
        path = self._recorder.write_dump(self.state.world_ranks[self.state.rank])
        if path is not None:
            logger.error("group %r failed (%s); its last operations are in %s", self.state.group, failure, path)

    # ------------------------------------------------------------ life

    def close(self, timeout_s: float) -> bool:
        """Waits until no operation runs, then ends the worker; returns False after `timeout_s`. Idempotent."""
        deadline = Deadline.after(timeout_s)
        with self._lock:
            self._closing = True
            self.state.close()
            self._changed.notify_all()
            drained = self._changed.wait_for(lambda: not (self._busy or self._jobs), deadline.wait_s())
        if not drained:  # the other ranks hear that this one left, and fail their operations
            self.fail(GroupFailure(GroupAborted, "the group was destroyed while operations ran"))
        if self._worker is not None:
            self._worker.join(min(GROUP_VERDICT_LIMIT_S + THREAD_GRACE_S, deadline.remaining_s() + THREAD_GRACE_S))
        return drained

    def free(self) -> None:
        """Closes the descriptors; call it when no thread can poll them."""
        self._waker.close()
        self.wakeup_fd = -1  # the system may use the number again
