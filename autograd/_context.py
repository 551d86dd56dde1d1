"""One worker's part of a distributed autograd context: its sends and recvs, its clock, and the gradients of its leaves.

Contexts are identified by 64-bit numbers; the high 16 bits are the worker that made them.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

from rpcdist._proto import value_pb2
from rpcdist.autograd._autograd_errors import AutogradError, ContextNotFound
from rpcdist.autograd._gradients import GradientTable
from rpcdist.autograd._message_nodes import RecordedRecv, RecordedSend, attach

if TYPE_CHECKING:
    from rpcdist.autograd._passes import BackwardPass

__all__ = ["Context", "ContextTable", "id_limit", "make_id", "worker_of"]

WORKER_SHIFT = 48
MAX_NUMBER = (1 << WORKER_SHIFT) - 1
KEPT_RELEASES = 16384
MAX_LIGHT_BYTES = 1 << 20


def make_id(worker_id: int, number: int) -> int:
    """An id as a signed 64-bit number."""
    id = (worker_id << WORKER_SHIFT) | (number & MAX_NUMBER)
    return id - (1 << 64) if id >= 1 << 63 else id


def worker_of(id: int) -> int:
    """The worker that made an id."""
    return (id >> WORKER_SHIFT) & 0xFFFF


def id_limit(worker_id: int) -> int:
    """The greatest id that a worker can make."""
    return make_id(worker_id, MAX_NUMBER)


class Context:
    """See the module. Any thread may call any method.

    Attributes:
        id: of the context, the same on all workers.
        is_released: it is over; calls are made without it.
        known: the workers that were called in it from here.
        callers: the workers that called this one in it.
        passes: backward passes under way, by id.
        ended_passes: those that ended, with the error if they failed.
        is_spent: the last of them has freed the graph's saved tensors.
    """

    def __init__(self, id: int, worker_id: int, next_message: Callable[[], int]) -> None:
        self.id = id
        self.is_released = False
        self.known: set[int] = set()
        self.callers: set[int] = set()
        self.passes: dict[int, BackwardPass] = {}
        self.ended_passes: dict[int, BaseException | None] = {}
        self.is_spent = False
        self.gradients = GradientTable()
        self._worker_id = worker_id
        self._next_message = next_message
        self._lock = threading.Lock()
        self._clock = 0
        self._sends: dict[int, RecordedSend] = {}
        self._recvs: dict[int, tuple[RecordedRecv, Node]] = {}
        self._muted = _Muted(self)

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"{len(self._sends)} sends, {len(self._recvs)} recvs"
        return f"<Context {self.id} [{state}]>"

    # ------------------------------------------------------------ what calls need (`CallContext`)

    def for_call(self) -> Context | _Muted:
        return self if torch.is_grad_enabled() else self._muted

    def joined_by(self, worker_id: int) -> int:
        with self._lock:
            if self.is_released:
                return 0
            if worker_id != self._worker_id:
                self.known.add(worker_id)
            return self.id

    def sending(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], to: int) -> None:
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if not wanted or self.is_released:
            return
        _check_not_checkpointed()
        with self._lock:
            self._clock += 1
            stamp = self._clock
        send = RecordedSend(self._next_message(), to, stamp, wanted)
        with self._lock:
            self._sends[send.id] = send
        value.autograd.message = send.id
        value.autograd.stamp = stamp

    def received(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], sender: int) -> None:
        if not value.HasField("autograd"):
            return
        leg = value.autograd
        arrived = [tensor for tensor in tensors if tensor.requires_grad]
        with self._lock:
            self._clock = max(self._clock, leg.stamp)
            is_over = self.is_released
        if not arrived or is_over:
            return
        _check_not_checkpointed()
        recv = RecordedRecv(self.id, leg.message, sender, leg.stamp, len(arrived))
        node = attach(recv, arrived)
        with self._lock:
            self._recvs[recv.id] = recv, node

    # ------------------------------------------------------------ what passes need

    def snapshot(self) -> tuple[list[RecordedSend], list[RecordedRecv]]:
        """All sends and recvs so far."""
        with self._lock:
            return list(self._sends.values()), [recv for recv, _ in self._recvs.values()]

    def neighbours(self) -> frozenset[int]:
        """The workers that this one exchanged calls with in the context."""
        with self._lock:
            return frozenset(self.known | self.callers)

    def called_by(self, worker_id: int) -> None:
        if worker_id != self._worker_id:
            with self._lock:
                self.callers.add(worker_id)

    def end(self) -> bool:
        """Marks the context as over; False if it was. Nothing is freed: that is for `drop`."""
        with self._lock:
            was_released, self.is_released = self.is_released, True
        return not was_released

    def drop(self) -> None:
        """Frees graph and gradients of a context that is over. May run code of users, so not on the I/O loop."""
        with self._lock:
            # The graph dies after the lock: user objects may live in it.
            dropped = self._sends, self._recvs, self.gradients
            self._sends, self._recvs, self.gradients = {}, {}, GradientTable()
        del dropped

    def is_light(self) -> bool:
        """Whether little memory waits for `drop`: a backward pass has freed what the graph had kept."""
        return self.is_spent and self.gradients.size_bytes() <= MAX_LIGHT_BYTES

    # ------------------------------------------------------------ torch's private names

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Node]:
        with self._lock:
            return {id: send.node for id, send in self._sends.items()}

    def _recv_functions(self) -> dict[int, Node]:
        with self._lock:
            return {id: node for id, (_, node) in self._recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        with self._lock:
            return set(self.known)


class _Muted:
    """The context, for a call that is made without grad mode: the callee runs in it, but no gradient flows."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def for_call(self) -> Context | _Muted:
        return self._context.for_call()

    def joined_by(self, worker_id: int) -> int:
        return self._context.joined_by(worker_id)

    def sending(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], to: int) -> None:
        """Records nothing."""

    def received(self, value: value_pb2.Value, tensors: Sequence[torch.Tensor], sender: int) -> None:
        """What comes back has no history, as if the function had been called here under `no_grad`."""
        if value.HasField("autograd"):
            for tensor in tensors:
                if tensor.is_leaf:
                    tensor.requires_grad_(False)


