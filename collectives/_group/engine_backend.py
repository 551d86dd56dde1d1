"""The common part of the backends whose operations run on an `Engine`: `tcp` and `mpi`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.flight_records import MessageLog
from rpcdist.collectives._group.state import GroupFailure
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline

logger = logging.getLogger(__name__)


class Messages(Protocol):
    """Carries a group's messages; see `GroupBackend.send` and `GroupBackend.recv`."""

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
    """A backend made of an engine, which runs the collectives, and of messages."""

    runs_parts = True

    def __init__(self, context: GroupContext, engine: Engine, messages: Messages) -> None:
        self.context = context
        self._engine = engine
        self.abort_hooks = engine.abort_hooks
        self._messages = messages
        self._recorder = context.process.recorder
        self._log = MessageLog(context.name, context.ranks)
        self._closed = False
        self._nested: EngineBackend | None = None
        context.process.close_at_exit(self)

    def submit(
        self,
        operation: Operation,
        *,
        asynchronous: bool = False,
        timeout_s: float | None = None,
        finish: Callable[[], None] | None = None,
        result: list[torch.Tensor] | None = None,
    ) -> Work:
        if self._engine.callbacks.runs_here():
            return self.here().submit(
                operation, asynchronous=asynchronous, timeout_s=timeout_s, finish=finish, result=result
            )
        return self._engine.submit(operation, asynchronous, timeout_s, finish, result)

    def here(self) -> GroupBackend:
        """In a callback, a second backend of the same ranks, made at the first call; see [Note: callbacks]."""
        if not self._engine.callbacks.runs_here():
            return self
        if self._nested is None:
            context = self.context
            store = PrefixStore("callbacks", context.store)
            name = f"{context.name}, its callbacks"
            nested = replace(context, name=name, store=store, check=self._check)
            self._nested = type(self)(nested)  # type: ignore[call-arg]  # subclasses take the context alone
            self._check()  # a failure since then has passed it by
        return self._nested

    def _check(self) -> None:
        failure = self._engine.state.failure
        if failure is not None:
            raise failure.error(f"a callback of group {self.context.name!r}")

    def _fail_nested(self, failure: GroupFailure) -> None:
        """Operations of callbacks cannot end: the callbacks of other ranks may never call them."""
        if self._nested is not None:
            self._nested._engine.fail(failure)

    def _end_callbacks(self, deadline: Deadline) -> None:
        """Waits for the callbacks, and frees what they use; after the operations that they wait for."""
        if not self._engine.callbacks.drain(deadline.remaining_s()):
            logger.error("callbacks of group %r did not end in time", self.context.name)
        if self._nested is not None:
            self._nested.close(deadline.remaining_s())

    def run_part(self, operation: Operation) -> None:
        self._engine.run_part(operation)

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int, *, asynchronous: bool = False, timeout_s: float | None = None
    ) -> Work:
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        return self._recorded("send", tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s)

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
        return self._recorded("recv", tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, finish=finish)

    def _recorded(
        self, operation: Literal["send", "recv"], tensor: torch.Tensor, peer: int | None, tag: int, **options: Any
    ) -> Work:
        start: Callable[..., Work] = self._messages.send if operation == "send" else self._messages.recv
        record = self._log.record(operation, tensor, peer, tag)
        self._recorder.note(record)
        try:
            work = start(tensor, peer, tag, **options)
        except BaseException as exc:
            record.end(exc)
            raise
        record.follow(work)
        return work

    def lost_ranks(self) -> dict[int, str]:
        return self._engine.state.lost_ranks()

    def abort(self, reason: str) -> None:
        self._engine.fail_everywhere(self._engine.state.aborted(reason))
