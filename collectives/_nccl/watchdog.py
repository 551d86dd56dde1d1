"""The watchdog of an NCCL group: a thread that asks the device whether operations have ended.

Rules:

 1. Every operation is registered before its first call of NCCL, so that the watchdog also sees a call that blocks.
 2. `GroupState` decides what a failure or a departure means. After a failure, all operations that are not done fail,
    and the communicator is aborted, which ends kernels and calls that wait for a peer.
 3. Tensors of failed operations are kept until the communicator is aborted, as the device may use them until then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from rpcdist.collectives._group.flight_records import FlightRecorder, Record
from rpcdist.collectives._group.operation_hooks import run_abort_hooks
from rpcdist.collectives._group.state import GroupActions, GroupFailure, GroupState, Reporter
from rpcdist.collectives._group.watch import StateKeeper
from rpcdist.collectives._nccl.communicator_calls import Communicator, CudaRuntime
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import BlockingInLoop, CollectiveError, CollectiveTimeout, GroupAborted
from rpcdist.time_limits import (
    GROUP_VERDICT_LIMIT_S,
    IDLE_RECHECK_S,
    NCCL_POLL_S,
    NCCL_WORK_POLL_S,
    SLOW_WORK_LIMIT_S,
    THREAD_GRACE_S,
    TICK_S,
)


class NcclWork(Work):
    """See `Work`; the device may not be done, and the host usually need not wait for it.

    `wait()` without a timeout makes the current stream wait, so that later work on it sees the results, and returns at
    once. It raises a failure that is known by then; otherwise the group's next operation raises it. `wait(timeout)` and
    `is_completed()` ask the device. Awaiting it waits for the device.

    Args:
        sequence: number of a collective; 0 for a message.
        deadline: the time at which the group's watchdog ends the group.
        keep: tensors that must live until the device is done, so that their memory is not reused before.
        blocking: whether `wait()` waits for the device.
    """

    def __init__(
        self,
        title: str,
        sequence: int,
        runtime: CudaRuntime,
        deadline: Deadline,
        keep: list[torch.Tensor],
        record: Record,
        *,
        blocking: bool = False,
        result: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(title, result)
        self.sequence = sequence
        self.deadline = deadline
        self.record = record
        self._runtime = runtime
        self._keep = keep
        self._blocking = blocking
        self._event: torch.cuda.Event | None = None
        self._enqueued = threading.Event()
        self._peer = -1
        self._device_future: torch.futures.Future[list[torch.Tensor]] | None = None

    # ------------------------------------------------------------ for the backend

    def enqueued(self, stream: torch.cuda.Stream, keep: list[torch.Tensor], peer: int = -1) -> None:
        """Notes that the operation is on the stream; `peer` is the sender, for a receive."""
        self._keep.extend(keep)
        self._peer = peer
        self._event = stream.record_event()
        with self._runtime.on(stream):  # the future keeps the streams that are current when it gets its value
            self._device_future = self._make_future()
        self._enqueued.set()

    def poll(self) -> bool:
        """Returns whether it is done; completes it if the device is done. Raises the runtime's errors."""
        if not self._done and self._event is not None and self._event.query():
            self._keep.clear()
            self.complete(self._peer)
        return self._done

    def _finish(self, error: BaseException | None) -> None:
        if not self._done:
            self.record.end(error)
        super()._finish(error)
        self._enqueued.set()

    def _make_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        device = self._runtime.device
        devices: list[torch.device | int | str] | None = [device] if device.type == "cuda" else None
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future

    # ------------------------------------------------------------ for users

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if self._blocking or (seconds is not None and seconds > 0):
            self._wait_on_host(Deadline.after(seconds or None))
        if self._error is not None:
            raise self._error
        self.block_current_stream()
        return True

    def _wait_on_host(self, limit: Deadline) -> None:
        """Waits for the device, up to the limit; the watchdog ends the operation at its own limit."""
        if not self._done and asyncio._get_running_loop() is not None:
            raise BlockingInLoop("Work.wait", "await work")
        if not self._enqueued.wait(limit.wait_s()):
            text = "the wait timed out before the operation started; the operation continues, wait again"
            raise CollectiveTimeout(self.title, text)
        pause = threading.Event()
        while not self.poll():
            if limit.expired():
                text = "the wait timed out; the device is still busy with the operation, wait again"
                raise CollectiveTimeout(self.title, text)
            pause.wait(NCCL_WORK_POLL_S)

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self._error is None

    def synchronize(self) -> None:
        """Makes the current stream wait; never blocks the host."""
        self.block_current_stream()

    def block_current_stream(self) -> None:
        if self._event is not None and not self._done:
            self._runtime.current_stream().wait_event(self._event)

    def result(self) -> list[torch.Tensor]:
        """Returns the output tensors, for which the current stream waits."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the output tensors, done when they are enqueued: its callbacks run on waiting streams."""
        return self._device_future if self._device_future is not None else super().get_future()


logger = logging.getLogger(__name__)


