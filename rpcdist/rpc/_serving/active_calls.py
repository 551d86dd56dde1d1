"""The calls that a worker is handling: to find one again, to wait for their end, to cancel them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from rpcdist._counters import OK
from rpcdist.errors import ProtocolViolation
from rpcdist.rpc._inspection import call_spans
from rpcdist.rpc._inspection.call_recorder import CallRecorder, EndedCalls
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._serving.active_call import CALL_BYTES, ActiveCall

NUM_UNCOUNTED: Final = 64
"""While a worker serves fewer calls than that, a small one counts in no account, which saves it two locks."""
UNCOUNTED_BYTES: Final = CALL_BYTES + 4096


class ActiveCalls:
    """By session and number. Any thread may use it.

    Args:
        recorder: remembers how calls ended; None for not at all.
    """

    def __init__(self, recorder: CallRecorder | None = None) -> None:
        self.ended = EndedCalls(None if recorder is None else recorder.served)
        self.num_served = 0
        self._calls: dict[tuple[MessageSink, int], ActiveCall] = {}
        self._ended = threading.Condition()
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[ActiveCall]:
        return iter(list(self._calls.values()))

    def by_age(self) -> Iterator[ActiveCall]:
        """See `CallTable.by_age`."""
        try:
            yield from self._calls.values()
        except RuntimeError:
            return

    def __repr__(self) -> str:
        return f"<ActiveCalls [{len(self._calls)}]>"

    def add(self, active: ActiveCall) -> str | None:
        """Keeps a call that has come; if its caller has too much here already, does not, and returns the reason.

        Raises:
            ProtocolViolation: its number is that of another one.
        """
        session, calls = active.session, self._calls
        if len(calls) < NUM_UNCOUNTED and active.weight <= UNCOUNTED_BYTES:
            active.weight = 0
        elif (refusal := session.account.add(active.weight, "came with a call")) is not None:
            return refusal
        if calls.setdefault((session, active.id), active) is not active:
            session.account.subtract(active.weight)
            raise ProtocolViolation(f"two calls came under the number {active.id}, and the first has not ended")
        self.num_served += 1
        return None

    def find(self, session: MessageSink, number: int) -> ActiveCall | None:
        """The call with a number on a session; None if it is over."""
        return self._calls.get((session, number))

    def remove(self, active: ActiveCall, outcome: str = OK) -> None:
        """A call is over; once more does no harm. `outcome` is for those that are told of it."""
        session = active.session
        key = session, active.id
        # A call that was refused may have come under the number of one that is here.
        if self._calls.get(key) is active and self._calls.pop(key, None) is not None:
            if active.weight:
                session.account.subtract(active.weight)
            if (note := self.ended.note) is not None:
                note(
                    (
                        active.id,
                        session.peer.id,
                        active.what,
                        active.arrived,
                        time.monotonic(),
                        outcome,
                        active.run_began,
                    )
                )
            if active.span is not None and (spans := call_spans.exporter) is not None:
                spans.end(active.span, active.what, session.peer.name, outcome)
        if self._num_waiting:
            with self._ended:
                self._ended.notify_all()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until no call is being handled; False when the time is over."""
        return self._wait(lambda: not self._working(), timeout_s)

    def wait_gathered(self, timeout_s: float) -> bool:
        """Waits until the workers that wait here for others have been answered; False when the time is over."""
        return self._wait(lambda: not any(active.counts_as_idle for active in self), timeout_s)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._ended:
            self._num_waiting += 1
            try:
                return self._ended.wait_for(condition, timeout_s)
            finally:
                self._num_waiting -= 1

    def _working(self) -> list[ActiveCall]:
        return [active for active in self if active.counts_as_work]

    def give_up(self, began: float, limit_s: float) -> list[str]:
        """Forgets the calls that have not ended for so long after their callers gave up, and after `began`."""
        now = time.monotonic()
        unwanted = [active for active in self._working() if max(active.unwanted_since, began) + limit_s <= now]
        for active in unwanted:
            self.remove(active, "given up by shutdown")
        return [repr(active) for active in unwanted]

    @property
    def only_streams(self) -> bool:
        """Whether all that is left to do here is to produce items of streams."""
        return all(active.producer is not None for active in self._working())

    def describe(self) -> list[str]:
        """The calls that are being handled, for messages."""
        return [repr(active) for active in self._working()]

    def cancel_all(self) -> None:
        """Cancels what is left."""
        for active in self:
            active.cancel()
