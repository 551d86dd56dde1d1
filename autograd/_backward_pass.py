"""One backward pass on one worker: feeds events to the pure state machine `PassState`, and carries out its actions.

Threads: `post` may be called on any thread, also on the I/O loop, and never waits. Events are handled one after the
other, in the turns of one thread (`_pass_turns`); a run that blocks has a pool thread of its own. What the other
workers must hear of a turn is sent together at its end, or before anything that may take long (`_outbox`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from typing import TypeVar

import torch
from torch.autograd.graph import GradientEdge

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._arrived_gradients import ArrivedGradients
from rpcdist.autograd._autograd_errors import BackwardError
from rpcdist.autograd._context import Context, worker_of
from rpcdist.autograd._graph_analysis import Analysis, analyse
from rpcdist.autograd._group_run import GroupRun
from rpcdist.autograd._message_nodes import Gradients, RecordedRecv, RecordedSend
from rpcdist.autograd._outbox import MAX_HELD_BYTES, Outbox
from rpcdist.autograd._pass_events import (
    Finished,
    GradientArrived,
    GroupEnded,
    PassEvent,
    PassOptions,
    Run,
    SendBegin,
    SendDone,
    Started,
)
from rpcdist.autograd._pass_sender import PassSender
from rpcdist.autograd._pass_turns import Job, PassTurns
from rpcdist.autograd._spans import PassClock
from rpcdist.autograd._verdicts import PassState
from rpcdist.autograd._wire_format import decode_begin_options, decode_events, encode_error, encode_merged
from rpcdist.errors import DeadlineExceeded
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values import LargeBuffer
from rpcdist.rpc._values.exceptions import set_cause, text_of, traceback_of

__all__ = ["BackwardPass"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Packed = tuple[int, autograd_pb2.AutogradMessage, Sequence[LargeBuffer]]
"""A message that is ready to be sent: to whom, and with which large buffers."""

MAX_NODES_BEFORE_SENDING = 64
"""A worker with a larger graph lets the others know what it has decided before it runs the graph."""


class BackwardPass(PassTurns):
    """One backward pass on one worker.

    The first message of a pass may overtake the one that begins it, so a pass exists before its options are known:
    `prepare` sets them, and `start` follows.

    Args:
        sender: sends the messages of the pass.
        context: the context whose gradients are computed.
        id: of the pass, the same on all workers; its high bits are the worker where it began.
        on_end: called once, when the pass has ended on this worker; on any thread.
        root_gradients: the gradients of the roots, on the worker where the pass began.

    Attributes:
        error: the error that ended the pass; None while it runs, and if it succeeded.
        is_over: whether the pass has ended on this worker.
        is_finishing: whether nothing is left to do here, except for sending the last messages.
    """

    def __init__(
        self,
        sender: PassSender,
        context: Context,
        id: int,
        on_end: Callable[[BackwardPass], object],
        root_gradients: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(sender.submit, PassClock())
        self.context = context
        self.id = id
        self.root_gradients = root_gradients
        self.error: BaseException | None = None
        self.is_finishing = False
        self._on_end = on_end
        self._sender = sender
        self._state = PassState(sender.id)
        self._analysis: Analysis | None = None
        self._counts: dict[int, int] = {}
        self._options = PassOptions()
        self._gradients = ArrivedGradients()
        self._outbox = Outbox()
        self._involved: set[int] = set()
        self._ready: list[Run] = []  # executed by the thread that handles events
        self._links: dict[int, MessageSink] = {}  # by neighbour: the session that carries the messages of both
        self._ending = threading.Lock()

    def __repr__(self) -> str:
        return f"<BackwardPass {self.id:#x} of {self.context!r}: {self._state!r}>"

    # ------------------------------------------------------------ beginning

    def prepare(self, options: PassOptions) -> None:
        """Sets the options, once, before `start`."""
        self._state.fast = options.fast
        self._options = options

    @property
    def is_started(self) -> bool:
        return self._state.is_started

    def start(self, roots: Sequence[GradientEdge], neighbours: frozenset[int], parent: int | None) -> None:
        """Analyses the graph, and sends the begin messages. Takes time: not on the I/O loop."""
        began_s = time.time()
        analysis = self._analysis = analyse(self.context.id, roots, *self.context.snapshot())
        self._clock.took("analysis", began_s)
        self._counts = {recv.id: recv.count for recv in analysis.recvs.values()}
        self._involved |= neighbours
        self.handle(Started(analysis.local, neighbours, parent))

    # ------------------------------------------------------------ events

    def went_by(self, to: int, session: MessageSink) -> None:
        """The session by which a message to a neighbour went. Its answers will come there."""
        self._links[to] = session
        self.follow(session)

    def can_wait(self, sender: int, message: autograd_pb2.AutogradMessage) -> bool:
        """Whether nothing follows from a message yet: it is a begin whose verdicts are all open."""
        analysis = self._analysis
        if analysis is None or not self.is_started or not message.HasField("begin"):
            return False
        if message.HasField("verdicts") or message.HasField("gradients") or message.HasField("done"):
            return False
        received = message.begin.received
        num_sends = sum(send.to == sender for send in analysis.local.sends)
        is_open = not (received.used or received.unused or received.partly)
        return is_open and 0 < num_sends == len(received.open)

    def take(
        self,
        sender: int,
        message: autograd_pb2.AutogradMessage,
        decode: Callable[[], Sequence[Gradients]] | None,
        via: MessageSink | None = None,
    ) -> None:
        """Handles a neighbour's message; only on the thread that handles the events of the pass.

        Args:
            sender: the neighbour.
            message: what it says.
            decode: returns its gradients, for each message of the graph; None if it has none.
            via: the session by which it came, and by which what this worker says goes.
        """
        if via is not None:
            self.went_by(sender, via)
        self._clock.heard(sender)
        if message.HasField("done") and message.done.is_heavy:
            self.context.is_heavy_elsewhere = True
        arrived = [] if decode is None else self._keep_gradients(message.gradients.messages, decode())
        starts = message.HasField("begin") and not self.is_started
        if starts:
            self.prepare(decode_begin_options(message.begin))
        self.handle(*decode_events(message, sender, arrived))
        if starts:  # what was kept until now is handled at the start, so that the first messages have its consequences
            self.start((), self.context.partners() | {sender}, sender)

    def run_here(self, first: Job) -> None:
        """Calls `first`, then handles events on this thread until the pass is over; raises what ended it.

        Ctrl-C and other exceptions of this thread end the pass everywhere.
        """
        try:
            self.run_turns(first, self._options.deadline)
        except BaseException as exc:
            self.fail(exc)
            raise
        if self.error is not None:
            raise self.error

    def next_step(self) -> Job | None:
        """What to do when all events are handled: the runs that they made ready."""
        if self.is_over:
            return None
        if self._ready:
            return self._execute_ready
        return self.flush if self.is_finishing and not self._outbox else None

    def expire(self) -> None:
        """Fails the pass because its deadline is over; for a pass without a thread that waits for it."""
        self.post(self.expire_here)

    def expire_here(self) -> None:
        """`expire` on the thread that handles the events."""
        self.fail(self._late())

    def _late(self) -> DeadlineExceeded:
        names = self._sender.name_of
        waits = [f"worker {names(peer)!r} {why}" for peer, why in sorted(self._state.waits_for().items())]
        return DeadlineExceeded(
            "RPC ran for more than set timeout and will now be marked with an error: backward of autograd context "
            f"{self.context.id} on worker {names(self._sender.id)!r} ({'; '.join(waits) or 'a gate waits'})"
        )

    def guarded(self, job: Callable[[], T]) -> T | None:
        """What a job returns; it is not called once the pass is over, and the pass fails if the job does."""
        if self.is_over:
            return None
        try:
            return job()
        except BaseException as exc:
            self.fail(exc)  # also for a `sys.exit` in a hook: the other workers wait for this one
            if not issubclass(type(exc), Exception):
                raise
            return None

    # ------------------------------------------------------------ the state machine

    def handle(self, *events: PassEvent) -> None:
        """Handles events; only on the thread that handles the events of the pass."""
        for action in self._state.handle(*events):
            if isinstance(action, Run):
                if action.pending:
                    self.flush()  # its gates wait for what other workers do with these messages
                    self._sender.submit(self.guarded, partial(self._execute_blocking, action))
                else:
                    self._ready.append(action)
            elif isinstance(action, Finished):
                self.is_finishing = True
            else:
                self._outbox.add(action)
                if isinstance(action, SendBegin):
                    self._involved.add(action.to)
                elif isinstance(action, SendDone):
                    self.is_finishing = True

    def flush(self) -> None:
        """Sends what the other workers must hear; any thread. At the end of the pass, this ends it."""
        send = self.pack()
        if send is not None:
            send()

    def pack(self) -> Job | None:
        """`flush` in two parts: takes and encodes what the others must hear, and returns what sends it."""
        if self.is_over:
            return None  # it failed, and `abort` has told the others
        ends = self.is_finishing
        packed: list[Packed] = []
        for to, merged in self._outbox.take().items():
            message = self._message()
            encode_merged(merged, self._options, self._counts, message)
            if merged.done:
                message.done.is_heavy = self.context.is_heavy
            large = self._sender.encode_gradients(message, merged.gradients) if merged.gradients else ()
            packed.append((to, message, large))
        if not packed and not ends:
            return None
        if packed and not self.has_source:
            self.follow(self._sender.session_with(packed[-1][0]))
        return partial(self._send_packed, packed, ends)

    def _send_packed(self, packed: Sequence[Packed], ends: bool) -> None:
        try:
            for to, message, large in packed:
                if self.error is None:  # else `abort` has told the others
                    self._sender.send(to, message, self, large, self._links.get(to))
        except BaseException as exc:
            self.fail(exc)
            if not issubclass(type(exc), Exception):
                raise
        if ends:
            self._end(None)

    def _message(self) -> autograd_pb2.AutogradMessage:
        return autograd_pb2.AutogradMessage(context=self.context.id, backward=self.id)

    def _execute_ready(self) -> None:
        """Runs all ready groups in one engine call: a hundred small groups would cost a hundred calls."""
        ready = self._ready
        run = ready[0] if len(ready) == 1 else reduce(Run.with_, ready)
        ready.clear()
        takes_long = self._takes_long(run)
        if takes_long and self._outbox:
            self.flush()
        self._execute(run, takes_long)
        self.handle(*map(GroupEnded, run.groups))

    def _takes_long(self, run: Run) -> bool:
        """Whether the other workers should prepare meanwhile: for large gradients, or while a large graph runs."""
        analysis = self._analysis
        assert analysis is not None  # there are no runs before `start`
        held_bytes = sum([analysis.recvs[id].size_bytes for id in run.recvs])
        if held_bytes > MAX_HELD_BYTES:
            return True
        if len(analysis.masks) <= MAX_NODES_BEFORE_SENDING:
            return False
        num_nodes = sum([size for bit, size in enumerate(analysis.sizes) if run.used >> bit & 1])
        return num_nodes > MAX_NODES_BEFORE_SENDING

    def _execute_blocking(self, run: Run) -> None:
        self._execute(run, True)
        self.post(partial(self.handle, *map(GroupEnded, run.groups)))

    def _execute(self, run: Run, takes_long: bool) -> None:
        assert self._analysis is not None
        began_s = time.time()
        GroupRun(self, self._analysis, run, takes_long).execute(self._options.retain_graph)
        self._clock.took("run", began_s)

    # ------------------------------------------------------------ gradients

    def _keep_gradients(self, messages: Sequence[int], arrived: Sequence[Gradients]) -> list[PassEvent]:
        pairs = zip(messages, arrived, strict=True)
        gradients = {message: self.context.at_home(message, found) for message, found in pairs}
        self._gradients.add(gradients)
        return [GradientArrived(message, _mask_of(found)) for message, found in gradients.items()]

    def gradient(self, message: int) -> Gradients:
        """The gradient of a send that has arrived."""
        return self._gradients[message]

    def wait_for_gradient(self, send: RecordedSend) -> Gradients:
        """The gradient of a send; blocks until it has arrived. Raises when the pass fails or its deadline is over."""
        began_s = time.time()
        arrived = self._gradients.wait(send.id, self._options.deadline)
        self._clock.took("gate", began_s, send.to)
        if arrived is not None:
            return arrived
        if self.error is not None:
            raise RuntimeError("the backward pass was ended while a gate waited for a gradient") from self.error
        raise DeadlineExceeded(
            f"the gradient of what was sent to worker {self._sender.name_of(send.to)!r} did not come in time"
        )

    def collect(self, captured: Collection[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds the gradients of leaves to the context."""
        self.context.gradients.add(captured)

    def answer(self, answers: Sequence[tuple[RecordedRecv, Gradients]], at_once: bool) -> None:
        """Sends the gradients of recvs to the senders of their messages, at the end of the turn unless `at_once`."""
        me = self._sender.id
        own = [(recv.id, gradients) for recv, gradients in answers if recv.sender == me]
        if own:
            self.post(partial(self._take_own, own))
            answers = [answer for answer in answers if answer[0].sender != me]
        if answers and (self._outbox.add_gradients(answers) or at_once):
            self.flush()

    def _take_own(self, own: Sequence[tuple[int, Gradients]]) -> None:
        """Handles gradients of messages that this worker sent to itself."""
        values = [[None if one is None else one.detach() for one in gradients] for _, gradients in own]
        self.handle(*self._keep_gradients([id for id, _ in own], values))

    # ------------------------------------------------------------ the end

    def involves(self, worker_id: int) -> bool:
        """Whether the pass fails if that worker is lost."""
        return worker_id in self._involved or worker_id in (self._state.parent, worker_of(self.id))

    def fail(self, exc: BaseException) -> None:
        """Ends the pass on all workers, because of an error on this one; any thread."""
        if self.is_over:
            return
        error = exc
        if not issubclass(type(exc), BackwardError | DeadlineExceeded):  # a user's exception may break `isinstance`
            me = self._sender.id
            error = BackwardError(me, self._sender.name_of(me), type(exc).__qualname__, text_of(exc))
            set_cause(error, exc)
        self.abort(error, traceback_of(exc))

    def abort(self, error: BaseException, text: str = "") -> None:
        """Ends the pass with an error, and sends it to the other workers; any thread."""
        if not self._end(error):
            return
        message = self._message()
        encode_error(error, self._sender.id, self._sender.name_of(self._sender.id), message.aborted, text)
        self._sender.spread(self._involved | {worker_of(self.id)}, message)

    def _end(self, error: BaseException | None) -> bool:
        with self._ending:
            if self.is_over:
                return False
            self.error = error
            self.is_over = True
        self.wake()
        self._gradients.close()
        self.context.ended_passes[self.id] = error
        self.context.spans.extend([(self.id, *part) for part in self._clock.parts])
        self.context.is_spent = error is None and not self._options.retain_graph
        self._on_end(self)
        return True


def _mask_of(gradients: Gradients) -> int:
    """Which of the tensors of a message have a gradient."""
    mask = 0
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            mask |= 1 << index
    return mask
