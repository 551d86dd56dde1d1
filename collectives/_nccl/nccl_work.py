"""`NcclWork`: an operation that a GPU runs when its stream comes to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from rpcdist.collectives._group.flight_records import Record
from rpcdist.collectives._nccl.nccl_library import CudaEvent, CudaStream, Runtime
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline
from rpcdist.errors import BlockingInLoop, CollectiveTimeout
from rpcdist.time_limits import NCCL_WORK_POLL_S


class NcclWork(Work):
    """See `Work`; the device may be behind, and the host usually need not wait for it.

    `wait()` without a timeout makes the current stream wait, so that what is enqueued later sees the results, and
    returns at once; a failure is raised here if it is known by then, and else by the group's next operation.
    `wait(timeout)` and `is_completed()` ask the device. Awaiting it waits for the device.

    Args:
        title: names the operation in errors.
        sequence: number of a collective; 0 for a message.
        runtime: the group's device and its NCCL.
        deadline: after which the group's watchdog ends the group.
        keep: tensors that have to live until the device is done: no others may get their memory before that.
        record: in the flight recorder.
        blocking: whether `wait()` waits for the device.
        result: the output tensors.
    """

    def __init__(
        self,
        title: str,
        sequence: int,
        runtime: Runtime,
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
        self._event: CudaEvent | None = None
        self._enqueued = threading.Event()
        self._peer = -1
        self._device_future: torch.futures.Future[list[torch.Tensor]] | None = None

    # ------------------------------------------------------------ for the backend

    def enqueued(self, stream: CudaStream, keep: list[torch.Tensor], peer: int = -1) -> None:
        """Everything has gone to the stream; `peer` is the sender, for a receive."""
        self._keep.extend(keep)
        self._peer = peer
        self._event = stream.record_event()
        with self._runtime.on(stream):  # the future remembers the streams that are current when it gets its value
            self._device_future = self._make_future()
        self._enqueued.set()

    def look(self) -> bool:
        """Whether it is done; completes it when the device has. Raises what the runtime raises."""
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
        """The watchdog ends it at the operation's own limit."""
        if not self._done and asyncio._get_running_loop() is not None:
            raise BlockingInLoop("Work.wait", "await work")
        if not self._enqueued.wait(limit.wait_s()):
            raise CollectiveTimeout(self.title, "it was not even started in this time; it goes on, wait again")
        pause = threading.Event()
        while not self.look():
            if limit.expired():
                raise CollectiveTimeout(self.title, "the device was not done in this time; it goes on, wait again")
            pause.wait(NCCL_WORK_POLL_S)

    def is_completed(self) -> bool:
        return self.look()

    def is_success(self) -> bool:
        return self.look() and self._error is None

    def synchronize(self) -> None:
        """Makes the current stream wait; never blocks the host."""
        self.block_current_stream()

    def block_current_stream(self) -> None:
        if self._event is not None and not self._done:
            self._runtime.current_stream().wait_event(self._event)

    def when_done(self, callback: Callable[[Work], object]) -> None:
        """As in `Work`: once the device is done, on the group's watchdog thread."""
        super().when_done(callback)

    def result(self) -> list[torch.Tensor]:
        """The output tensors; the current stream waits for them."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors that is done once it is enqueued: its callbacks run on streams that wait."""
        return self._device_future if self._device_future is not None else super().get_future()
