"""The interface between a transport, which moves the bytes of a group's operations, and the group's engine.

A transport carries the collective operations of one group over one medium: shared memory, sockets, or both. The engine
calls it with one operation at a time, in the same order on every rank, on the thread that runs the operation; so a
transport needs no lock. `SingleRankTransport` serves a group of one rank.

A thread that waits for other ranks spins as long as `SpinPolicy` says, then sleeps on descriptors (`Waker`, `Pollers`).
"""

from __future__ import annotations

import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.operation import Kind, Operation
from rpcdist.deadline import Deadline
from rpcdist.time_limits import CHECK_INTERVAL_S, SPIN_LIMIT_S
from rpcdist.transport._channels.polling_and_signals import is_polling_on
from rpcdist.transport._tls.tls_socket import NO_SIGPIPE


class TransportMismatch(Exception):
    """A peer's fingerprint or message size is not the expected one. The engine tells every rank.

    Attributes:
        views: the operation that each rank runs, as `describe_fingerprint` writes it; of at least two ranks.
    """

    def __init__(self, views: dict[int, str]) -> None:
        super().__init__(views)
        self.views = views


class TransportPeerLost(Exception):
    """The connection to a peer ended. The engine waits briefly for the watch to report why, and tells every rank."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


class TransportTimeout(Exception):
    """The operation's deadline passed.

    Attributes:
        waiting_for: the ranks from which data is missing, as far as this rank can see.
    """

    def __init__(self, waiting_for: frozenset[int]) -> None:
        super().__init__(waiting_for)
        self.waiting_for = waiting_for


class Control(ABC):
    """Tells a waiting transport whether the engine wants to end the operation. The engine makes one per operation."""

    deadline: Deadline
    sequence: int
    fingerprint: bytes

    @property
    @abstractmethod
    def wakeup_fd(self) -> int:
        """A descriptor that becomes readable when `check` would raise; poll it with the sockets. -1 for none."""

    @abstractmethod
    def check(self) -> None:
        """Raises the error that ends the operation, if the group failed or was aborted, here or on another rank.

        It makes no system call. Call it at least every 50 ms while waiting, and let other Python threads run in between
        (`time.sleep(0)`), since another thread notices the failure.
        """


class PartControl(Control):
    """The control of a whole operation, as one of its parts sees it."""

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
        """Runs a collective operation on the caller's thread, and blocks until this rank's part is done.

        A rank returns only when no other rank can still find a mismatch in this operation: a rank that only sends waits
        until its receivers have seen its fingerprint.

        Raises:
            TransportMismatch, TransportPeerLost, TransportTimeout: the transport is not used again after any of these.
            CollectiveError: from `control.check()`.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees sockets and memory. Idempotent; never waits; called when no operation is running."""


class SingleRankTransport(Transport):
    """Runs the operations of a group of size 1."""

    rank = 0
    size = 1

    def run(self, operation: Operation, control: Control) -> None:
        for output, source in zip(operation.outputs, operation.inputs, strict=True):
            if output.data_ptr() != source.data_ptr():
                output.copy_(source.view_as(output))
            if operation.reduce_op is not None:
                reduce_kernels.premultiply_to(operation, output, output)

    def close(self) -> None:
        """Does nothing."""


def mismatched_sizes(kind: Kind, rows: Sequence[Sequence[int]]) -> dict[int, str]:
    """Compares the sizes of chunks: a row for each rank has those of its inputs, then those of its outputs, in bytes.

    Returns:
        For each rank concerned, the sizes that differ; empty if all agree. The same on all ranks.
    """
    return _all_to_all(rows) if kind is Kind.ALL_TO_ALL else _reduce_scatter(rows)


def _all_to_all(rows: Sequence[Sequence[int]]) -> dict[int, str]:
    size = len(rows)
    for sender in range(size):
        for receiver in range(size):
            sent, taken = rows[sender][receiver], rows[receiver][size + sender]
            if sent != taken and sender == receiver:
                return {sender: f"sends {sent} bytes to itself and takes {taken}"}
            if sent != taken:
                return {
                    sender: f"sends {sent} bytes to rank {receiver}",
                    receiver: f"takes {taken} bytes from rank {sender}",
                }
    return {}


def _reduce_scatter(rows: Sequence[Sequence[int]]) -> dict[int, str]:
    size = len(rows)
    chunks = [list(row[:size]) for row in rows]
    if all(sizes == chunks[0] for sizes in chunks):
        return {}
    return {rank: f"has chunks of {', '.join(map(str, sizes))} bytes" for rank, sizes in enumerate(chunks)}


_MAX_POLLERS: Final = 64


class Waker:
    """Wakes a thread that sleeps in `poll`: poll `fileno()` for reading."""

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)

    def fileno(self) -> int:
        return self._read_end.fileno()

    def wake(self) -> None:
        """Wakes the sleeper; any thread may call it, and it never blocks."""
        try:
            self._write_end.send(b"!", NO_SIGPIPE)
        except OSError:  # the buffer is full, so the descriptor is readable already; or it is closed
            pass

    def drain(self) -> None:
        """Makes the descriptor unreadable until the next `wake`."""
        try:
            self._read_end.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._read_end.close()
        self._write_end.close()


class Pollers:
    """Caches `select.poll` objects, since a transport polls the same few sets of descriptors repeatedly.

    Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], select.poll] = {}

    def get(self, masks: dict[int, int], wakeup_fd: int) -> select.poll:
        """Returns a poller for these descriptors and events, and for reading `wakeup_fd` unless that is -1."""
        key = (wakeup_fd, *masks, *masks.values())
        poller = self._kept.get(key)
        if poller is None:
            poller = select.poll()
            for descriptor, mask in masks.items():
                poller.register(descriptor, mask)
            if wakeup_fd >= 0:
                poller.register(wakeup_fd, select.POLLIN)
            if len(self._kept) >= _MAX_POLLERS:
                self._kept.clear()
            self._kept[key] = poller
        return poller

    def wait(self, masks: dict[int, int], control: Control) -> set[int]:
        """Returns those of the descriptors that are ready; none if the operation's deadline has passed. Raises as
        `Control.check`.
        """
        poller = self.get(masks, control.wakeup_fd)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(1000 * CHECK_INTERVAL_S)} - {control.wakeup_fd}
            control.check()
            if ready or control.deadline.expired():
                return ready


