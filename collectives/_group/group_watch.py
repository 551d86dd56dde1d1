"""`GroupWatch`: a group's watch and its sockets, for the whole life of the group."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import address_of_rank_0, not_made
from rpcdist.collectives._group.local_process import bind_host
from rpcdist.collectives._group.state import GroupActions, GroupFailure, GroupState
from rpcdist.collectives._group.watch import StateKeeper, Watch, encoded
from rpcdist.deadline import Deadline, longest_sleep_s
from rpcdist.errors import (
    AuthenticationFailed,
    CollectiveTimeout,
    ConnectFailed,
    DistNetworkError,
    ProtocolViolation,
    RendezvousError,
    TransportError,
    abridged,
    described_error,
    on_error,
)
from rpcdist.time_limits import ANSWER_LIMIT_S, CHECK_INTERVAL_S
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE, StreamSocket
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.shared_memory import Segment, SegmentError
from rpcdist.transport.sockets import SocketHub

T = TypeVar("T")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class GroupWatch(StateKeeper):
    """Connects the watch of a group before its other parts, so that a rank that dies meanwhile is noticed.

    It keeps the events of the watch in the group's state until an engine acts on them. The store tells the other ranks
    only the address of rank 0; ranks exchange all other data about themselves through the watch (`exchange`).

    Args:
        context: describes the group, which has more than one rank.
        deadline: the time by which the other ranks must join.
        unix_sockets: whether other ranks may reach this one through Unix sockets.
        memory_bytes: the size of the memory that rank 0 makes if all are beside it; 0 if this rank may share none.

    Attributes:
        uid: random name of this group, equal on all its ranks.
        addresses: addresses of the ranks' socket hubs, by rank in the group.
        boots: the boot id of each rank's kernel, by rank; empty if it is unknown.
        beside_rank_0: by rank, whether it shares memory, the kernel, and a Unix socket as its connection with rank 0.
        reporter: tells the other ranks of failures that this rank found.

    Raises (constructor):
        RendezvousError: some ranks did not join; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    def __init__(
        self, context: GroupContext, deadline: Deadline, unix_sockets: bool = True, memory_bytes: int = 0
    ) -> None:
        super().__init__(GroupState(context.name, context.rank, context.ranks))
        self._context = context
        self._lock = threading.Lock()
        self._group: StateKeeper | None = None
        context.process.acquire_sockets(bind_host(context.store))
        self.hub = context.process.hub
        with on_error(self.release):
            own = HubAddress.parse(self.hub.address)
            if not unix_sockets:
                own = dataclasses.replace(own, unix_name="")
            rank_0, self.uid = address_of_rank_0(context, own, deadline)
            sockets = connect_watch(context, self.hub, rank_0, self.uid, deadline)
            is_near = context.rank == 0 or sockets[0].family == socket.AF_UNIX
            self.reporter = Watch(context.process.node, context.rank, context.ranks, context.name, self)
            self.reporter.take_connections(sockets)
        with on_error(self.give_up):
            own_text = f"{own} {_boot_id()} {is_near and memory_bytes > 0:d}"
            entries = self.exchange(own_text, deadline, lambda entries: memory_bytes if _are_alike(entries) else 0)
            self.addresses, self.boots, marks = zip(*self.read(entries, _read_entry), strict=True)
            first = self.boots[0]
            self.beside_rank_0 = tuple(
                boot == first and mark == "1" for boot, mark in zip(self.boots, marks, strict=True)
            )

    def check(self) -> None:
        """Raises if the group cannot be made any more."""
        if self._context.check is not None:
            self._context.check()  # raises if a member cannot join any more
        failure = self.state.setup_failure()
        if failure is None:
            return
        if failure.kind is CollectiveTimeout:
            raise RendezvousError(failure.reason)
        raise failure.error(f"making group {self.state.group!r}")

    def exchange(
        self, value: str, deadline: Deadline, memory_for: Callable[[list[str]], int] | None = None
    ) -> list[str]:
        """Returns the texts of all ranks, by rank. Blocks; all ranks call it, in the same order.

        Args:
            memory_for: see `Watch.exchange`.
        """
        context = self._context
        answer = self.reporter.exchange(value, memory_for)
        # Rank 0 knows which ranks are missing and tells the others, so they wait longer than rank 0.
        limit = deadline if context.rank == 0 else Deadline.after(deadline.remaining_s() + ANSWER_LIMIT_S)
        wait_s = longest_sleep_s() if context.check is None else CHECK_INTERVAL_S
        while True:
            try:
                self.check()
            except Exception:
                if not answer.done():  # rank 0 may leave as soon as it has sent the answer
                    raise
            try:
                return answer.result(min(wait_s, limit.remaining_s()))
            except CancelledError:
                self.check()
                raise
            except TimeoutError:
                pass
            if limit.expired() and not answer.done():
                missing = self.reporter.missing() if context.rank == 0 else [0]
                error = not_made(context, missing)
                self.reporter.report(GroupFailure(CollectiveTimeout, str(error), tuple(missing)))
                raise error

    def read(self, texts: Sequence[str], read_one: Callable[[int, str], T]) -> list[T]:
        """Reads the texts of all ranks.

        Args:
            read_one: takes a rank and its text; raises `ValueError` if no rank of this version sends that.

        Raises:
            ProtocolViolation: it did; names the rank.
        """
        values = []
        for rank, text in enumerate(texts):
            try:
                values.append(read_one(rank, text))
            except (ValueError, RecursionError) as exc:
                name = f"rank {self._context.ranks[rank]} of group {self._context.name!r}"
                raise ProtocolViolation(f"{name} sent {abridged(text)}, which no rank of this version sends") from exc
        return values

    def memory_of_rank_0(self, deadline: Deadline) -> Segment | None:
        """Returns the memory that rank 0 passes; None if it cannot make it. Blocks.

        Raises:
            SegmentError: none comes in time, or this process has no free descriptor for it.
        """
        while True:
            try:
                return self.reporter.memory.result(min(CHECK_INTERVAL_S, deadline.remaining_s()))
            except TimeoutError:
                self.check()
            if deadline.expired():
                raise SegmentError("rank 0 passed no shared memory in time")

    def hand_over(self, group: StateKeeper) -> None:
        """Passes earlier and later events of the watch to the group, which is complete."""
        with self._lock:
            self._group = group
        group.opened()

    def leave(self, sequence: int) -> None:
        """Tells the other ranks that this one leaves after `sequence` operations. Bounded; idempotent."""
        self.reporter.close(sequence)

    def release(self) -> None:
        """Releases the sockets, when no part of the group uses them; call it once. Blocks for a limited time."""
        self._context.process.release_sockets()

    def give_up(self) -> None:
        """Tells the other ranks that the group cannot be made, and releases the sockets."""
        self.leave(0)
        self.release()

    def _handle(self, event: Callable[[], GroupActions]) -> None:
        with self._lock:  # after `hand_over` the group alone changes the state
            if self._group is None:
                event()
                return
        self._group._handle(event)


