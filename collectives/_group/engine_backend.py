"""What the backends whose operations run on an `Engine` (`tcp` and `mpi`) have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from rpcdist.collectives import flight_recorder
from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.failure import FailureKind, GroupFailure
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._transports.base import PartControl
from rpcdist.collectives.flight_recorder import MessageLog
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline

__all__ = ["EngineBackend", "GroupEngine", "Messages"]


class GroupEngine(Engine):
    """An engine whose operations may go on in `finish` with further ones, whose sizes the first one finds out."""

    def run_part(self, operation: Operation) -> None:
        """See `GroupBackend.run_part`."""
        job = self._current
        assert job is not None, "run_part is for the `finish` of a running operation"
        self._transport.run(operation, PartControl(job, job.sequence, operation.fingerprint(job.sequence)))


class Messages(Protocol):
    """What carries a group's messages; see `GroupBackend.send` and `GroupBackend.recv`."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool, timeout_s: float) -> Work: ...

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool,
        timeout_s: float,
        finish: Callable[[], None] | None,
    ) -> Work: ...


class EngineBackend(GroupBackend):
    """A backend made of an engine for collectives, and of messages.

    A subclass sets `_engine` in its constructor.
    """

    runs_parts = True
    _engine: GroupEngine

    def __init__(self, context: GroupContext) -> None:
        self.context = context
        self._deadline = Deadline.after(context.timeout_s)
        self._log = MessageLog(context.name, context.ranks)
        self._closed = False

    @property
    @abstractmethod
    def _messages(self) -> Messages: ...

    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        return self._engine.submit(operation, asynchronous, timeout_s, finish, result)

    def run_part(self, operation: Operation) -> None:
        self._engine.run_part(operation)

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool = False, timeout_s: float | None = None
    ) -> Work:
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        return self._recorded(
            "send",
            tensor,
            peer,
            tag,
            lambda: self._messages.send(tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s),
        )

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        return self._recorded(
            "recv",
            tensor,
            peer,
            tag,
            lambda: self._messages.recv(tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, finish=finish),
        )

    def _recorded(
        self, operation: str, tensor: torch.Tensor, peer: int | None, tag: int, start: Callable[[], Work]
    ) -> Work:
        record = self._log.record(operation, tensor, peer, tag)
        flight_recorder.note(record)
        try:
            work = start()
        except BaseException as exc:
            record.end(exc)
            raise
        record.follow(work)
        return work

    def lost_ranks(self) -> dict[int, str]:
        failure, left = self._engine.failure, dict.fromkeys(self._engine.departed, "it left the default group")
        lost = failure is not None and failure.kind is FailureKind.LOST
        return {**(dict.fromkeys(failure.ranks, failure.reason) if failure and lost else {}), **left}

    def abort(self, reason: str) -> None:
        me = self.context.ranks[self.context.rank]
        self._fail_everywhere(GroupFailure(FailureKind.ABORTED, f"rank {me} aborted the group: {reason}"))

    def _fail_everywhere(self, failure: GroupFailure) -> None:
        if self._engine.fail(failure):
            self._engine.reporter.report(failure)
