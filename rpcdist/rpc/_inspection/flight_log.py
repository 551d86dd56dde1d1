"""Writes the flight file of a worker when its job fails: its last calls, its current state, and the events it noticed.

The file is written when the program fails with an exception or ends without `shutdown`, when a connection breaks, when
a worker is lost or reports its failure, and on SIGUSR2. `python -m rpcdist report FOLDER` reads the files of all
workers together. A header comes first, then a line of JSON for each event, for each call, and for the facts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rpcdist._counters import OK
from rpcdist._proto import rpc_pb2
from rpcdist.errors import RpcdistError, WorkerLost, described_error
from rpcdist.ids import Identity
from rpcdist.inspection import WorkerFacts, fields_of
from rpcdist.private_files import add_failure_listener, remove_failure_listener, write_flight_file
from rpcdist.rpc._inspection.call_records import CallRecorder
from rpcdist.rpc._peers.network import AnySession, Lifetime
from rpcdist.rpc._values.exceptions import traceback_of
from rpcdist.time_limits import FLIGHT_NOTICE_S, SLOW_CHECK_INTERVAL_S
from rpcdist.transport._channels.polling_and_signals import SignalShield

logger = logging.getLogger(__name__)

VERSION: Final = 1
MAX_EVENTS: Final = 200
MAX_TEXT: Final = 2000
_ABRUPT: Final = ("broke", "no sign of life")
"""Words in the reasons for the end of connections that neither side has closed."""


@dataclass(eq=False, repr=False)
class FlightLog:
    """Collects the events of an agent, and writes its flight file; `sessions` lists the open connections."""

    _recorder: CallRecorder
    _facts: Callable[[], WorkerFacts]
    _name_of: Callable[[int], str]
    _sessions: Callable[[], list[Any]]
    _lifetime: Lifetime
    _events: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _has_failed: bool = False
    _handles_signal: bool = False
    # Of all agents in this process: each file has the stacks of all threads, and simulations have hundreds of agents.
    _written_at: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        self._began = time.strftime("%Y%m%dT%H%M%S")
        self._num_kills = _num_kills()
        self._handler = self._on_signal  # the shield compares by identity, and each access makes a new bound method

    def start_listening(self) -> None:
        """Begins to listen for failures of the program and for the signal; on the thread that starts the agent."""
        add_failure_listener(self.failed)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            SignalShield.harmless.append(self._handler)
            signal.signal(signal.SIGUSR2, self._handler)
            self._handles_signal = True

    def stop(self) -> None:
        remove_failure_listener(self.failed)
        if self._handles_signal and threading.current_thread() is threading.main_thread():
            self._handles_signal = False
            if signal.getsignal(signal.SIGUSR2) is self._handler:
                signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            SignalShield.harmless.remove(self._handler)

    def _on_signal(self, number: int, frame: object) -> None:
        # The interrupted code may hold a lock, so another thread collects the facts. `threading.Thread` would itself
        # take a lock.
        self._note("signal", signal.Signals(number).name)
        with suppress(RuntimeError):  # no thread can be started; the signal may come again
            start_new_thread(lambda: self._write(self._facts()), ())

    # ------------------------------------------------------------ failures of this process

    def failed(self, error: BaseException) -> None:
        """Notifies the other workers that the program fails, writes the file, and gives them a moment. Any thread."""
        if self._has_failed or self._lifetime.is_closed:
            return
        self._has_failed = True
        text = described_error(error)[:MAX_TEXT]
        self._note("failed", text, traceback=traceback_of(error)[-MAX_TEXT:])
        has_sent = False
        for session in self._all_sessions():
            try:
                session.send(rpc_pb2.Message(failure_notice=rpc_pb2.FailureNotice(reason=text)))
                session.flush()
                has_sent = True
            except RpcdistError as exc:
                logger.debug("%s could not be notified of the failure: %s", session.peer.name, exc)
        self._write(self._facts())
        if has_sent:
            time.sleep(FLIGHT_NOTICE_S)  # the launcher may end the others once it knows of the failure

    def ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.failed(error)
        elif not self._lifetime.is_closed and not self._has_failed:
            self._note("ended", "the process ended without rpc.shutdown()")
            self._write(self._facts())

    def _all_sessions(self) -> list[Any]:
        while True:
            try:
                return self._sessions()
            except RuntimeError:  # the I/O loop changed the set during the copy
                continue

    # ------------------------------------------------------------ failures of others, on the I/O loop

    def on_broken(self, session: AnySession, reason: str) -> None:
        """Writes the file if a connection broke; called before its calls fail, so that the file shows them."""
        if any(word in reason for word in _ABRUPT):
            self._on_failure("broken", f"the connection with {session.peer.name!r} ended: {reason}")

    def on_lost(self, identity: Identity, error: WorkerLost) -> None:
        self._on_failure("lost", f"worker {identity.name!r} is lost: {error.reason}")

    def on_notice(self, session: AnySession, message: rpc_pb2.Message, buffers: Any) -> None:
        self._on_failure("heard", f"worker {session.peer.name!r} reported its failure: {message.failure_notice.reason}")

    def _on_failure(self, kind: str, text: str) -> None:
        if self._lifetime.is_closed:
            return
        self._note(kind, text)
        now = time.monotonic()
        if now - FlightLog._written_at >= SLOW_CHECK_INTERVAL_S:
            FlightLog._written_at = now
            self._write_later(self._facts())

    # ------------------------------------------------------------ the file

    def _note(self, kind: str, text: str, **more: str) -> None:
        self._events.append({"kind": kind, "time_ns": time.time_ns(), "text": text[:MAX_TEXT], **more})

    def _write_later(self, facts: WorkerFacts) -> None:
        try:
            threading.Thread(target=self._write, args=(facts,), name="rpcdist-flight-log", daemon=True).start()
        except RuntimeError:  # the system's limit of threads, or the end of the interpreter
            self._write(facts)

    def _write(self, facts: WorkerFacts) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        head = {
            "version": VERSION,
            "worker": facts.worker,
            "id": facts.id,
            "job": facts.job,
            "host": facts.host,
            "pid": facts.pid,
            "time_ns": time.time_ns(),
            "num_kills": max(0, _num_kills() - self._num_kills),
        }
        lines = [json.dumps(head), *(json.dumps({"event": event}) for event in list(self._events))]
        for call in self._recorder:
            record = {
                "id": call.id,
                "is_served": call.is_served,
                "peer": self._name_of(call.peer),
                "function": call.function,
                "began_ns": int(call.began * 1e9) + offset_ns,
                "ended_ns": int(call.ended * 1e9) + offset_ns,
                "outcome": call.outcome if call.outcome == OK else call.outcome[:MAX_TEXT],
            }
            lines.append(json.dumps({"call": record}))
        lines.append(json.dumps({"facts": fields_of(facts)}))
        write_flight_file(
            f"calls{facts.id}-{self._began}-{os.getpid()}.jsonl", f"calls{facts.id}-*.jsonl", "\n".join(lines) + "\n"
        )


def _num_kills() -> int:
    """The number of processes that the kernel of this host has killed for lack of memory since it booted."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