def connect_watch(
    context: GroupContext, hub: SocketHub, rank_0: str, uid: str, deadline: Deadline
) -> dict[int, StreamSocket]:
    """Opens the connections of the group's watch: on rank 0 one with every other rank, elsewhere one with rank 0."""
    purpose = f"{uid}/watch/"
    if context.rank != 0:
        try:
            return {0: hub.connect(rank_0, f"{purpose}{context.rank}", deadline.remaining_s())}
        except AuthenticationFailed:
            raise
        except TransportError as exc:
            reason, waited_s = (exc.reason, exc.waited_s) if isinstance(exc, ConnectFailed) else (str(exc), None)
            reason = f"{reason} (rank 0 of group {context.name!r}). Did it end?"
            raise ConnectFailed(rank_0, reason, waited_s) from exc
    sockets, error = _accept_watch(context, hub, purpose, deadline)
    if error is not None:
        missing = [rank for rank in range(1, context.size) if rank not in sockets]
        late = [context.ranks[rank] for rank in missing]
        text = (
            f"ranks {late} of group {context.name!r} did not connect to rank 0. Did they end? Their own error says why"
        )
        gave_up = f"rank {context.ranks[0]} gave up making group {context.name!r}: {described_error(error)}"
        reason = text if isinstance(error, TimeoutError) else gave_up
        failure = GroupFailure(CollectiveTimeout, reason, tuple(missing))
        for sock in sockets.values():
            with suppress(OSError):  # the rank ended meanwhile
                sock.sendmsg([encoded({"say": "failure", **failure.to_json()})], (), NO_SIGPIPE)
            sock.close()
        if isinstance(error, TimeoutError):
            raise DistNetworkError(text) from error
        raise error
    return sockets


def _accept_watch(
    context: GroupContext, hub: SocketHub, purpose: str, deadline: Deadline
) -> tuple[dict[int, StreamSocket], BaseException | None]:
    """Returns the connections of all other ranks; or those that came, and why it did not wait for the rest."""
    found: dict[str, StreamSocket] = {}
    error: BaseException | None = None
    try:
        hub.collect(purpose, map(str, range(1, context.size)), found, deadline.remaining_s(), context.check)
    except BaseException as exc:
        error = exc
    return {int(rank): sock for rank, sock in found.items()}, error


def _are_alike(entries: list[str]) -> bool:
    """Whether the ranks differ only in their addresses."""
    return len({text.partition(" ")[2] for text in entries}) == 1


def _read_entry(rank: int, text: str) -> tuple[str, str, str]:
    """The address, boot id and mark that a rank has sent. Raises `ValueError`."""
    address, boot, mark = text.split(" ")
    HubAddress.parse(address)
    return address, boot, mark


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
