"""A new coordinator's questions to workers of the job before that have not come to it: which of them live?"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from rpcdist.ids import Identity
from rpcdist.rpc._membership.membership_recovery import MAX_NAMED, Recovery
from rpcdist.rpc._peers.directory import Member

MIN_AT_ONCE: Final = 16

Probe = Callable[[Member], Awaitable[bool]]
"""Asks a worker whether it is alive, in the incarnation that is known."""


def max_at_once() -> int:
    """How many questions this process asks at once, each of which takes a descriptor: a quarter of all.

    A question where nothing answers lasts for the peer timeout, and those that wait behind it may come too late: many.
    """
    num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_descriptors == resource.RLIM_INFINITY:
        return MAX_NAMED
    return min(max(num_descriptors // 4, MIN_AT_ONCE), MAX_NAMED)


class SurvivorQuestions:
    """Asks the missing workers of a recovery, from `begin` until `stop`. I/O loop only.

    Args:
        recovery: says who is missing, and keeps the answers.
        probe: asks one worker.
        present: who is in the job now.
        on_answer: is called after each answer.
    """

    def __init__(
        self,
        recovery: Recovery,
        probe: Probe,
        present: Callable[[], Iterable[Identity]],
        on_answer: Callable[[], object],
    ) -> None:
        self._recovery = recovery
        self._probe = probe
        self._present = present
        self._on_answer = on_answer
        self._max_at_once = max_at_once()
        self._asks = False
        self._asking: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<SurvivorQuestions, {len(self._asking)} asked now>"

    def begin(self) -> None:
        self._asks = True
        self.ask_more()

    def ask_more(self) -> None:
        """After somebody else has become known to be missing; before `begin` it does nothing."""
        while self._asks and len(self._asking) < self._max_at_once:
            member = self._recovery.next_to_ask(self._present())
            if member is None:
                return
            task = asyncio.get_running_loop().create_task(self._ask(member), name="rpcdist ask a survivor")
            self._asking.add(task)
            task.add_done_callback(self._on_done)

    def stop(self) -> None:
        self._asks = False
        for task in self._asking:
            task.cancel()

    async def _ask(self, member: Member) -> None:
        self._recovery.on_answer(member, await self._probe(member))
        self._on_answer()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self.ask_more()