class NcclWatchdog(StateKeeper):
    """Watches the operations of one group on the device, and ends them when the group fails."""

    def __init__(
        self,
        state: GroupState,
        runtime: CudaRuntime,
        communicator: Communicator,
        recorder: FlightRecorder,
        reporter: Reporter,
    ) -> None:
        super().__init__(state)
        self._runtime = runtime
        self._communicator = communicator
        self._recorder = recorder
        self._reporter = reporter
        self._changed = threading.Condition()
        self._pending: dict[NcclWork, None] = {}  # an ordered set, in the order of the calls
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name=f"rpcdist nccl {state.group}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ registering (any thread)

    def register(self, make: Callable[[int], NcclWork], collective: bool) -> NcclWork:
        """Gives an operation its number (0 for messages) and watches it from now on."""
        state = self.state
        with self._changed:
            work = make(state.sequence + 1 if collective else 0)
            if state.refusal is not None:
                raise state.refusal.error(work.title)
            if collective:
                state.sequence += 1
            self._pending[work] = None
            state.current = state.current or work
            self._recorder.note(work.record)
            self._changed.notify_all()
        return work

    def forget(self, work: NcclWork, error: BaseException) -> None:
        self._remove(work)
        work.fail(error)

    def _remove(self, work: NcclWork) -> None:
        with self._changed:
            self._pending.pop(work, None)
            self.state.current = next(iter(self._pending), None)
            self.state.last, self.state.last_ended = work.title, time.monotonic()
            self._changed.notify_all()

    # ------------------------------------------------------------ events (any thread)

    def _handle(self, event: Callable[[], GroupActions]) -> None:
        with self._changed:
            actions = event()
            works = list(self._pending)
            self._changed.notify_all()
        # `wakes` and `departed` need no action: the thread soon checks every operation
        if actions.fails is not None:
            run_abort_hooks(self.abort_hooks, self.state.group)
            for work in works:
                work.fail(actions.fails.error(work.title))
        if (failure := actions.reports) is not None:
            self._reporter.report(failure)
            path = self._recorder.write_dump(self._name(self.state.rank))
            logger.error("group %r failed (%s); its last operations are in %s", self.state.group, failure, path)

    # ------------------------------------------------------------ the thread

    def _watch(self) -> None:
        next_check = 0.0
        while True:
            with self._changed:
                while not (self._pending or self._closing or self.state.failure):
                    self._changed.wait(IDLE_RECHECK_S)
                if self.state.failure is not None or not self._pending:
                    break
            try:
                self._check_works()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + TICK_S
                    self._communicator.check_async_error()
            except self._runtime.errors as exc:
                self.fail_everywhere(self._reported(exc))
            with self._changed:
                if self._pending and self.state.failure is None:
                    self._changed.wait(NCCL_POLL_S)
        self._end()

    def _check_works(self) -> None:
        with self._changed:
            pending = list(self._pending)
        for work in pending:
            if work.poll():
                self._remove(work)
            elif (departure := self.state.departure_before(work.sequence)) is not None:
                self.fail_everywhere(departure)
            elif work.deadline.expired():
                self._timed_out(work)

    def _timed_out(self, work: NcclWork) -> None:
        """Asks the watch which ranks are missing; without an answer, reports what this rank knows."""
        if self._reporter.report_timeout(work.title, work.sequence):
            with self._changed:
                self._changed.wait_for(lambda: self.state.explains(None), GROUP_VERDICT_LIMIT_S)
        reason = f"{work.title} timed out on rank {self._name(self.state.rank)}: the device has not finished it"
        self.fail_everywhere(GroupFailure(CollectiveTimeout, reason))

    def _reported(self, exc: Exception) -> GroupFailure:
        reason = f"NCCL reported on rank {self._name(self.state.rank)}: {exc}"
        return GroupFailure(CollectiveError, f"{reason} (NCCL_DEBUG=WARN in the environment shows more details)")

    def _name(self, rank: int) -> int:
        return self.state.world_ranks[rank]

    def _end(self) -> None:
        """Frees the communicator; aborts it after a failure."""
        try:
            if self.state.failure is None:
                self._communicator.destroy()
            else:
                self._communicator.abort()
        except self._runtime.errors as exc:
            logger.warning("the NCCL communicator of group %r could not be freed: %s", self.state.group, exc)
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    # ------------------------------------------------------------ life

    def close(self, deadline: Deadline) -> None:
        """Waits for operations in progress, aborts late ones, then frees the communicator. Idempotent."""
        with self._changed:
            self._closing = True
            self.state.close()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending or self.state.failure is not None, deadline.wait_s())
            drained = not self._pending
        if not drained:
            self.fail(GroupFailure(GroupAborted, "the group was destroyed while operations ran"))
        self._thread.join(min(deadline.remaining_s() + THREAD_GRACE_S, SLOW_WORK_LIMIT_S))
        if self._thread.is_alive():
            logger.error("the NCCL communicator of group %r could not be freed in time", self.state.group)


T = TypeVar("T")


def call_bounded(call: Callable[[], T], deadline: Deadline, what: str) -> T:
    """Runs a call on another thread, with a limit; returns its result or raises its exception.

    Args:
        call: may block forever.

    Raises:
        CollectiveTimeout: the call did not return in time; it continues on a daemon thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as exc:  # raised on the thread that waits for the result
            errors.append(exc)

    thread = threading.Thread(target=run, name=f"rpcdist {what}", daemon=True)
    thread.start()
    thread.join(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise CollectiveTimeout(what, "NCCL timed out and cannot be interrupted: end this process")
    if errors:
        raise errors[0]
    return results[0]
