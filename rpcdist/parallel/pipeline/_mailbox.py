"""Holds the tensors that arrive for a step until its actions need them.

[Note: receivers]
    Neighbours address a runner by the pipeline's key and the worker's index, not by a remote reference: references from
    worker to worker and back would keep each other alive. The runner lives as long as the driver's reference to it.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.parallel.pipeline._schedules import Action, Kind
from rpcdist.rpc._current import AgentLocal
from rpcdist.rpc._devices.handler_streams import ArrivedTensors
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._peers.network import MessageSink, calling_session
from rpcdist.rpc.functions import runs_on_reader


class TensorSource(Protocol):
    """Where tensors arrive, and where a thread that waits for them can read: a session with a neighbour."""

    def lead(self, is_waiting: Callable[[], bool], timeout_s: float | None) -> bool:
        """Reads while `is_waiting`, unless another thread does; whether the wait is over."""

    def ring(self) -> None:
        """Has a thread that reads ask `is_waiting` again."""


TensorSources = dict[tuple[int, Kind], TensorSource]
"""Where the tensors for a stage and kind of action came from last; filled as they arrive."""


class Mailbox:
    """The tensors of one worker and one step. Any thread may put, one thread takes.

    Args:
        sources: where to read for tensors that are not there yet.
        on_gpu: tensors may be on a GPU, and not computed yet: the current streams of the thread that takes them wait
            for them.
    """

    def __init__(self, sources: Mapping[tuple[int, Kind], TensorSource], on_gpu: bool = False) -> None:
        self._sources = sources
        self._on_gpu = on_gpu
        self._streams: dict[Action, ArrivedTensors] = {}
        self._condition = threading.Condition()
        self._arrived: dict[Action, Sequence[object]] = {}
        self._failure: BaseException | None = None
        self._reading: tuple[int, TensorSource] | None = None  # the thread that takes, and where it reads

    def put(self, action: Action, values: Sequence[object]) -> None:
        """Stores the tensors that `action` needs; those on GPUs are in the current streams of this thread."""
        streams = ArrivedTensors.of(values) if self._on_gpu else None
        with self._condition:
            if streams is not None:
                self._streams[action] = streams
            self._arrived[action] = values
            self._condition.notify()
        self._ring()

    def fail(self, failure: BaseException) -> None:
        """Ends the step: `take` and `check` raise the first `failure`."""
        with self._condition:
            if self._failure is None:
                self._failure = failure
            self._condition.notify()
        self._ring()

    def _ring(self) -> None:
        """After what the thread that takes waits for was stored: it looks for that after `_reading` is set."""
        if (reading := self._reading) is not None and reading[0] != get_ident():
            reading[1].ring()

    def check(self) -> None:
        """Raises if the step has ended."""
        if self._failure is not None:
            raise self._failure

    def take(self, action: Action, deadline: Deadline) -> Sequence[object]:
        """Removes and returns the tensors that `action` needs; waits for them.

        A thread that waits reads where they will arrive, so that nobody has to wake it.

        Raises:
            DeadlineExceeded: they did not come in time.
            BaseException: the failure that `fail` got.
        """
        if not self._is_over(action):
            with blocking():  # what comes may need a thread of the pool
                if not self._read(action, deadline):
                    with self._condition:
                        self._condition.wait_for(lambda: self._is_over(action), deadline.wait_s())
        self.check()
        with self._condition:
            if action not in self._arrived:
                raise DeadlineExceeded("what it needs did not arrive in time")
            values, streams = self._arrived.pop(action), self._streams.pop(action, None)
        if streams is not None:
            streams.join_gpus()
        return values

    def _is_over(self, action: Action) -> bool:
        return action in self._arrived or self._failure is not None

    def _read(self, action: Action, deadline: Deadline) -> bool:
        """Reads until the wait for an action is over; False if this thread may not, or the time is over."""
        source = self._sources.get((action.stage, action.kind))
        if source is None:
            return False
        self._reading = get_ident(), source
        try:
            return source.lead(lambda: not self._is_over(action), deadline.wait_s())
        finally:
            self._reading = None


class Receiver(Protocol):
    """Takes the tensors that a neighbour pushes: a `StageRunner`."""

    def arrived(self, step: int, action: Action, values: Sequence[object], source: MessageSink | None) -> None:
        """Takes the tensors for an action of this or a later step, and where they came from; on any thread."""


receivers: AgentLocal[WeakValueDictionary[tuple[str, int], Receiver]] = AgentLocal(WeakValueDictionary)
"""By the key of the pipeline and the index of the worker."""


@runs_on_reader
def push(key: str, worker: int, step: int, stage: int, kind: Kind, microbatch: int, values: list[object]) -> None:
    """Delivers tensors for an action. A neighbour calls it by RPC."""
    receiver = receivers.get().get((key, worker))
    if receiver is None:
        raise RpcdistError(f"the pipeline {key} has ended on this worker")
    receiver.arrived(step, Action(stage, kind, microbatch), values, calling_session.get())
