"""The engine of a group: runs its operations one after the other, in the order of the calls, until the group fails.

Rules:

 1. An operation gets its sequence number when it is submitted; equal numbers on all ranks are the same operation.
 2. One operation runs at a time. A blocking call runs on the caller's own thread when the group is idle; everything
    else runs on the group's worker thread, which starts with the first such call.
 3. The first failure is final: the operation that found it, those that wait and those that come later all raise it.
    Ranks that did not find it themselves learn of it from the watch.
 4. Work is finished without the lock held: whoever waits for it may submit the next operation at once. A callback of it
    may even wait for another one: the worker runs that, then, in the middle of the callback.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from rpcdist.collectives import flight_recorder
from rpcdist.collectives._group.failure import FailureKind, GroupFailure, list_ranks
from rpcdist.collectives._operations.operation import DTYPES, Kind, Operation
from rpcdist.collectives._transports.base import (
    Control,
    Transport,
    TransportMismatch,
    TransportPeerLost,
    TransportTimeout,
)
from rpcdist.collectives.flight_recorder import Record
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError
from rpcdist.time_limits import GROUP_VERDICT_LIMIT_S, IDLE_RECHECK_S, THREAD_GRACE_S
from rpcdist.transport import fork

__all__ = ["Engine", "Reporter"]

logger = logging.getLogger(__name__)


class Reporter:
    """Where an engine reports what it found, for the other ranks. The base class has nobody to tell."""

    def report(self, failure: GroupFailure) -> None:
        """The group failed here. Any thread; does not wait."""

    def report_timeout(self, title: str, sequence: int, waiting_for: frozenset[int]) -> bool:
        """An operation ran out of time here; whether a verdict on who is missing will come."""
        return False

    def report_lost(self, rank: int, reason: str) -> bool:
        """A connection with a rank broke; whether a verdict on its state will come."""
        return False


class _Title:
    """The name of an operation, put together when somebody wants to read it."""

    __slots__ = ("_group", "_kind", "_sequence")

    def __init__(self, kind: Kind, sequence: int, group: str) -> None:
        self._kind = kind
        self._sequence = sequence
        self._group = group

    def __str__(self) -> str:
        return f"{self._kind.title} #{self._sequence} of group {self._group!r}"


class _Job(Control):
    """One operation, and what its transport is told."""

    __slots__ = ("_engine", "deadline", "fingerprint", "finish", "name", "operation", "record", "sequence", "work")

    def __init__(
        self,
        engine: Engine,
        operation: Operation,
        sequence: int,
        deadline: Deadline,
        finish: Callable[[], None] | None,
        record: Record,
        result: list[torch.Tensor] | None,
    ) -> None:
        self._engine = engine
        self.operation = operation
        self.sequence = sequence
        self.deadline = deadline
        self.finish = finish
        self.record = record
        self.name = _Title(operation.kind, sequence, engine.group)
        self.work = Work(self.name, result, engine.help)

    @property
    def title(self) -> str:
        return str(self.name)

    @property
    def wakeup_fd(self) -> int:
        return self._engine.wakeup_fd

    def check(self) -> None:
        engine = self._engine
        if engine.failure is not None:
            raise engine.failure.error(self.title)
        if engine.departed:
            engine.check_departed(self.sequence, self.title)


class Engine:
    """One group's operations.

    Attributes:
        failure: why the group ended; None while it works.
        departed: rank to the last sequence number that it took part in, for ranks that left the group.
        wakeup_fd: readable once the running operation cannot be finished.
        on_failure: told of the group's failure, once; any thread; must not block.
        on_departure: told of a rank that left, and of that in words; likewise.
    """

    def __init__(self, transport: Transport, group: str, world_ranks: tuple[int, ...], timeout_s: float) -> None:
        self.group = group
        self.failure: GroupFailure | None = None
        self.departed: dict[int, int] = {}
        self.reporter = Reporter()
        self.on_failure: Callable[[CollectiveError], object] | None = None
        self.on_departure: Callable[[int, str], object] | None = None
        self._transport = transport
        self._world_ranks = world_ranks
        self._timeout_s = timeout_s
        self._sequence = 0
        self._current: _Job | None = None
        self._last: _Title | None = None
        self._last_time = time.monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # a job came, the running one ended, or the group closes
        self._jobs: deque[_Job] = deque()
        self._busy = False
        self._closing = False
        self._worker: threading.Thread | None = None
        self._dumped = False
        self.wakeup_fd, self._wakeup_write_fd = os.pipe()
        os.set_blocking(self._wakeup_write_fd, False)

    def __repr__(self) -> str:
        state = "failed" if self.failure is not None else "busy" if self._busy else "idle"
        return f"<Engine of group {self.group!r}: {state}, #{self._sequence}, {len(self._jobs)} queued>"

    # ------------------------------------------------------------ submitting

    def submit(
        self,
        operation: Operation,
        asynchronous: bool,
        timeout_s: float | None,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor] | None,
    ) -> Work:
        """See `GroupBackend.submit`."""
        with self._lock:
            job = self._make_job(operation, timeout_s, finish, result)
            mine = not (asynchronous or self._busy or self._jobs)
            if mine:
                self._busy = True
            else:
                self._enqueue(job)
        if mine:
            try:
                self._run(job)
            finally:
                self._release()
        if not asynchronous:
            job.work.wait()
        return job.work

    def _make_job(
        self,
        operation: Operation,
        timeout_s: float | None,
        finish: Callable[[], None] | None,
        result: list[torch.Tensor] | None,
    ) -> _Job:
        fork.check_not_forked()
        sequence = self._sequence + 1
        failure = self.failure
        if failure is None and self._closing:
            failure = GroupFailure(FailureKind.ABORTED, "the group was destroyed on this rank")
        if failure is not None:
            raise failure.error(str(_Title(operation.kind, sequence, self.group)))
        self._sequence = sequence
        record = _record_of(self.group, sequence, operation)
        flight_recorder.note(record)
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        return _Job(self, operation, sequence, deadline, finish, record, result)

    def _enqueue(self, job: _Job) -> None:
        self._jobs.append(job)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"rpcdist group {self.group}", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def help(self, work: Work) -> None:
        """If this is the worker, in a callback of an operation: runs what comes before `work`, and that as well."""
        if threading.current_thread() is not self._worker:
            return
        while not work.is_completed():
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            self._run_safely(job)

    def _run_safely(self, job: _Job) -> None:
        try:
            self._run(job)
        except BaseException as exc:
            job.work.fail(exc)

    def _release(self) -> None:
        with self._lock:
            self._busy = False
            if self._jobs or self._closing:
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._busy or not self._jobs:
                    if self._closing and not self._jobs:
                        return
                    self._changed.wait(IDLE_RECHECK_S)
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._run_safely(job)
            finally:
                self._release()

    # ------------------------------------------------------------ running

    def _run(self, job: _Job) -> None:
        """Runs one operation to its end; what went wrong is in `job.work` afterwards."""
        self._current = job
        job.record.start()
        error: BaseException | None = None
        try:
            job.check()
            job.fingerprint = job.operation.fingerprint(job.sequence)
            self._transport.run(job.operation, job)
            if job.finish is not None:
                job.finish()
        except CollectiveError as exc:
            error = exc
        except (TransportMismatch, TransportPeerLost, TransportTimeout) as exc:
            error = self._judge(job, exc)
        except BaseException as exc:  # Ctrl-C as well: the other ranks must not wait for this one
            error = exc
            self._fail_everywhere(GroupFailure(FailureKind.ERROR, f"{self._me()} raised {type(exc).__name__}: {exc}"))
        self._current = None
        self._last = job.name
        self._last_time = time.monotonic()
        job.record.end(error)
        if error is None:
            job.work.complete()
        else:
            job.work.fail(error)
            self._dump()

    def _judge(self, job: _Job, exc: TransportMismatch | TransportPeerLost | TransportTimeout) -> CollectiveError:
        """What a transport's report means; tells the other ranks."""
        if isinstance(exc, TransportMismatch):
            views = "; ".join(f"rank {self._name(rank)} called {view}" for rank, view in sorted(exc.views.items()))
            failure = GroupFailure(FailureKind.MISMATCH, f"the ranks called different operations: {views}")
        elif isinstance(exc, TransportPeerLost):
            failure = self._judge_lost(job, exc)
        else:
            failure = self._judge_timeout(job, exc)
        failure = self._fail_everywhere(failure)
        return failure.error(job.title)

    def _judge_lost(self, job: _Job, exc: TransportPeerLost) -> GroupFailure:
        if self.reporter.report_lost(exc.rank, exc.reason):
            self._await_verdict(exc.rank)
        # The first that left is the reason; others may have given up, and closed their connections, because of it.
        left = next((rank for rank, last in self.departed.items() if job.sequence > last), exc.rank)
        if left in self.departed:
            return self._departure(left)
        reason = f"the connection of {self._me()} with rank {self._name(exc.rank)} broke: {exc.reason}"
        return GroupFailure(FailureKind.LOST, reason, (exc.rank,))

    def _judge_timeout(self, job: _Job, exc: TransportTimeout) -> GroupFailure:
        if self.reporter.report_timeout(job.title, job.sequence, exc.waiting_for):
            self._await_verdict(None)
        names = list_ranks([self._world_ranks[rank] for rank in exc.waiting_for])
        reason = f"it timed out on {self._me()}, which waits for {names}" if exc.waiting_for else "it timed out"
        return GroupFailure(FailureKind.TIMEOUT, reason, tuple(sorted(exc.waiting_for)))

    def _await_verdict(self, rank: int | None) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self.failure is not None or rank in self.departed, GROUP_VERDICT_LIMIT_S)

    def _fail_everywhere(self, failure: GroupFailure) -> GroupFailure:
        """Makes it the group's failure, unless there is one, and returns the one that counts."""
        if self.fail(failure):
            self.reporter.report(failure)
        assert self.failure is not None
        return self.failure

    # ------------------------------------------------------------ what the watch tells (any thread)

    def fail(self, failure: GroupFailure) -> bool:
        """Ends the group; returns False when it had failed before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
            self._changed.notify_all()
        self._wake_poller()
        if self.on_failure is not None:
            self.on_failure(failure.error(f"send or recv in group {self.group!r}"))
        return True

    def rank_left(self, rank: int, last_sequence: int) -> None:
        """A rank left the group in order, after taking part in all operations up to `last_sequence`."""
        with self._lock:
            self.departed = {**self.departed, rank: last_sequence}
            self._changed.notify_all()
            current = self._current
        if current is not None and current.sequence > last_sequence:
            self._wake_poller()
        if self.on_departure is not None:
            self.on_departure(rank, self._departure(rank).reason)

    def check_departed(self, sequence: int, title: str) -> None:
        """Raises when somebody left before the operation with this number."""
        for rank, last in self.departed.items():
            if sequence > last:
                raise self._fail_everywhere(self._departure(rank)).error(title)

    def _departure(self, rank: int) -> GroupFailure:
        reason = f"rank {self._name(rank)} left the group (destroy_process_group) after #{self.departed[rank]}"
        return GroupFailure(FailureKind.LOST, reason, (rank,))

    def where(self) -> tuple[int, str]:
        """Where this rank is: the newest operation that it has called, and the state of things in words."""
        with self._lock:
            sequence, current, last, last_time = self._sequence, self._current, self._last, self._last_time
        if current is not None:
            return sequence, f"is in {current.title}"
        if last is None:
            return sequence, "has called nothing yet"
        return sequence, f"finished {last} {time.monotonic() - last_time:.1f} s ago and has called nothing since"

    def _wake_poller(self) -> None:
        try:
            os.write(self._wakeup_write_fd, b"x")
        except (BlockingIOError, OSError):  # full: readable already; closed: nobody polls any more
            pass

    def _me(self) -> str:
        return f"rank {self._name(self._transport.rank)}"

    def _name(self, rank: int) -> int:
        return self._world_ranks[rank]

    def _dump(self) -> None:
        if self._dumped:
            return
        self._dumped = True
        path = flight_recorder.write_dump(self._name(self._transport.rank))
        if path is not None:
            logger.error("group %r failed (%s); its last operations are in %s", self.group, self.failure, path)

    # ------------------------------------------------------------ life

    @property
    def sequence(self) -> int:
        """How many operations were submitted."""
        return self._sequence

    def close(self, timeout_s: float) -> bool:
        """Waits until nothing runs, then ends the worker; whether that worked within `timeout_s`. Idempotent."""
        deadline = Deadline.after(timeout_s)
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            drained = self._changed.wait_for(lambda: not (self._busy or self._jobs), deadline.wait_s())
        if not drained:
            self.fail(GroupFailure(FailureKind.ABORTED, "the group was destroyed while operations ran"))
        if self._worker is not None:
            self._worker.join(min(GROUP_VERDICT_LIMIT_S + THREAD_GRACE_S, deadline.remaining_s() + THREAD_GRACE_S))
        return drained

    def free(self) -> None:
        """Gives the descriptors back, once nothing can poll them."""
        for descriptor in (self.wakeup_fd, self._wakeup_write_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.wakeup_fd = self._wakeup_write_fd = -1


_DTYPE_NAMES: Final[dict[torch.dtype | None, str]] = {
    None: "",
    **{dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES},
}


def _record_of(group: str, sequence: int, operation: Operation) -> Record:
    reads, writes = operation.inputs, operation.outputs
    inputs = [tensor.numel() for tensor in reads]
    outputs = inputs if writes is reads else [tensor.numel() for tensor in writes]
    dtype, op = operation.dtype, operation.reduce_op
    return Record(
        group, sequence, operation.kind.title, _DTYPE_NAMES[dtype], inputs, outputs, "" if op is None else op.name
    )
