"""A worker's part in a backward pass that needs verdicts: carries out what the pure state machine `PassState` decides.

Threads: the events are handled one after the other by the thread of the pass. A run that blocks has a pool thread of
its own.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from rpcdist.autograd._direct_part import MAX_HELD_BYTES
from rpcdist.autograd._graph_analysis import MAX_NODES_BEFORE_SENDING, Analysis
from rpcdist.autograd._group_run import GroupRun
from rpcdist.autograd._message_nodes import Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._pass_events import (
    ChildDone,
    Decided,
    Finished,
    GradientArrived,
    GroupEnded,
    PassEvent,
    PeerBegan,
    Run,
    SendBegin,
    SendDone,
    Started,
)
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.autograd._pass_sender import PassOwner
from rpcdist.autograd._verdicts import PassState
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.time_limits import GRADIENT_HOLD_LIMIT_S


class GeneralPart:
    """One worker's part.

    Args:
        owner: the pass.
        analysis: the worker's graph.
    """

    def __init__(self, owner: PassOwner, analysis: Analysis) -> None:
        self._owner = owner
        self._analysis = analysis
        self._state = PassState(owner.me, owner.options.fast)
        self._gradients = ArrivedGradients()
        self._ready: list[Run] = []  # executed by the thread that handles events
        self._held_bytes = 0  # of gradients that wait for the end of the turn
        self._held_since = 0.0

    def start(self, neighbours: Collection[int], early: Sequence[tuple[int, PassMessage]]) -> None:
        """Begins, with the messages that came before; `neighbours` are all workers to begin with."""
        for sender, message in early:  # kept until the start, so that the first messages have its consequences
            self.take(sender, message)
        self._handle(Started(self._analysis.local, frozenset(neighbours), self._owner.parent))

    def take(self, sender: int, message: PassMessage) -> None:
        """Handles a neighbour's message; only on the thread that handles the events of the pass."""
        events: list[PassEvent] = []
        if message.begins:
            events.append(PeerBegan(sender, message.is_child, message.named()))
        elif message.verdicts:
            events.append(Decided(sender, message.verdicts))
        if message.messages:
            events += self._keep_gradients(zip(message.messages, message.gradients, strict=True))
        if message.is_done:
            events.append(ChildDone(sender))
        if events:
            self._handle(*events)

    def next_step(self) -> Any:
        """What to do when all events are handled: the runs that they made ready; None if nothing is left."""
        return self._execute_ready if self._ready else None

    def waits_for(self) -> dict[int, str]:
        """The reasons why the pass has not ended on this worker, by the worker that it waits for."""
        return self._state.waits_for()

    def close(self) -> None:
        """Ends all waits: the pass is over."""
        self._gradients.close()

    # ------------------------------------------------------------ the state machine

    def _handle(self, *events: PassEvent) -> None:
        owner = self._owner
        for action in self._state.handle(*events):
            if isinstance(action, Run):
                if action.pending:
                    owner.flush()  # its gates wait for what other workers do with these messages
                    owner.submit(partial(owner.guarded, partial(self._execute_blocking, action)))
                else:
                    self._ready.append(action)
            elif isinstance(action, Finished):
                owner.finish()
            elif isinstance(action, SendDone):
                owner.finish()
            else:
                with owner.lock:
                    message = owner.message_to(action.to)
                    if isinstance(action, SendBegin):
                        message.begins, message.is_child = True, action.child
                        message.verdicts.update(action.received)
                    else:
                        message.verdicts.update(action.verdicts)

    def _execute_ready(self) -> None:
        """Runs all ready groups in one engine call: a hundred small groups would cost a hundred calls."""
        ready = self._ready
        run = ready[0] if len(ready) == 1 else reduce(Run.with_, ready)
        ready.clear()
        takes_long = self._takes_long(run)
        if takes_long:
            self._owner.flush()
        self._execute(run, takes_long)
        self._handle(*map(GroupEnded, run.groups))

    def _takes_long(self, run: Run) -> bool:
        """Whether the other workers should prepare meanwhile: for large gradients, or while a large graph runs."""
        analysis = self._analysis
        if sum([analysis.recvs[id].size_bytes for id in run.recvs]) > MAX_HELD_BYTES:
            return True
        if len(analysis.masks) <= MAX_NODES_BEFORE_SENDING:
            return False
        num_nodes = sum([size for bit, size in enumerate(analysis.sizes) if run.used >> bit & 1])
        return num_nodes > MAX_NODES_BEFORE_SENDING

    def _execute_blocking(self, run: Run) -> None:
        self._execute(run, True)
        self._owner.post(partial(self._handle, *map(GroupEnded, run.groups)))

    def _execute(self, run: Run, takes_long: bool) -> None:
        began_s = time.time()
        GroupRun(self, self._analysis, run, takes_long).execute(self._owner.options.retain_graph)
        self._owner.spans.append(("run", -1, began_s, time.time()))

    # ------------------------------------------------------------ gradients (`RunOwner`)

    def _keep_gradients(self, arrived: Any) -> list[PassEvent]:
        at_home = self._owner.context.at_home
        gradients = {message: at_home(message, found) for message, found in arrived}
        self._gradients.add(gradients)
        return [GradientArrived(message, _mask_of(found)) for message, found in gradients.items()]

    @property
    def root_gradients(self) -> Sequence[torch.Tensor]:
        return self._owner.root_gradients

    def gradient(self, message: int) -> Gradients:
        return self._gradients[message]

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        owner = self._owner
        began_s = time.time()
        arrived = self._gradients.wait(send.id, owner.options.deadline)
        owner.spans.append(("gate", send.to, began_s, time.time()))
        if arrived is not None:
            return arrived
        if owner.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from owner.error
        raise DeadlineExceeded(
            f"the gradient of what was sent to worker {owner.name_of(send.to)!r} did not come in time"
        )

    def collect(self, captured: Collection[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._owner.context.gradients.add(captured)

    def flush(self) -> None:
        self._held_since, self._held_bytes = 0.0, 0
        self._owner.flush()

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]], at_once: bool) -> None:
        owner = self._owner
        own = [(recv.id, gradients) for recv, gradients in answers if recv.sender == owner.me]
        if own:
            owner.post(partial(self._take_own, own))
        now = time.monotonic()
        with owner.lock:
            self._held_since = self._held_since or now
            for recv, gradients in answers:
                if recv.sender != owner.me:
                    owner.message_to(recv.sender).add_gradients(recv.id, gradients)
                    self._held_bytes += recv.size_bytes
            is_due = self._held_bytes > MAX_HELD_BYTES or now - self._held_since > GRADIENT_HOLD_LIMIT_S
        if at_once or is_due:
            self.flush()

    def _take_own(self, own: Sequence[tuple[int, Gradients]]) -> None:
        """Handles gradients of messages that this worker sent to itself."""
        self._handle(
            *self._keep_gradients(
                (id, [None if one is None else one.detach() for one in gradients]) for id, gradients in own
            )
        )


def _mask_of(gradients: Gradients) -> int:
    """Which of the tensors of a message have a gradient."""
    mask = 0
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            mask |= 1 << index
    return mask


class ArrivedGradients:
    """Gradients by message. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._changed: threading.Condition | None = None  # made for the first gate; most passes have none
        self._gradients: dict[int, Gradients] = {}
        self._is_closed = False

    def __getitem__(self, message: int) -> Gradients:
        return self._gradients[message]

    def add(self, gradients: Mapping[int, Gradients]) -> None:
        with self._lock:
            self._gradients.update(gradients)
            if self._changed is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits: the pass is over."""
        with self._lock:
            self._is_closed = True
            if self._changed is not None:
                self._changed.notify_all()

    def wait(self, message: int, deadline: Deadline) -> Gradients | None:
        """The gradients of a message; blocks until they are there. None when the time or the pass is over."""
        with self._lock, blocking():
            if self._changed is None:
                self._changed = threading.Condition(self._lock)
            self._changed.wait_for(lambda: message in self._gradients or self._is_closed, deadline.wait_s())
            return self._gradients.get(message)
