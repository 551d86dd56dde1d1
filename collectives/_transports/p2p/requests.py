"""The sends and receives of a group, and the messages that arrived before their receive."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from rpcdist.collectives._operations.operation import dtype_code
from rpcdist.collectives._transports.memory import copy_bytes, memory_at
from rpcdist.collectives._transports.p2p.message_format import Header, describe_view
from rpcdist.collectives.work import Work

__all__ = ["MessageTitle", "PostedReceive", "Request", "UnexpectedMessage"]


class MessageTitle(NamedTuple):
    """Names a send or receive in errors; made text only when it is needed.

    Attributes:
        verb: "send" or "recv".
        number: the number of the call among those of its kind, on this rank.
        rank: the other rank in the world; None for any.
        tag: the message's.
        group: the group's name.
    """

    verb: str
    number: int
    rank: int | None
    tag: int
    group: str

    def __str__(self) -> str:
        whom = "any rank" if self.rank is None else f"rank {self.rank}"
        to = "to" if self.verb == "send" else "from"
        return f"{self.verb} #{self.number} {to} {whom} with tag {self.tag} of group {self.group!r}"


class Request:
    """A send or a receive. The messenger's lock guards it, except for `settle`, which runs once and without the lock.

    Attributes:
        title: its name in errors, e.g. "recv #3 from rank 1 with tag 0 of group 'default'".
        tensor: read or written until `settled`.
        peer: the other rank in the group; None for any.
        timeout_s: the time limit, in seconds; infinity for none.
        deadline_at: when that time is over, on the monotonic clock.
        error: the error with which it failed; set before `done`.
        source: the sender's rank, for a receive that is done.
        done: it is complete; no socket reads or writes its tensor any more.
        settled: all waiters have been notified.
    """

    __slots__ = (
        "_title",
        "address",
        "arrived",
        "code",
        "deadline_at",
        "done",
        "error",
        "finish",
        "leads",
        "peer",
        "settled",
        "size_bytes",
        "source",
        "tag",
        "tensor",
        "timeout_s",
        "waiter",
        "work",
    )

    def __init__(self, title: object, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float) -> None:
        self._title = title
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        self.timeout_s = timeout_s
        self.deadline_at = time.monotonic() + timeout_s
        self.address = tensor.data_ptr()
        self.size_bytes = tensor.nbytes
        self.code = dtype_code(tensor.dtype)
        self.arrived: UnexpectedMessage | None = None
        self.finish: Callable[[], None] | None = None
        self.work: Work | None = None
        self.waiter: threading.Event | None = None
        self.leads = False
        self.error: BaseException | None = None
        self.source = -1
        self.done = False
        self.settled = False

    def __repr__(self) -> str:
        return f"<{self.title}{': done' if self.done else ''}>"

    @property
    def title(self) -> str:
        return str(self._title)

    @property
    def view(self) -> str:
        """Describes its tensor for errors, e.g. "16 bytes of float32"."""
        return describe_view(self.code, self.size_bytes)

    def settle(self) -> None:
        """Notifies all waiters. Call it once, when `done`, without the lock: it runs callbacks of the caller."""
        if self.error is None:
            try:
                if self.arrived is not None:
                    self.arrived.copy_to(self.address)
                if self.finish is not None:
                    self.finish()
            except Exception as exc:
                self.error = exc
        self.settled = True
        if self.work is not None:
            if self.error is None:
                self.work.complete(self.source)
            else:
                self.work.fail(self.error)
        if self.waiter is not None:  # set by the waiting thread before it reads `settled`
            self.waiter.set()

    def await_settled(self) -> None:
        """Waits until it is settled, on a thread that saw `done` while another thread may be about to settle it."""
        if not self.settled:
            self.waiter = threading.Event()
            if not self.settled:
                self.waiter.wait()


class PostedReceive(Request):
    """A receive; a message may be received directly into its tensor."""

    __slots__ = ()

    def fill(self, address: int) -> None:
        """Copies the whole payload from an address."""
        copy_bytes(self.address, address, self.size_bytes)

    def space(self) -> memoryview:
        """The memory for the payload, to be filled part by part."""
        return memory_at(self.address, self.size_bytes)


class UnexpectedMessage:
    """A message that arrived, or begins to, before its receive.

    Args:
        source: the sender's rank.
        header: the header of the message.

    Attributes:
        complete: the whole payload has come.
        receive: the receive that it was matched with before it was complete.
    """

    __slots__ = ("_data", "_tensor", "complete", "header", "receive", "size_bytes", "source")

    def __init__(self, source: int, header: Header) -> None:
        self.source = source
        self.header = header
        self.size_bytes = header.size_bytes
        self.complete = False
        self.receive: PostedReceive | None = None
        self._data = b""
        self._tensor: torch.Tensor | None = None

    def fill(self, address: int) -> None:
        """Copies the whole payload from an address."""
        if self.size_bytes < 1 << 16:
            self._data = ctypes.string_at(address, self.size_bytes)
        else:
            self.space()
            assert self._tensor is not None
            copy_bytes(self._tensor.data_ptr(), address, self.size_bytes)

    def space(self) -> memoryview:
        """Allocates memory for the payload, whose pages become resident as they are filled."""
        self._tensor = torch.empty(self.size_bytes, dtype=torch.uint8)
        return memory_at(self._tensor.data_ptr(), self.size_bytes)

    def copy_to(self, address: int) -> None:
        """Copies the payload into the memory of its receive."""
        copy_bytes(address, self._data if self._tensor is None else self._tensor.data_ptr(), self.size_bytes)
