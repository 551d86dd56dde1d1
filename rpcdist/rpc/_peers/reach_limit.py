"""How long a worker is tried before it counts as dead: one rule for calls, and for the coordinator's questions."""

from __future__ import annotations

import time

from rpcdist.errors import ConnectFailed, TransportError
from rpcdist.own_shortage import own_shortage
from rpcdist.time_limits import LAST_ATTEMPT_SHARE, MIN_ATTEMPT_S, ONE_WAY_IN_PEER_TIMEOUTS, REFUSED_GRACE_S

MAX_LATE_ATTEMPTS = 5


def was_refused(exc: TransportError) -> bool:
    """Whether nobody listens at that port."""
    return isinstance(exc, ConnectFailed) and "refused" in exc.reason.lower()


class ReachLimit:
    """For the attempts to reach one worker; begins now.

    Args:
        timeout_s: the peer timeout.
        last_seen: when the worker was last heard of, in monotonic seconds, if that counts: silence and reconnecting
            share one timeout.

    Attributes:
        shortage: what this process lacked itself at the last attempt, if that failed; then it judges nobody, for as
            long as that lasts.
    """

    def __init__(self, timeout_s: float, last_seen: float | None = None) -> None:
        self._grace_s = LAST_ATTEMPT_SHARE * timeout_s
        self._started = time.monotonic()
        # A worker that was silent before its connection broke has used up some of its time, but one attempt is due.
        self._limit = max((last_seen or self._started) + timeout_s, self._started + self._grace_s)
        self._longest_heard = self._started + ONE_WAY_IN_PEER_TIMEOUTS * timeout_s
        self._num_failed = 0
        self.shortage: str | None = None

    @property
    def waited_s(self) -> float:
        """Since the first attempt began."""
        return time.monotonic() - self._started

    @property
    def attempt_s(self) -> float:
        """How long the next attempt may take."""
        return max(self._limit - time.monotonic(), MIN_ATTEMPT_S)

    def is_over(self, exc: TransportError, is_heard: bool = False) -> bool:
        """Whether the worker is dead, or out of reach for good, now that an attempt has failed.

        Args:
            is_heard: whether the worker shows on a connection of its own that it lives.
        """
        now = time.monotonic()
        if now > self._limit + self._grace_s and self._num_failed < MAX_LATE_ATTEMPTS:
            self._limit = now + self._grace_s  # this process was held up: it judges nobody
            self._longest_heard = max(self._longest_heard, self._limit)
        self._num_failed += 1
        self.shortage = own_shortage(exc)
        if self.shortage is not None:  # the attempt says nothing of the other one, and one more is due afterwards
            self._limit = max(self._limit, now + self._grace_s)
            self._longest_heard = max(self._longest_heard, self._limit)
            return False
        if is_heard:
            return now >= self._longest_heard
        # A closed port is the word of the worker's host; silence may be a busy network, and takes longer.
        return now >= self._limit or (was_refused(exc) and now - self._started >= REFUSED_GRACE_S)
