"""The interface of a transport, which moves the bytes of a group's operations, and what it asks the group's engine.

A transport carries the collective operations of one group over one medium: shared memory, sockets, or both. The engine
calls it with one operation at a time, in the same order on every rank, on whichever thread runs the operation; so a
transport needs no lock. `SingleRankTransport` serves a group of one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.operation import Operation
from rpcdist.deadline import Deadline


class TransportMismatch(Exception):
    """A peer's fingerprint, or the size of its message, is not the expected one. The engine tells every rank.

    Attributes:
        views: for each rank the operation that it runs, as `describe_fingerprint` writes it; at least two ranks.
    """

    def __init__(self, views: dict[int, str]) -> None:
        super().__init__(views)
        self.views = views


class TransportPeerLost(Exception):
    """The connection with a peer ended. The engine waits shortly for the watch to say why, and tells every rank."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


class TransportTimeout(Exception):
    """The deadline passed.

    Attributes:
        waiting_for: the ranks from which data is missing, as far as this rank can see.
    """

    def __init__(self, waiting_for: frozenset[int]) -> None:
        super().__init__(waiting_for)
        self.waiting_for = waiting_for


class Control(ABC):
    """The questions of a transport to the engine while it waits. The engine makes one for each operation."""

    deadline: Deadline
    sequence: int
    fingerprint: bytes

    @property
    @abstractmethod
    def wakeup_fd(self) -> int:
        """A descriptor that becomes readable when `check` would raise; poll it with your sockets. -1: there is none."""

    @abstractmethod
    def check(self) -> None:
        """Raises the error that ends the operation, because the group failed or was aborted, here or on another rank.

        It makes no system call. Call it at least every 50 ms while waiting, and let other Python threads run in between
        (`time.sleep(0)`): the failure is noticed by another thread.
        """


class PartControl(Control):
    """The control of a whole operation, as one of its parts sees it."""

    __slots__ = ("_whole", "deadline", "fingerprint", "sequence")

    def __init__(self, whole: Control, sequence: int, fingerprint: bytes) -> None:
        self._whole = whole
        self.deadline = whole.deadline
        self.fingerprint = fingerprint
        self.sequence = sequence

    @property
    def wakeup_fd(self) -> int:
        return self._whole.wakeup_fd

    def check(self) -> None:
        self._whole.check()


class Transport(ABC):
    """The medium of one group.

    Attributes:
        reduces_many: whether ALL_REDUCE takes any number of tensors.
    """

    rank: int
    size: int
    reduces_many: bool = False

    @abstractmethod
    def run(self, operation: Operation, control: Control) -> None:
        """Carries out a collective operation; blocks, on the caller's thread, until this rank's part is done.

        A rank returns only when no other rank can find this operation mismatched any more: a rank that only sends waits
        until its receivers have seen its fingerprint.

        Raises:
            TransportMismatch, TransportPeerLost, TransportTimeout: after any of them the transport is never used again.
            CollectiveError: from `control.check()`.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and memory; idempotent; never waits; called once no operation runs."""


class SingleRankTransport(Transport):
    """Runs the operations of a group of size 1."""

    rank = 0
    size = 1

    def run(self, operation: Operation, control: Control) -> None:
        for output, source in zip(operation.outputs, operation.inputs, strict=True):
            if output.data_ptr() != source.data_ptr():
                output.copy_(source.view_as(output))
            if operation.reduce_op is not None:
                reduce_kernels.premultiply(operation, output)

    def close(self) -> None:
        """Does nothing: nothing is open."""
