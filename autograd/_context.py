"""One worker's part of a distributed autograd context: its sends and recvs, its clock, and the gradients of its leaves.

Contexts, messages and passes have 64-bit ids; the high 16 bits are the worker that made the id.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch.autograd.graph import Node

from rpcdist._proto import autograd_pb2
from rpcdist.autograd._gradients import GradientTable, size_bytes
from rpcdist.autograd._message_nodes import Gradients, RecordedRecv, RecordedSend, attach
from rpcdist.errors import AutogradError, CallRefused, ContextNotFound, SerializationError
from rpcdist.rpc._agent import Agent
from rpcdist.time_limits import CONTEXT_DROP_DELAY_S
from rpcdist.transport.wire_messages import History, new_history

_top_hooks = cast(Any, torch._C._autograd)._top_saved_tensors_default_hooks

SpanKind = Literal["analysis", "run", "wait", "gate"]

MAX_SPANS = 1000
"""The number of latest spans that a context keeps on each worker."""


class Span(NamedTuple):
    """A part of the time that a backward pass took on one worker.

    Attributes:
        kind: "analysis" of the graph; "run", one call of torch's engine; "wait", with nothing to do; "gate", a wait in
            the middle of a run.
        peer: name of the worker whose message ended the wait; empty for the other kinds.
        start_s: the start, by the clock of that worker, in seconds since the epoch.
        duration_s: the duration in seconds, including a run's waits at gates.
        backward: number of the pass, the same on all workers.
    """

    worker: str
    kind: SpanKind
    peer: str
    start_s: float
    duration_s: float
    backward: int


WORKER_SHIFT = 48
MAX_NUMBER = (1 << WORKER_SHIFT) - 1
KEPT_RELEASES = 16384
MAX_CONTEXTS_OF_PEER = 16384
"""The limit of living contexts that one worker may bring here; its next one is refused."""
MAX_LIGHT_BYTES = 1 << 20
MAX_STAMP: Final = 1 << 62
"""The clock of a context continues from the value that a peer claims, and must fit into 64 bits on all workers."""


def make_id(worker_id: int, number: int) -> int:
    """The id made of a worker and a number, as a signed 64-bit number."""
    id = (worker_id << WORKER_SHIFT) | (number & MAX_NUMBER)
    return id - (1 << 64) if id >= 1 << 63 else id


def worker_of(id: int) -> int:
    """The worker that has made an id."""
    return (id >> WORKER_SHIFT) & 0xFFFF


class Context:
    """A distributed autograd context on one worker. Any thread may call any method.

    Args:
        id: the same on all workers.

    Attributes:
        id: the same on all workers.
        is_released: whether the context has ended; calls then go without it.
        sends: the messages that were sent, by id.
        known: the workers that this worker called in the context.
        callers: the workers that called this one in the context.
        brought_by: the worker whose message introduced the context here; None for this worker's own contexts.
        ended_passes: the backward passes that have ended, by id, with the error of each that failed.
        is_spent: whether the last pass has freed the graph's saved tensors.
        is_heavy_elsewhere: whether a worker on which this one began a pass holds much memory for the context.
        was_general: whether the last pass needed verdicts here; see `_general_part`.
        gpu_loans: for each message with gradients, its loans of GPU memory, which may have been returned.
        spans: how long the parts of its passes took: (pass, kind, peer or -1, start, end); see `_spans`.
    """

    def __init__(self, id: int, worker_id: int, next_message: Callable[[], int]) -> None:
        self.id = id
        self.is_released = False
        self.known: set[int] = set()
        self.callers: set[int] = set()
        self.brought_by: int | None = None
        self.ended_passes: dict[int, BaseException | None] = {}
        self.is_spent = False
        self.is_heavy_elsewhere = False
        self.was_general = False
        self.gpu_loans: list[list[int]] = []
        self.gradients = GradientTable()
        self.spans: deque[tuple[int, SpanKind, int, float, float]] = deque(maxlen=MAX_SPANS)
        self._worker_id = worker_id
        self._next_message = next_message
        self._lock = threading.Lock()
        self._clock = 0
        self.sends: dict[int, RecordedSend] = {}
        self._recvs: dict[int, tuple[RecordedRecv, Node]] = {}

    # ------------------------------------------------------------ for calls (`CallContext`)

    def for_call(self, to: int) -> tuple[Context | _Muted | None, int]:
        if to not in self.known:
            with self._lock:
                if not self.is_released and to != self._worker_id:
                    self.known.add(to)
        if self.is_released:
            return None, 0
        return (self if torch.is_grad_enabled() else _Muted(self)), self.id

    def sending(self, tensors: Sequence[torch.Tensor], to: int) -> History | None:
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if not wanted or self.is_released:
            return None
        if _top_hooks(False) is not None:
            _check_not_checkpointed()
        with self._lock:
            self._clock = stamp = self._clock + 1
        id = self._next_message()
        send = RecordedSend(id, to, stamp, wanted)
        with self._lock:
            self.sends[id] = send
        return new_history((id, stamp))

    def received(self, history: History | None, tensors: Sequence[torch.Tensor], sender: int) -> None:
        if history is None:
            return
        id, stamp = history
        if stamp > MAX_STAMP or (id >> WORKER_SHIFT) & 0xFFFF != sender & 0xFFFF:
            raise SerializationError(
                f"tensors that require grad arrived from worker {sender} as message {id:#x} at time {stamp} of their "
                "autograd context, which it cannot have sent"
            )
        arrived = [tensor for tensor in tensors if tensor.requires_grad]
        with self._lock:
            if stamp > self._clock:
                self._clock = stamp
            is_over = self.is_released
        if not arrived or is_over:
            return
        if _top_hooks(False) is not None:
            _check_not_checkpointed()
        recv = RecordedRecv(self.id, id, sender, stamp, len(arrived), sum(map(size_bytes, arrived)))
        node = attach(recv, arrived)
        with self._lock:
            self._recvs[id] = recv, node

    # ------------------------------------------------------------ for backward passes

    def snapshot(self) -> tuple[list[RecordedSend], list[RecordedRecv]]:
        """All sends and recvs so far."""
        with self._lock:
            return list(self.sends.values()), [recv for recv, _ in self._recvs.values()]

    def takes_part(self, worker_id: int) -> bool:
        """Whether a worker exchanged calls with this one in the context, or is this one."""
        return worker_id in self.known or worker_id in self.callers or worker_id == self._worker_id

    def to_original_devices(self, message: int, gradients: Gradients) -> Gradients:
        """The gradients of a sent message, on the devices of its tensors.

        Raises:
            ValueError: the numbers of gradients and tensors differ.
        """
        send = self.sends.get(message)
        if send is None or send.devices is None:
            return gradients
        return [None if one is None else one.to(device) for one, device in zip(gradients, send.devices, strict=True)]

    def neighbours(self) -> frozenset[int]:
        """The workers with which this one exchanged calls in the context."""
        with self._lock:
            return frozenset(self.known | self.callers)

    def partners(self) -> frozenset[int]:
        """The neighbours with which this worker exchanged tensors that need gradients, as far as it knows.

        A pass begins with them. A neighbour that is no partner here, but takes part, gets it from its own partners.
        """
        with self._lock:
            found = {send.to for send in self.sends.values()} | {recv.sender for recv, _ in self._recvs.values()}
        found.discard(self._worker_id)
        return frozenset(found)

    def end(self) -> bool:
        """Marks the context as ended; False if it had ended before. It frees nothing; see `drop`."""
        with self._lock:
            was_released, self.is_released = self.is_released, True
        return not was_released

    def drop(self) -> None:
        """Frees graph and gradients of a context that has ended. May run user code: not on the I/O loop."""
        with self._lock:
            # The graph is freed after the lock is released: finalizers of objects in it may run user code.
            dropped = self.sends, self._recvs, self.gradients
            self.sends, self._recvs, self.gradients = {}, {}, GradientTable()
        del dropped

    def is_light(self) -> bool:
        """Whether `drop` has little memory to free, because a backward pass has freed the saved tensors."""
        return self.is_spent and not self._has_many_gradients()

    @property
    def is_heavy(self) -> bool:
        """Whether a pass has left much memory in use for the context, here or where passes continued from here."""
        return self.is_heavy_elsewhere or self._has_many_gradients()

    def _has_many_gradients(self) -> bool:
        return self.gradients.size_bytes() > MAX_LIGHT_BYTES

    # ------------------------------------------------------------ torch's private names

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Node]:
        with self._lock:
            return {id: send.node for id, send in self.sends.items()}

    def _recv_functions(self) -> dict[int, Node]:
        with self._lock:
            return {id: node for id, (_, node) in self._recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        with self._lock:
            return set(self.known)


class _Muted:
    """The context of a call without grad mode: the callee runs in the context, but no gradient flows."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def for_call(self, to: int) -> tuple[Context | _Muted | None, int]:
        return self._context.for_call(to)

    def sending(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Records nothing."""

    def received(self, history: History | None, tensors: Sequence[torch.Tensor], sender: int) -> None:
        """Makes the results leaves without grad, as if the function had been called here under `no_grad`."""
        if history is not None:
            for tensor in tensors:
                if tensor.is_leaf:
                    tensor.requires_grad_(False)


class ContextTable:
    """The contexts of one worker. Any thread may call any method."""

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self._next_message = itertools.count(make_id(worker_id, 1)).__next__  # the number of each is in its low bits
        self._contexts: dict[int, Context] = {}
        # Ids of contexts that have ended: a late call must not revive its context.
        # With a worker: contexts that it has released before this worker knew them.
        self._released: OrderedDict[int | tuple[int, int], None] = OrderedDict()
        self._num_brought: Counter[int] = Counter()  # by worker: living contexts that its calls brought here
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contexts)

    def new(self) -> Context:
        """A context with a secret id: a worker that names it has received it."""
        while True:
            id = make_id(self._worker_id, secrets.randbelow(MAX_NUMBER) + 1)
            if id not in self._contexts and (context := self.join(id)) is not None:
                return context

    def join(self, id: int, peer: int | None = None) -> Context | None:
        """The context; made if this worker does not know it yet, None if it has ended.

        Raises:
            CallRefused: the context is new, and `peer` has brought `MAX_CONTEXTS_OF_PEER` others.
        """
        context = self._contexts.get(id) or self._make(id, peer)
        if context is not None and peer is not None and peer != self._worker_id:
            context.callers.add(peer)
        return context

    def _make(self, id: int, peer: int | None) -> Context | None:
        with self._lock:
            context = self._contexts.get(id)
            if context is not None or id in self._released or (id, peer) in self._released:
                return context
            if peer is not None:
                if self._num_brought[peer] >= MAX_CONTEXTS_OF_PEER:
                    raise CallRefused(
                        f"worker {peer} has {MAX_CONTEXTS_OF_PEER} open autograd contexts on this worker, which is "
                        "the limit. Does each `with autograd.context()` on that worker end?"
                    )
                self._num_brought[peer] += 1
            context = self._contexts[id] = Context(id, self._worker_id, self._next_message)
            context.brought_by = peer
            return context

    def refuse(self, id: int, peer: int) -> None:
        """A worker has released a context that is not known here: later messages of that worker do not make it."""
        with self._lock:
            self._note_released((id, peer))

    def find(self, id: int) -> Context:
        """Raises `ContextNotFound`."""
        context = self._contexts.get(id)
        if context is None:
            raise ContextNotFound(id)
        return context

    def look_up(self, id: int) -> Context | None:
        return self._contexts.get(id)

    def release(self, id: int) -> Context | None:
        """Removes and returns a context; None if there is none. Remembers that it has ended."""
        with self._lock:
            self._note_released(id)
            context = self._contexts.pop(id, None)
            if context is not None and context.brought_by is not None:
                self._num_brought[context.brought_by] -= 1
                if not self._num_brought[context.brought_by]:
                    del self._num_brought[context.brought_by]
            return context

    def _note_released(self, key: int | tuple[int, int]) -> None:
        self._released[key] = None
        if len(self._released) > KEPT_RELEASES:
            self._released.popitem(last=False)

    def oldest(self, most: int | None = None) -> list[Context]:
        return list(islice(list(self._contexts.values()), most))


MAX_PUT_OFF = 256  # contexts


class Releases:
    """Ended contexts that have not been reported to neighbours yet. Any thread may call any method.

    Contexts that hold little memory are reported together, with a delay: a message for each would cost a training loop
    more than the rest of a step's end.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._put_off: dict[int, list[int]] = {}  # contexts by neighbour
        self._count = 0
        self._is_timed = False

    def tell(self, workers: Iterable[int], context_id: int, at_once: bool) -> None:
        """Reports to workers that a context has ended; `at_once`: now, and not within `CONTEXT_DROP_DELAY_S`."""
        if at_once:
            for worker in workers:
                self._send(worker, [context_id])
            return
        with self._lock:
            for worker in workers:
                self._put_off.setdefault(worker, []).append(context_id)
            self._count += 1
            is_full = self._count >= MAX_PUT_OFF
            starts_timer = not self._is_timed and not is_full and bool(self._put_off)
            self._is_timed = self._is_timed or starts_timer
        if is_full:
            self.flush()
        elif starts_timer:
            self._agent.call_later(CONTEXT_DROP_DELAY_S, self._time_is_over)

    def flush(self) -> None:
        """Sends the delayed reports."""
        with self._lock:
            due, self._put_off, self._count = self._put_off, {}, 0
        for worker, contexts in due.items():
            for start in range(0, len(contexts), MAX_PUT_OFF):  # more may have been added since the check
                self._send(worker, contexts[start : start + MAX_PUT_OFF])

    def _time_is_over(self) -> None:
        with self._lock:
            self._is_timed = False
        self.flush()

    def _send(self, worker: int, contexts: list[int]) -> None:
        if not self._agent.is_closed:
            message = autograd_pb2.AutogradMessage(context=contexts[0])
            message.release.SetInParent()
            message.release.others.extend(contexts[1:])
            self._agent.router.send_control(worker, message)


def _check_not_checkpointed() -> None:
    """Raises AutogradError in a checkpointed region: its recomputation would repeat the call in the backward pass."""
    hooks = _top_hooks(False)
    if hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", ""):
        raise AutogradError(
            "an RPC whose tensors require grad was made inside a checkpointed region (torch.utils.checkpoint), which "
            "would repeat it during the backward pass; leave the call out of the region, and checkpoint what is "
            "before, behind, or inside the remote function"
        )
