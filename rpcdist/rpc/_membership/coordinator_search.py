"""The search for the next coordinator when this one is lost, and the announcement of this worker to it.

Calls between the remaining workers go on meanwhile. The next coordinator takes them back, and sends the members.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import CoordinatorLost, DistStoreError, RpcdistError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._membership.coordinator import Coordinator
from rpcdist.rpc._membership.membership_messages import Outcome, members_of
from rpcdist.rpc._peers.demultiplexer import Lifetime
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.router import Router
from rpcdist.rpc.future import Future
from rpcdist.time_limits import FIRST_PAUSE_S, QUICK_ANSWER_LIMIT_S, RETURN_LONGEST_PAUSE_S
from rpcdist.transport.io_loop import IoLoop

logger = logging.getLogger(__name__)


class CoordinatorSearch:
    """One per agent, on the I/O loop; at the coordinator itself it does nothing.

    It makes attempts, with pauses between them. A call to the lost coordinator cuts the pause short, and waits for the
    next attempt: the next coordinator may be there already.

    Args:
        submit: runs functions that block on a thread of their own.
        look_up: blocks, bounded, and returns where the next coordinator is.
        world_size: None where workers come and go.
        recovery_s: how long a coordinator waits for others that were there.
        orphan_timeout_s: how long the next coordinator is looked for; then this worker is an orphan.
        on_orphaned: is called then, with the reason, and with None when a coordinator has taken this worker back.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        directory: Directory,
        router: Router,
        submit: Callable[[Callable[[], object]], object],
        look_up: Callable[[], str],
        world_size: int | None,
        recovery_s: float,
        orphan_timeout_s: float,
        on_orphaned: Callable[[CoordinatorLost | None], object],
        io: IoLoop,
        lifetime: Lifetime,
    ) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._router = router
        self._submit = submit
        self._look_up = look_up
        self._world_size = world_size
        self._recovery_s = recovery_s
        self._orphan_timeout_s = orphan_timeout_s
        self._on_orphaned = on_orphaned
        self._orphan_handle: asyncio.TimerHandle | None = None
        self._io = io
        self._lifetime = lifetime
        rank = directory.coordinator
        self._joined = directory.member(rank).identity if directory.knows(rank) else None
        self._refused_by: Identity | None = None
        self._missed_news = False
        self._check_handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()  # a call waits for an attempt
        self._changed = asyncio.Event()
        self._num_begun = 0  # attempts
        self._num_ended = 0
        self._num_found = 0
        self._is_answered = False

    @property
    def _is_looking(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Makes sure that the coordinator's death is noticed. It connects to everybody, unless it dies before that."""
        if self._coordinator.service is None:
            self._check_handle = self._io.loop.call_later(self._recovery_s, self._check)

    def _check(self) -> None:
        if self._joined is not None and not self._router.hears_from(self._joined):
            self._router.watch(self._directory.coordinator, "the membership of the job")

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        """A worker is declared lost."""
        if identity.id != self._directory.coordinator:
            return
        self._look()
        if self._orphan_handle is None and self._orphan_timeout_s < float("inf") and not self._lifetime.is_closed:
            self._orphan_handle = self._io.loop.call_later(self._orphan_timeout_s, self._declare_orphaned, error)

    def _declare_orphaned(self, error: WorkerLost) -> None:
        """No coordinator has taken this worker back in time."""
        if self._directory.is_living(self._directory.coordinator):  # it was only silent
            self._orphan_handle = None
            return
        reason = f"no process took its place within {self._orphan_timeout_s:g} s ({error.reason})"
        orphaned = CoordinatorLost(error.worker, "rpc.serve()", error.last_seen_s, reason)
        logger.error("%s: %s", self._directory.me.name, orphaned)
        self._on_orphaned(orphaned)

    def _found(self) -> None:
        if self._orphan_handle is not None:
            self._orphan_handle.cancel()
            self._orphan_handle = None
            self._on_orphaned(None)

    def is_coordinator(self, identity: Identity) -> bool:
        """Whether a worker that speaks as the coordinator is the one whose list has this worker in it.

        Another one is looked for: it may have taken this worker back a moment ago, or started before its predecessor's
        end was noticed here; it sends the members when this worker announces itself.
        """
        if identity == self._joined:
            return True
        if identity.id == self._directory.coordinator and not self._directory.was_replaced(identity):
            self._missed_news = True
            self._look()
        return False

    def on_probe(self, identity: Identity) -> None:
        """Somebody asked whether this worker lives; the next coordinator, if it waits for this worker to come."""
        is_another = identity.id == self._directory.coordinator and identity != self._joined
        if is_another and not self._directory.was_replaced(identity):
            self._hurry()

    def _look(self) -> None:
        if self._coordinator.service is None and not self._is_looking and not self._lifetime.is_closed:
            self._task = self._io.spawn(self._run(), "rpcdist look for the coordinator")

    def _hurry(self) -> None:
        """Has an attempt made now."""
        self._wanted.set()
        self._look()

    def _on_answer(self) -> None:
        """Another coordinator is there; it may still have to wait for others before it takes this worker back."""
        self._is_answered = True
        self._changed.set()

    async def attempt(self, deadline: Deadline) -> bool:
        """Waits until the coordinator is found, or one attempt that begins now or later has failed.

        Without an answer it waits for `QUICK_ANSWER_LIMIT_S` at most; but once another coordinator has answered, it
        waits until that one has taken this worker back, at most until the deadline.

        Returns:
            Whether it was found.
        """
        goal, found = self._num_begun + 1, self._num_found
        silent_until = time.monotonic() + QUICK_ANSWER_LIMIT_S
        self._hurry()
        while self._num_found == found and self._num_ended < goal:
            limit_s = deadline.remaining_s()
            if not self._is_answered:
                limit_s = min(limit_s, silent_until - time.monotonic())
            if limit_s <= 0:
                break
            self._changed.clear()
            with suppress(TimeoutError):  # the loop condition decides
                async with asyncio.timeout(None if limit_s == float("inf") else limit_s):
                    await self._changed.wait()
        return self._num_found != found

    def close(self) -> None:
        """Ends the search."""
        for handle in (self._check_handle, self._orphan_handle):
            if handle is not None:
                handle.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        deadline = Deadline.after(self._orphan_timeout_s)
        pauses = backoff(FIRST_PAUSE_S, RETURN_LONGEST_PAUSE_S, deadline)
        while not self._lifetime.is_closed and not deadline.expired():
            self._missed_news = False
            self._wanted.clear()
            self._num_begun += 1
            is_over = False
            try:
                is_over = await self._attempt(await self._address())
            except RpcdistError as exc:  # nobody is there yet, or it has just ended
                logger.debug("%s has not found the coordinator: %s", self._directory.me.name, exc)
            finally:
                self._is_answered = False
                self._num_ended = self._num_begun
                self._num_found += is_over
                self._changed.set()
            if is_over:
                if self._missed_news:  # sent before the answer to the announcement had come
                    await self._directory.refresh_async()
                return
            with suppress(TimeoutError):  # no call was waiting
                async with asyncio.timeout(next(pauses)):
                    await self._wanted.wait()
        if not self._lifetime.is_closed:
            logger.error(
                "%s has not found the coordinator for %.0f s, and looks no longer; it goes on with the workers that it "
                "knows",
                self._directory.me.name,
                self._orphan_timeout_s,
            )

    async def _address(self) -> str:
        """Where the next coordinator is; asked again at each attempt, since it may come up at another address."""
        look_up = self._look_up
        found: Future[str] = Future()

        def ask() -> None:
            try:
                found._complete(look_up())
            except Exception as exc:  # stores of others may raise anything, and the search waits for this answer
                found._fail(exc if isinstance(exc, RpcdistError) else DistStoreError(f"the store failed: {exc!r}"))

        self._submit(ask)
        return await found

    async def _attempt(self, address: str) -> bool:
        """Whether there is nothing more to look for."""
        directory = self._directory
        roster = directory.roster()
        me = directory.member(directory.me.id)
        limit_s = 3 * self._recovery_s  # it decides after twice that time at most
        peer, reply = await self._coordinator.announce(
            address, me, self._world_size, roster, self._joined, limit_s, self._on_answer
        )
        if reply is None:
            rank = directory.coordinator
            if peer.id == rank:  # it was only silent: the detectors take note of it
                self._router.revive(rank)
            lives = directory.is_living(rank) and directory.member(rank).identity == peer
            if lives:
                self._found()
            return lives
        if reply.outcome == Outcome.TIMED_OUT:
            return False
        try:
            directory.update(members_of(reply, directory.me, address, 0.0))
        except RpcdistError as exc:
            if peer != self._refused_by:  # each call to the lost one asks again
                logger.error(
                    "%s found another coordinator, which did not take it back: %s. It goes on with the workers that it "
                    "knows; end it if it belongs to an earlier job",
                    directory.me.name,
                    exc,
                )
            self._refused_by = peer
            return True
        self._joined = peer
        self._found()
        logger.warning("%s was taken back by the coordinator that started at %s", directory.me.name, address)
        self._router.watch(self._directory.coordinator, "the membership of the job")
        return True