class ContextTable:
    """The contexts of one worker. Any thread may call any method."""

    def __init__(self, worker_id: int, first_number: int) -> None:
        self._worker_id = worker_id
        self._numbers = itertools.count(first_number)
        self._messages = itertools.count(1)
        self._contexts: dict[int, Context] = {}
        # Those that ended. A call that was overtaken by the end of its context must not bring it back to life.
        self._released: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contexts)

    def __repr__(self) -> str:
        return f"<ContextTable [{len(self._contexts)} alive]>"

    def new(self) -> Context:
        return self.join(make_id(self._worker_id, next(self._numbers) % MAX_NUMBER + 1)) or self.new()

    def next_message(self) -> int:
        return make_id(self._worker_id, next(self._messages))

    def join(self, id: int) -> Context | None:
        """The context, made if it is not known here; None if it is over."""
        with self._lock:
            context = self._contexts.get(id)
            if context is None and id not in self._released:
                context = self._contexts[id] = Context(id, self._worker_id, self.next_message)
            return context

    def find(self, id: int) -> Context:
        """Raises `ContextNotFound`."""
        context = self._contexts.get(id)
        if context is None:
            raise ContextNotFound(id)
        return context

    def look_up(self, id: int) -> Context | None:
        return self._contexts.get(id)

    def release(self, id: int) -> Context | None:
        """Takes a context out; None if it is not there. Its id is remembered in any case."""
        with self._lock:
            self._released[id] = None
            if len(self._released) > KEPT_RELEASES:
                self._released.popitem(last=False)
            return self._contexts.pop(id, None)

    def all(self) -> Iterable[Context]:
        return list(self._contexts.values())


def _check_not_checkpointed() -> None:
    """Recomputing a checkpointed region would make the call once more, in the middle of the backward pass."""
    autograd: Any = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", ""):
        raise AutogradError(
            "an RPC whose tensors require grad was made inside a checkpointed region (torch.utils.checkpoint), which "
            "would repeat it during the backward pass; leave the call out of the region, and checkpoint what is "
            "before, behind, or inside the remote function"
        )