_LEAST_PART: Final = 1 / 32  # of the longest time


class SpinPolicy:
    """Learns from recent waits how long to spin before sleeping. Used by one thread at a time.

    Waking up from a sleep takes long on a core that has gone idle. Spinning takes a core away from other threads, even
    with a `sched_yield` after each attempt. So a rank does not spin in a collective of more ranks than the host has
    cores, and spins little where other programs keep the cores busy, because waits are long there; never with
    `RPCDIST_POLLING=off`.

    Args:
        num_ranks: the ranks on this host that wait for each other.

    Attributes:
        spin_s: how long to try before the next sleep, in seconds.
    """

    def __init__(self, num_ranks: int) -> None:
        spins = num_ranks <= num_cores() and is_polling_on()
        self._longest_s = self.spin_s = SPIN_LIMIT_S if spins else 0.0

    def spin_succeeded(self) -> None:
        """Reports that the wait ended while spinning."""
        if self.spin_s < self._longest_s:
            self.spin_s = min(2 * self.spin_s, self._longest_s)

    def slept(self, waited_s: float) -> None:
        """Reports that the thread had to sleep, and how long the wait was."""
        if waited_s > self._longest_s:
            self.spin_s = max(self.spin_s / 2, self._longest_s * _LEAST_PART)
        else:
            self.spin_succeeded()  # spinning would have sufficed


def ranks_here(rank: int, addresses: Sequence[str]) -> int:
    """Returns the number of ranks on a rank's host, from the hub addresses of all ranks; 0 without addresses."""
    if not addresses:
        return 0
    host = addresses[rank].partition("/")[0].rpartition(":")[0] + ":"
    return sum(address.startswith(host) for address in addresses)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
