"""`EngineBackend`: the common part of the backends that run operations on an `Engine`, `tcp` and `mpi`."""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.collectives._group.engine import Engine
from rpcdist.collectives._group.flight_records import record_of_message
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.state import GroupFailure, GroupState, Reporter
from rpcdist.collectives._operations.operation import Operation
from rpcdist.collectives._stores.derived_stores import PrefixStore
from rpcdist.collectives._transports.transport_base import Transport
from rpcdist.collectives.work import Work
from rpcdist.deadline import Deadline

if TYPE_CHECKING:
    from rpcdist.collectives._mpi.mpi_messages import MpiMessages
    from rpcdist.collectives._transports.p2p.messenger import Messenger

logger = logging.getLogger(__name__)


class EngineBackend(GroupBackend):
    """A backend that consists of an engine, which runs the collectives, and of messages."""

    runs_parts = True

    def __init__(
        self, context: GroupContext, watch: GroupWatch | None, transport: Transport, messages: Messenger | MpiMessages
    ) -> None:
        self.context = context
        self.reduces_many = transport.reduces_many
        self._watch = watch
        self._transport = transport
        self._messages = messages
        self._recorder = context.process.recorder
        self._message_numbers = itertools.count(1)
        self._closed = False
        self._nested: EngineBackend | None = None
        self._engine = Engine(
            transport,
            GroupState(context.name, context.rank, context.ranks) if watch is None else watch.state,
            timeout_s=context.timeout_s,
            recorder=context.process.recorder,
            outlives_ranks=context.outlives_ranks,
            reporter=Reporter() if watch is None else watch.reporter,
            on_failure=self._fail,
            on_departure=messages.peer_lost,
        )
        self.abort_hooks = self._engine.abort_hooks
        if watch is None:
            self._engine.opened()
        else:
            watch.hand_over(self._engine)
        context.process.close_at_exit(self)  # last: if this constructor raises, its caller releases what it holds

    def __repr__(self) -> str:
        medium = type(self._transport).__name__.removesuffix("Transport")
        return f"<{type(self).__name__} rank {self.context.rank} of {self.context.size}, {medium}>"

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

    def meet(self, timeout_s: float) -> bool:
        if self._watch is not None:
            self._watch.exchange("", Deadline.after(timeout_s))
        return True

    def here(self) -> GroupBackend:
        """Returns, in a callback, a second backend of the same ranks, made at the first call; see [Note: callbacks]."""
        if not self._engine.callbacks.runs_here():
            return self
        if self._nested is None:
            context = self.context
            store = PrefixStore("callbacks", context.store)
            name = f"{context.name}, its callbacks"
            nested = replace(context, name=name, store=store, check=self._check)
            self._nested = type(self)(nested)  # type: ignore[call-arg]  # subclasses take the context alone
            self._check()  # the new backend has not heard of a failure since then
        return self._nested

    def _check(self) -> None:
        failure = self._engine.state.failure
        if failure is not None:
            raise failure.error(f"a callback of group {self.context.name!r}")

    def _fail(self, failure: GroupFailure) -> None:
        self._fail_messages(failure)
        if self._nested is not None:  # the callbacks of other ranks may never call its operations
            self._nested._engine.fail(failure)

    def run_part(self, operation: Operation) -> None:
        self._engine.run_part(operation)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, **options: Any) -> Work:
        return self._recorded("send", self._messages.send, tensor, peer, tag, **options)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, **options: Any) -> Work:
        return self._recorded("recv", self._messages.recv, tensor, peer, tag, **options)

    def _recorded(
        self, operation: str, start: Callable[..., Work], tensor: torch.Tensor, peer: int | None, tag: int,
        *, asynchronous: bool = False, timeout_s: float | None = None, **finish: Any,
    ) -> Work:  # fmt: skip
        limit_s = self.context.timeout_s if timeout_s is None else timeout_s
        rank = None if peer is None else self.context.ranks[peer]
        record = record_of_message(self.context.name, next(self._message_numbers), operation, tensor, rank, tag)
        self._recorder.note(record)
        try:
            work = start(record, tensor, peer, tag, asynchronous=asynchronous, timeout_s=limit_s, **finish)
        except BaseException as exc:
            record.end(exc)
            raise
        record.follow(work)
        return work

    def lost_ranks(self) -> dict[int, str]:
        return self._engine.state.lost_ranks()

    def abort(self, reason: str) -> None:
        self._engine.fail_everywhere(self._engine.state.aborted(reason))

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(timeout_s)
        drained = self._engine.close(timeout_s)
        if not self._engine.callbacks.drain(deadline.remaining_s()):
            logger.error("callbacks of group %r did not end in time", self.context.name)
        if self._nested is not None:
            self._nested.close(deadline.remaining_s())
        self._close_messages(deadline, drained)
        if self._watch is not None:
            self._watch.leave(self._engine.state.sequence)
        self._transport.close()
        self._engine.free()
        if self._watch is not None:
            self._watch.release()

    @abstractmethod
    def _fail_messages(self, failure: GroupFailure) -> None:
        """Fails all messages. Any thread may call it; never waits long."""

    @abstractmethod
    def _close_messages(self, deadline: Deadline, drained: bool) -> None:
        """Waits for messages and closes their connections; `drained` says whether all collectives were done in time."""
